#!/bin/bash
set -e
[ "$HELP" = yes ]; echo "$GREETING" > /workspace/value/value; mkdir -p /app; cp /workspace/value/value /app/
