#!/usr/bin/env bash
# Builds what the tests marked `trainers` and `make train-demo` need: torch, TRL and verl, in an environment of their own.
#   scripts/trainers.sh DIR      leaves DIR/venv (1.7 GB)
# Exit code 0: it is ready. Anything else: it is not, and the last line says why.
# rollcage itself is not in there, only what it needs: run with PYTHONPATH=src.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
name=trainers
# shellcheck source=scripts/pinned_venv.sh
. "$here/pinned_venv.sh"

[ "$#" = 1 ] || stop "usage: scripts/trainers.sh DIR"
enter "$1"
install "TRL and verl" "$here/trainers.txt"
say "ready in $dir"
