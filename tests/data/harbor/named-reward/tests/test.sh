#!/bin/bash
[ -d /app/done ] && r=1 || r=0
echo "{\"reward\": $r, \"speed\": 40, \"size\": -3}" > /logs/verifier/reward.json
