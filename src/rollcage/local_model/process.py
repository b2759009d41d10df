"""The engine's process as seen from ours: started, waited for until it is healthy, killed with the block."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, NamedTuple

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from rollcage.errors import ModelError

PROGRAM = Path(__file__).with_name("engine.py")

_BROKEN = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.DelimiterNotFound)


class Orders(NamedTuple):
    """What the engine is told to do."""

    weights: str
    model: str
    port: int
    key: str
    context: int
    threads: int


class EngineProcess:
    """A running engine."""

    def __init__(self, process: Process, words: IO[bytes]) -> None:
        self._process, self._words = process, words
        self.address = ""
        """`http://127.0.0.1:PORT`, once it answers."""

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    async def start(self, orders: Orders) -> None:
        """Give it its orders and wait until it says that it is healthy."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ModelError("the local model's engine was started without pipes")
        try:
            await stdin.send(json.dumps(orders._asdict()).encode() + b"\n")
            line = await BufferedByteReceiveStream(stdout).receive_until(b"\n", 65536)
        except _BROKEN as error:
            code = await self._process.wait()
            said = self._last_words()
            raise ModelError(f"the local model's engine did not start (exit code {code}): {said}") from error
        address = json.loads(line)["address"]
        while not await _healthy(address):  # noqa: ASYNC110 - it is another process: it sets no event of ours
            await anyio.sleep(0.05)
        self.address = address

    async def wait(self) -> None:
        """Never returns: raises ModelError when the engine dies."""
        code = await self._process.wait()
        raise ModelError(f"the local model's engine ended by itself (exit code {code}): {self._last_words()}")

    def _last_words(self) -> str:
        """The last errors that the engine spoke of."""
        # Not read through the file object: the position would be shared with the engine, which still writes.
        size = os.fstat(self._words.fileno()).st_size
        text = os.pread(self._words.fileno(), 8192, max(0, size - 8192)).decode("utf-8", "replace")
        errors = [line.partition(" E ")[2] for line in text.splitlines() if " E " in line]
        return "; ".join(" ".join(line.split()) for line in (errors or text.splitlines())[-3:]) or "it said nothing"


@asynccontextmanager
async def running(orders: Orders) -> AsyncIterator[EngineProcess]:
    """An engine that answers, until the end of the block. It also dies with us: its standard input ends then."""
    with tempfile.TemporaryFile() as words:
        process = await anyio.open_process(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            # Ctrl-C is for us: we stop it when we are done with it.
            start_new_session=True,
        )
        try:
            engine = EngineProcess(process, words)
            await engine.start(orders)
            yield engine
        finally:
            with anyio.CancelScope(shield=True):
                if process.returncode is None:
                    process.kill()
                await process.aclose()


async def _healthy(address: str) -> bool:
    host, _, port = address.removeprefix("http://").partition(":")
    request = f"GET /health HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n"
    try:
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(request.encode())
            status = await BufferedByteReceiveStream(stream).receive_until(b"\r\n", 1024)
    except (OSError, *_BROKEN):
        return False
    return status.split()[1:2] == [b"200"]
