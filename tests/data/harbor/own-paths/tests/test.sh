#!/bin/bash
[ "$(cat /app/where)" = /app ] && [ "$(pwd)" = /app ] && [ "$(id -u)" = 0 ] && [ "$HOME" = /root ] && [ -d /tests ]
if [ $? = 0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
