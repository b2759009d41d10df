"""Runs the local model: the engine in a process of its own, which dies with the block and with us."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import SecretStr

from rollcage.errors import ModelError, SetupError, UsageError
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

    def __init__(
        self,
        cache_dir: Path,
        *,
        port: int = 0,
        context: int = LARGEST_CONTEXT,
        threads: int | None = None,
        key: str = "",
    ) -> None:
        """Port 0 is any free one, null threads half of the processors, an empty key a random one."""
        if not 256 <= context <= LARGEST_CONTEXT:
            raise UsageError(f"context: {context} tokens; the local model takes 256 to {LARGEST_CONTEXT}")
        self._cache_dir, self._port, self._context = cache_dir, port, context
        # The engine's threads wait for each other in busy loops: one for every processor would starve the agents.
        self._threads = threads or max(1, len(os.sched_getaffinity(0)) // 2)
        self._key = key or f"local-{secrets.token_urlsafe(18)}"
        self._stack = AsyncExitStack()
        self._process: Process | None = None
        self._words: IO[bytes] | None = None
        self._address = ""
        self.progress: Progress | None = None
        """Hears how the download goes."""

    @property
    def base_url(self) -> str:
        """The address, up to and including `/v1`."""
        if not self._address:
            raise UsageError("the local model is not running: use `async with LocalModel(...) as model`")
        return f"{self._address}/v1"

    @property
    def pid(self) -> int:
        """The engine's process."""
        if self._process is None:
            raise UsageError("the local model is not running: use `async with LocalModel(...) as model`")
        return self._process.pid

    def endpoint(self, **sampling: Any) -> Endpoint:
        """How to reach it; `sampling` are the fields of `Sampling`."""
        return Endpoint(
            base_url=self.base_url,
            model=MODEL,
            key=SecretStr(self._key),
            kind="local",
            sampling=Sampling(**sampling),
        )

    async def wait(self) -> None:
        """Returns never: raises ModelError when the engine dies."""
        if self._process is None:
            raise UsageError("the local model is not running: use `async with LocalModel(...) as model`")
        code = await self._process.wait()
        raise ModelError(f"the local model's engine ended by itself (exit code {code}): {self._last_words()}")

    async def __aenter__(self) -> Self:
        _check_engine()
        _check_port(self._port)
        weights = await fetch_weights(self._cache_dir, self.progress)
        try:
            with anyio.fail_after(START_TIMEOUT_S):
                await self._start(weights)
        except TimeoutError as error:
            await self._stop()
            raise SetupError(
                f"the local model was not ready within {START_TIMEOUT_S:.0f} s; see whether the machine has "
                "processors and memory to spare"
            ) from error
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def _start(self, weights: Path) -> None:
        words = self._words = self._stack.enter_context(tempfile.TemporaryFile())
        argv = [sys.executable, str(Path(__file__).with_name("engine.py"))]
        process = self._process = await anyio.open_process(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, start_new_session=True
        )
        if process.stdin is None or process.stdout is None:
            raise ModelError("the local model's engine was started without pipes")
        orders = {
            "weights": str(weights),
            "model": MODEL,
            "port": self._port,
            "key": self._key,
            "context": self._context,
            "threads": self._threads,
        }
        try:
            await process.stdin.send(json.dumps(orders).encode() + b"\n")
            line = await BufferedByteReceiveStream(process.stdout).receive_until(b"\n", 65536)
        except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead) as error:
            await process.wait()
            said = self._last_words()
            if "couldn't bind" in said:
                raise _port_taken(self._port) from error
            raise ModelError(f"the local model's engine did not start: {said}") from error
        address = json.loads(line)["address"]
        await _until_healthy(address)
        self._address = address

    async def _stop(self) -> None:
        with anyio.CancelScope(shield=True):
            process, self._process, self._address = self._process, None, ""
            if process is not None:
                if process.returncode is None:
                    process.kill()
                await process.wait()
                await process.aclose()
            await self._stack.aclose()

    def _last_words(self) -> str:
        """The last error the engine spoke of."""
        if self._words is None or self._words.closed:
            return "it said nothing"
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - 8000))
        lines = self._words.read().decode("utf-8", "replace").splitlines()
        errors = [line for line in lines if " E " in line or "Error" in line]
        told = [line.split(" E ", 1)[-1] for line in errors or lines[-1:]]
        return " ".join((next((line for line in told if "couldn't" in line), None) or (told or ["it said nothing"])[-1]).split())


def _check_engine() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        raise SetupError(f"the local model needs an engine; run: {sys.executable} -m pip install {ENGINE}")


def _check_port(port: int) -> None:
    """Before anything is downloaded. The engine itself tells where somebody took the port meanwhile."""
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except PermissionError as error:
            raise UsageError(f"port {port} is not ours to take; choose one from 1024 on") from error
        except OverflowError as error:
            raise UsageError(f"port {port} does not exist; choose one from 1024 to 65535") from error
        except OSError as error:
            raise _port_taken(port) from error


def _port_taken(port: int) -> UsageError:
    return UsageError(f"port {port} is in use; choose another one, or 0 for any that is free")


async def _until_healthy(address: str) -> None:
    host, _, port = address.removeprefix("http://").partition(":")
    while True:
        if await _healthy(host, int(port)):
            return
        await anyio.sleep(0.05)


async def _healthy(host: str, port: int) -> bool:
    try:
        async with await anyio.connect_tcp(host, port) as stream:
            await stream.send(f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
            return (await BufferedByteReceiveStream(stream).receive_until(b"\r\n", 1024)).split()[1:2] == [b"200"]
    except (OSError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound):
        return False
