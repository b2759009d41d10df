#!/bin/bash
printf "paper stamped" > /app/stamped
