#!/bin/bash
set -e
[ "$(pwd)" = /app ]; pwd > where; [ "$(id -u)" = 0 ]; [ "$HOME" = /root ]; [ -f /solution/solve.sh ]
