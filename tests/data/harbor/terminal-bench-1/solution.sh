#!/bin/bash
touch /app/old
