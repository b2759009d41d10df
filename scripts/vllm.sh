#!/usr/bin/env bash
# Builds what the tests marked `vllm` need: a real vLLM for the CPU and a small real model. Skips what is there already.
#   scripts/vllm.sh DIR      leaves DIR/venv (2 GB) and DIR/model (0.6 GB)
# Exit code 0: both are ready. Anything else: they are not, and the last line says why.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

say() { printf 'vllm: %s\n' "$*"; }
stop() { printf 'vllm: %s\n' "$*" >&2; exit 1; }

# The end of what a command complained about, on one line.
reason() { printf '%s (all of it is in %s)' "$(grep -v '^[[:space:]]*$' "$1" | tail -n 3 | tr -s '[:space:]' ' ')" "$1"; }

[ "$#" = 1 ] || stop "usage: scripts/vllm.sh DIR"
mkdir -p "$1" || stop "cannot make $1"
dir="$(cd "$1" && pwd)"
python="$here/../.venv/bin/python"
[ -x "$python" ] || python="$(command -v python3)" || stop "no Python found"
requirements="$here/vllm.txt"
uv="$dir/uv/bin/uv"

# Two test runs at once must not build in the same place.
exec 9>"$dir/.lock"
flock 9

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

# The list is complete, so nothing is resolved: pip would take minutes over it, and add a gigabyte of GPU code.
# PyTorch for the CPU is not in the package index. It may be among pip's find-links; elsewhere uv knows where PyTorch keeps it.
install_vllm() {
  local want stamp="$dir/venv/ready"
  want="$(sha256sum <"$requirements") $("$python" --version)"
  if [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then return; fi
  case "$(uname -s) $(uname -m)" in
    "Linux x86_64") ;;
    *) stop "this vLLM is built for Linux on x86_64 only" ;;
  esac
  install_uv
  say "installing vLLM (2 GB)"
  rm -rf "$dir/venv"
  "$uv" venv --quiet --python "$python" "$dir/venv" || stop "uv could not make a virtual environment"
  look_where_pip_looks
  local install=("$uv" pip install --quiet --no-deps --no-cache --python "$dir/venv/bin/python" --requirement "$requirements")
  if ! "${install[@]}" 2>"$dir/install.log"; then
    "${install[@]}" --torch-backend cpu 2>>"$dir/install.log" ||
      stop "vLLM cannot be installed here: $(reason "$dir/install.log")"
  fi
  printf '%s\n' "$want" >"$stamp"
}

make_model() {
  if [ -f "$dir/model/model.safetensors" ]; then return; fi
  say "converting the model"
  local weights
  weights="$("$python" "$here/vllm_weights.py")" || stop "the model's weights cannot be fetched"
  rm -rf "$dir/model.draft"
  # See tests/vllm_server.py for the reasons of these variables.
  HF_HUB_OFFLINE=1 ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 \
    "$dir/venv/bin/python" "$here/vllm_model.py" "$weights" "$dir/model.draft" 2>"$dir/model.log" ||
    stop "the model cannot be converted: $(reason "$dir/model.log")"
  mv "$dir/model.draft" "$dir/model"
}

install_vllm
make_model
say "ready in $dir"
