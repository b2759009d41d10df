set -e
mkdir -p /app/out /data /logs/artifacts
echo 42 > /app/out/answer
touch /app/scratch /etc/planted /data/noise.log /logs/artifacts/extra
ln -s /etc/passwd /app/out/peek
