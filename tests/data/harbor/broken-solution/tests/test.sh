#!/bin/bash
[ -e /app/x ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt
