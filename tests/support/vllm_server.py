"""Starts a real vLLM on the CPU, with SmolLM2-135M in full precision, as scripts/vllm.sh has built them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import Process

from rollcage.types import Endpoint
from support.engine_client import ask
from support.paths import SCRIPTS, TESTS
from support.served import steady_port

SCRIPT = SCRIPTS / "vllm.sh"
TEMPLATE = TESTS / "data" / "chatml.jinja"
INSTALL_S = 15 * 60
START_S = 15 * 60
MODEL = "smollm2-135m"
CONTEXT = 16_384
"""Twice what the model was trained for: the agent's own prompt fills half of it, and nobody expects sense of it."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # On a busy machine one step over a long prompt may take longer than the usual five minutes.
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # Threads that wait for each other in busy loops are slower than one thread wherever cores are shared.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Virtual machines may advertise AMX and then refuse its instructions.
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",
}


class NotBuilt(Exception):
    """There is no vLLM here; the message says why."""


async def build(folder: Path) -> None:
    """Install vLLM and make its model, unless they are there. Raises NotBuilt."""
    # `timeout` ends everything the script started with it; to cancel this call would end the script alone.
    argv = ["timeout", "--kill-after=10", str(INSTALL_S), str(SCRIPT), str(folder)]
    done = await anyio.run_process(argv, check=False)
    if done.returncode == 124:
        raise NotBuilt(f"installing vLLM took longer than {INSTALL_S // 60} minutes")
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        raise NotBuilt(said[-1] if said else f"scripts/vllm.sh ended with exit code {done.returncode}")


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Endpoint]:
    """A vLLM that answers, until the end of the block."""
    port = steady_port()
    endpoint = Endpoint(base_url=f"http://127.0.0.1:{port}/v1", model=MODEL, kind="vllm")
    # It leaves its sockets lying about where temporary files go; what it compiles there is worth keeping.
    with tempfile.TemporaryDirectory(prefix="vllm-") as scratch, (folder / "server.log").open("wb") as log:
        # The signal is for the case that we are killed: gigabytes of memory must not outlive the tests.
        argv = ["setpriv", "--pdeathsig", "TERM", *_command(folder, port)]
        kept = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"), "TMPDIR": scratch}
        environment = {**os.environ, **_ENVIRONMENT, **kept}
        process = await anyio.open_process(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            await _until_healthy(process, endpoint, folder / "server.log")
            yield endpoint
        finally:
            with anyio.CancelScope(shield=True):
                await _stop(process)


def _command(folder: Path, port: int) -> list[str]:
    options = {
        "model": str(folder / "model"),
        "served-model-name": MODEL,
        "host": "127.0.0.1",
        "port": str(port),
        "dtype": "float32",
        "max-model-len": str(CONTEXT),
        # Its table of positions would end where its training did, and be read beyond its end.
        "hf-overrides": json.dumps({"max_position_embeddings": CONTEXT}),
        # A prompt that is computed in pieces kills the engine on a CPU where the request has a seed.
        "max-num-batched-tokens": str(CONTEXT),
        "max-num-seqs": "4",
        "tool-call-parser": "hermes",
        "chat-template": str(TEMPLATE),
    }
    # Not `vllm serve`: it looks for a package of another name.
    argv = [str(folder / "venv" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--enforce-eager", "--enable-auto-tool-choice"]
    return argv + [part for name, value in options.items() for part in (f"--{name}", value)]


async def _until_healthy(process: Process, endpoint: Endpoint, log: Path) -> None:
    with anyio.fail_after(START_S):
        while True:
            with suppress(OSError):
                if (await ask(endpoint, "/health")).status == 200:
                    return
            if process.returncode is not None:
                raise RuntimeError(f"vLLM did not start: {log.read_text(errors='replace')[-2000:]}")
            await anyio.sleep(0.25)


async def _stop(process: Process) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with anyio.move_on_after(20):
            await process.wait()
            break
    # Its workers are processes of the same group, and may need longer than their parent.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.aclose()
