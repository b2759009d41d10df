echo one > /app/first
touch /etc/kept
