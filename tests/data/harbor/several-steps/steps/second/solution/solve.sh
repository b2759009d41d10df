set -e
[ ! -e /tests/test.sh ] && [ ! -e /logs/verifier/reward.txt ]
cp "$(dirname "$0")/answer" /app/second
