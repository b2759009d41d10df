#!/bin/bash
mkdir -p /logs/verifier
if [ "$(cat /app/who /app/collected)" = "$(printf '1000\n99')" ] && [ "$(id -u)" = 4321 ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
