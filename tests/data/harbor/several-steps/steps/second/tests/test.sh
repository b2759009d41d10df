#!/bin/bash
. /tests/common.sh
# What the first verifier did is gone, and what the agent did in the first step is there.
[ ! -e /tests/left-behind ] && [ ! -e /etc/left-behind ] && [ -e /app/first ] && [ -e /etc/kept ] || exit 1
if [ "$(cat /app/second 2>/dev/null)" = "$WANTED" ]; then earned 1; else earned 0; fi
