#!/usr/bin/env bash
# Sets up a checkout: the virtual environment, the system's parts, the agent. Skips what is there already.
#   scripts/setup.sh        what `rollcage run` needs
#   scripts/setup.sh dev    what the tests need too
# Needs root only for system packages; without it, says which command to run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=.venv/setup.log
bin=.venv/bin

say() { printf '%s\n' "setup: $*"; }
stop() { printf '%s\n' "setup: $*" >&2; exit 1; }

# Runs a command quietly; shows the end of its output only if it fails.
quietly() {
  mkdir -p .venv
  if ! "$@" >"$log" 2>&1; then
    tail -n 15 "$log" >&2
    stop "failed: $* (all of its output is in $log)"
  fi
}

# Installs system packages by name where we may; otherwise names the command and stops.
system() {
  if ! command -v apt-get >/dev/null; then
    stop "missing: $*; install them with this system's package manager, then run it again"
  elif [ "$(id -u)" != 0 ]; then
    stop "missing: $*; run: sudo apt-get install -y $* - then run it again"
  fi
  say "installing $*"
  mkdir -p .venv
  if ! scripts/apt.sh "$log" "$@"; then
    tail -n 15 "$log" >&2
    stop "failed: apt-get install $* (all of its output is in $log)"
  fi
}

python_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in "${PYTHON:-python3}" python3.14 python3.13 python3.12 python3.11; do
    if command -v "$candidate" >/dev/null && python_new_enough "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  stop "no Python 3.11 or newer was found; install one (apt-get install python3 python3-venv) or name it: PYTHON=/path/to/python3 make setup"
}

virtual_environment() {
  if [ -x "$bin/python" ] && python_new_enough "$bin/python" && "$bin/python" -m pip --version >/dev/null 2>&1; then
    return
  fi
  local python
  python=$(find_python)
  if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    system "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
  fi
  say "making .venv with $("$python" --version)"
  rm -rf .venv
  quietly "$python" -m venv .venv
}

packages() {
  local stamp want what=(--editable .)
  # opencode_env is a distribution of its own, and brings OpenEnv: half a gigabyte that a rollout does not need.
  if [ -n "${1:-}" ]; then
    what=(--editable ".[$1]" --editable ./src/opencode_env)
  fi
  stamp=.venv/setup${1:+-$1}.stamp
  # A checkout that was moved needs its packages again: the environment's scripts name their folder.
  want="$(cat pyproject.toml src/opencode_env/pyproject.toml src/rollcage/gateway/_wire.c | sha256sum) $("$bin/python" --version) $PWD"
  if [ -x "$bin/rollcage" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
    return
  fi
  say "installing Python packages"
  quietly env PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1 \
    "$bin/python" -m pip install --quiet "${what[@]}"
  printf '%s\n' "$want" | tee .venv/setup.stamp >"$stamp"
}

system_parts() {
  local missing=()
  command -v bwrap >/dev/null || missing+=(bubblewrap)
  command -v rg >/dev/null || missing+=(ripgrep)
  command -v git >/dev/null || missing+=(git)
  # Two machines in network namespaces, which need root.
  [ "${1:-}" != dev ] || [ "$(id -u)" != 0 ] || command -v ip >/dev/null || missing+=(iproute2)
  # Without npm the agent is fetched from the registry that is set; without either there is none to ask.
  if ! command -v npm >/dev/null && [ -z "${NPM_CONFIG_REGISTRY:-}" ] && ! "$bin/rollcage" setup --check >/dev/null 2>&1; then
    missing+=(npm)
  fi
  if [ "${#missing[@]}" -gt 0 ]; then
    system "${missing[@]}"
  fi
}

virtual_environment
packages "${1:-}"
system_parts "${1:-}"
"$bin/rollcage" setup
