"""Turns the GGUF file of the local model into a folder that vLLM can serve in full precision. Run by vllm.sh, in vLLM's
own environment: `vllm_model.py WEIGHTS.gguf FOLDER`."""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

weights, folder = Path(sys.argv[1]), Path(sys.argv[2])
# Without being told, transformers would keep the weights packed, and vLLM could not load them.
model = AutoModelForCausalLM.from_pretrained(
    weights.parent,
    gguf_file=weights.name,
    dtype=torch.float32,
    quantization_config=GgufConfig(dequantize=True),
)
model.save_pretrained(folder)
AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(folder)
