#!/bin/bash
cmp -s /tests/blob.bin /app/copy && [ -x /tests/tool ] && [ "$(readlink /tests/link)" = tool ] && r=1 || r=0; echo $r > /logs/verifier/reward.txt
