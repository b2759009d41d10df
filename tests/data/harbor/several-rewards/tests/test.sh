#!/bin/bash
a=$(wc -l < /app/a 2>/dev/null || echo 0); b=$(wc -l < /app/b 2>/dev/null || echo 0)
echo "{\"first\": $([ $a = 1 ] && echo 1 || echo 0), \"second\": $([ $b = 2 ] && echo 1.0 || echo 0.5)}" > /logs/verifier/reward.json
echo 77 > /logs/verifier/reward.txt
