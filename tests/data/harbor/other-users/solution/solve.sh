#!/bin/bash
id -u > /app/who
