#!/bin/bash
[ "$(cat /app/value)" = bonjour ] && [ "$MODE" = strict ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt
