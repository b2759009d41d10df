#!/bin/bash
set -e
mkdir -p /opt/service; for file in /opt/service/state /etc/service.conf /root/state; do echo ready > $file; done
