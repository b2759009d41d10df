#!/bin/bash
# Its own box: nothing of the agent's is here but the artifacts.
[ "$SIDE" = judge ] && [ "$PWD" = /judge ] && [ ! -e /app/scratch ] && [ ! -e /etc/planted ] || exit 1
[ ! -e /data/noise.log ] && [ ! -e /app/out/peek ] || exit 1
mkdir -p /logs/verifier
if [ "$(cat /app/out/answer 2>/dev/null)" = 42 ] && [ -s /data/collected ] && [ -e /logs/artifacts/extra ]; then
  echo '{"reward": 1}'
else
  echo '{"reward": 0}'
fi > /logs/verifier/reward.json
