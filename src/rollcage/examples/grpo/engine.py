"""A vLLM that keeps running while its weights change: `with Engine(...) as engine: engine.push(model)`."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Threads that wait for each other in busy loops are slower than one thread wherever cores are shared.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Virtual machines may advertise AMX and then refuse its instructions.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
    # The routes that load weights.
    "VLLM_SERVER_DEV_MODE": "1",
}
START_S = 900


class Engine:
    """vLLM on the CPU, as scripts/vllm.sh installed it."""

    def __init__(self, folder: Path, scratch: Path) -> None:
        self.model, self._python, self._scratch = folder / "model", folder / "venv" / "bin" / "python", scratch
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> "Engine":
        """Start it; `ready` waits until it answers."""
        options = {
            "model": self.model, "served-model-name": "policy", "host": "127.0.0.1", "port": self._port,
            "dtype": "float32", "max-model-len": 512, "max-num-batched-tokens": 2048, "max-num-seqs": 32,
        }  # fmt: skip
        argv = [str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        argv += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | ENVIRONMENT
        self._log = (self._scratch / "vllm.log").open("wb")
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "TERM", *argv], env=environment, cwd=self._scratch, stdin=subprocess.DEVNULL,
            stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sign)
                self._process.wait(20)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._log.close()

    def ready(self) -> None:
        """Wait until it answers."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"vLLM ended with exit code {self._process.returncode}: see {self._log.name}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=10).close()
                return
            except OSError:
                time.sleep(0.5)
        raise TimeoutError(f"vLLM did not answer within {START_S} s: see {self._log.name}")

    def push(self, model) -> float:
        """Give it these weights, and let it forget what it computed with others; the seconds that took."""
        from safetensors.torch import save_file

        started = time.monotonic()
        folder = self._scratch / "weights"
        folder.mkdir(exist_ok=True)
        # The head is tied to the embeddings.
        weights = {name: value.contiguous() for name, value in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        self._post("/reset_prefix_cache", {})
        return time.monotonic() - started

    def _post(self, path: str, body: dict) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request, timeout=300).close()
