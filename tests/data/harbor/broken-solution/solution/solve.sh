#!/bin/bash
set -e
echo "no such tool: frobnicate" >&2; exit 3
