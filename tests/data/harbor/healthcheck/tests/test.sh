#!/bin/bash
mkdir -p /logs/verifier
# The agent starts once the third check has passed, and not before.
if [ -e /app/done ] && [ "$(wc -l < /app/asked)" = 3 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
