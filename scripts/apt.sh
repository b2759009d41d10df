#!/usr/bin/env bash
# Installs packages of Debian's by name, as root. Waits while somebody else installs: tests ask for theirs side by side.
#   scripts/apt.sh LOG PACKAGE...      what apt-get prints goes into the file LOG
set -euo pipefail
log="$1"
shift
export DEBIAN_FRONTEND=noninteractive

exec 9</var/lib/apt
flock 9
# Others do not know that lock. apt-get waits for those that install, but not for those that update.
for try in 1 2 3 4 5 6; do
  if apt-get update >"$log" 2>&1; then
    break
  fi
  [ "$try" != 6 ] || exit 1
  sleep 5
done
exec apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "$@" >"$log" 2>&1
