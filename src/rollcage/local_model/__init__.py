"""A real engine with a tiny real model, for everybody: llama.cpp's own server and SmolLM2-135M, on the CPU."""

from rollcage.local_model.model import ENGINE, LARGEST_CONTEXT, MODEL, LocalModel
from rollcage.local_model.weights import Progress, fetch_weights

__all__ = ["ENGINE", "LARGEST_CONTEXT", "MODEL", "LocalModel", "Progress", "fetch_weights"]
