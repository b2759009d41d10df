#!/usr/bin/env bash
# Builds what the tests marked `vllm` need: a real vLLM for the CPU and a small real model. Skips what is there already.
#   scripts/vllm.sh DIR      leaves DIR/venv (2 GB) and DIR/model (0.6 GB)
# Exit code 0: both are ready. Anything else: they are not, and the last line says why.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
name=vllm
# shellcheck source=scripts/pinned_venv.sh
. "$here/pinned_venv.sh"

[ "$#" = 1 ] || stop "usage: scripts/vllm.sh DIR"
enter "$1"

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

install "vLLM" "$here/vllm.txt"
make_model
say "ready in $dir"
