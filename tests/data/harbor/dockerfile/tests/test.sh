#!/bin/bash
cmp -s /etc/marker /app/marker && r=1 || r=0; echo $r > /logs/verifier/reward.txt
