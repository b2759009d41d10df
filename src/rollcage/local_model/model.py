"""The local model as the rest of rollcage sees it: an async block in which it answers."""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import anyio
from pydantic import SecretStr

from rollcage.errors import ModelError, SetupError, UsageError
from rollcage.local_model.process import EngineProcess, Orders, running
from rollcage.local_model.weights import Progress, fetch_weights
from rollcage.types import Endpoint, Sampling

MODEL = "smollm2-135m"
"""The name it is asked for by."""
ENGINE = "xllamacpp==2026.10.11549"
"""The package with the engine: llama.cpp's own server, built for the CPU."""
LARGEST_CONTEXT = 8192
"""What the model was trained for; the engine gives no more."""
START_TIMEOUT_S = 120.0
"""For the slowest machine there is; a second or two is usual."""


class LocalModel:
    """`async with LocalModel(cache_dir) as model:` serves SmolLM2-135M on loopback until the block ends.

    The first time its weights are fetched into `cache_dir`. It answers one request at a time; others wait.
    """

    progress: Progress | None = None
    """Hears how the download goes; set it before the block."""

    def __init__(
        self,
        cache_dir: Path,
        *,
        port: int = 0,
        context: int = LARGEST_CONTEXT,
        threads: int | None = None,
        key: str = "",
    ) -> None:
        """Port 0 is any free one, None threads half of the processors, an empty key a random one."""
        if not 256 <= context <= LARGEST_CONTEXT:
            raise UsageError(
                f"{context} tokens", argument="context", remedy=f"the local model takes 256 to {LARGEST_CONTEXT}"
            )
        self._cache_dir, self._port, self._context = cache_dir, port, context
        # The engine's threads wait for each other in busy loops: one for every processor would starve the agents.
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._key = key or f"local-{secrets.token_urlsafe(18)}"
        self._stack = AsyncExitStack()
        self._running: EngineProcess | None = None

    @property
    def base_url(self) -> str:
        """The address, up to and including `/v1`."""
        return f"{self._engine.address}/v1"

    @property
    def pid(self) -> int:
        """The engine's process."""
        return self._engine.pid

    def endpoint(self, **sampling: Any) -> Endpoint:
        """How to reach it; `sampling` are the fields of `Sampling`."""
        key, drawn = SecretStr(self._key), Sampling(**sampling)
        return Endpoint(base_url=self.base_url, model=MODEL, key=key, kind="local", sampling=drawn)

    async def wait(self) -> None:
        """Never returns: raises ModelError when the engine dies."""
        await self._engine.wait()

    async def __aenter__(self) -> Self:
        _check_engine()
        _check_port(self._port)
        weights = await fetch_weights(self._cache_dir, self.progress)
        orders = Orders(str(weights), MODEL, self._port, self._key, self._context, self._threads)
        try:
            with anyio.fail_after(START_TIMEOUT_S):
                self._running = await self._stack.enter_async_context(running(orders))
        except TimeoutError as error:
            raise SetupError(
                f"the local model was not ready within {START_TIMEOUT_S:.0f} s",
                remedy="see whether this machine has processors and memory to spare",
            ) from error
        except ModelError:
            _check_port(self._port)  # somebody may have taken it meanwhile
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._running = None
        await self._stack.aclose()

    @property
    def _engine(self) -> EngineProcess:
        if self._running is None:
            raise UsageError("the local model is not running: use `async with LocalModel(...) as model`")
        return self._running


def _check_engine() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise SetupError(f"the local model needs an engine; run: {sys.executable} -m pip install {ENGINE}")


def _check_port(port: int) -> None:
    """UsageError where nothing can listen there."""
    if not 0 <= port <= 65535:
        raise UsageError(
            f"port {port} does not exist", remedy="choose one from 1024 to 65535, or 0 for any that is free"
        )
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError as error:
            raise UsageError(f"port {port} is not ours to take", remedy="choose one from 1024 to 65535") from error
        except OSError as error:
            raise UsageError(
                f"port {port} is in use", remedy="choose another one, or 0 for any that is free"
            ) from error
