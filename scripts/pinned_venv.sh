# Sourced by scripts that build an environment from a complete, pinned list: nothing is resolved.
# Needs: $name, what messages begin with; $here, this folder; $dir, where the environment goes. Sets $python.

say() { printf '%s: %s\n' "$name" "$*"; }
stop() { printf '%s: %s\n' "$name" "$*" >&2; exit 1; }

# The end of what a command complained about, on one line.
reason() { printf '%s (all of it is in %s)' "$(grep -v '^[[:space:]]*$' "$1" | tail -n 3 | tr -s '[:space:]' ' ')" "$1"; }

# The folder, and the Python that everything is made with. Two test runs at once must not build in the same place.
enter() {
  mkdir -p "$1" || stop "cannot make $1"
  dir="$(cd "$1" && pwd)"
  python="$here/../.venv/bin/python"
  [ -x "$python" ] || python="$(command -v python3)" || stop "no Python found"
  uv="$dir/uv/bin/uv"
  exec 9>"$dir/.lock"
  flock 9
}

setting() { "$python" -m pip config get "global.$1" 2>/dev/null || true; }

# Where pip looks for packages, uv should look too: it does not read pip's settings.
look_where_pip_looks() {
  local links index
  links="${PIP_FIND_LINKS:-$(setting find-links)}"
  index="${PIP_INDEX_URL:-$(setting index-url)}"
  if [ -n "$links" ] && [ -z "${UV_FIND_LINKS:-}" ]; then export UV_FIND_LINKS="${links//[[:space:]]/,}"; fi
  if [ -n "$index" ] && [ -z "${UV_DEFAULT_INDEX:-}" ]; then export UV_DEFAULT_INDEX="$index"; fi
}

install_uv() {
  if [ -x "$uv" ]; then return; fi
  rm -rf "$dir/uv"
  "$python" -m venv "$dir/uv" || stop "cannot make a virtual environment with $python"
  "$dir/uv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "uv==0.13.7" || stop "pip could not install uv"
}

# install WHAT LIST: $dir/venv with all of the list in it, unless it is there.
# The list is complete, so nothing is resolved: pip would take minutes over it, and add a gigabyte of GPU code.
# PyTorch for the CPU is not in the package index. It may be among pip's find-links; elsewhere uv knows where PyTorch keeps it.
install() {
  local want stamp="$dir/venv/ready"
  want="$(sha256sum <"$2") $("$python" --version)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then return; fi
  case "$(uname -s) $(uname -m)" in
    "Linux x86_64") ;;
    *) stop "$1 is pinned for Linux on x86_64 only" ;;
  esac
  install_uv
  say "installing $1 (2 GB)"
  rm -rf "$dir/venv"
  "$uv" venv --quiet --python "$python" "$dir/venv" || stop "uv could not make a virtual environment"
  look_where_pip_looks
  local command=("$uv" pip install --quiet --no-deps --no-cache --python "$dir/venv/bin/python" --requirement "$2")
  if ! "${command[@]}" 2>"$dir/install.log"; then
    "${command[@]}" --torch-backend cpu 2>>"$dir/install.log" ||
      stop "$1 cannot be installed here: $(reason "$dir/install.log")"
  fi
  printf '%s\n' "$want" >"$stamp"
}
