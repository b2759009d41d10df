#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/stamped)" = "paper stamped" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
