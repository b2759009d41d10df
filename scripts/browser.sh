#!/usr/bin/env bash
# Chromium for the tests of the web page, where we may install it; without it they are skipped, and say so.
set -euo pipefail
if command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null; then
  exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "setup: no chromium, so the web page is not tested (sudo apt-get install -y chromium)" >&2
  exit 0
fi
echo "setup: installing chromium"
log=.venv/browser.log
if ! scripts/apt.sh "$log" chromium; then
  tail -n 5 "$log" >&2
  echo "setup: chromium could not be installed; the web page is not tested" >&2
fi
