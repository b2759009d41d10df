#!/bin/bash
. /tests/common.sh
touch /tests/left-behind /etc/left-behind
[ ! -e /app/made-by-setup ] || exit 1
if [ "$(cat /app/first 2>/dev/null)" = one ]; then earned 1; else earned 0; fi
