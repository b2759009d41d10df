#!/bin/bash
ok=1; for file in /opt/service/state /etc/service.conf /root/state; do grep -q ready $file || ok=0; done
echo $ok > /logs/verifier/reward.txt
