"""A command in an E2B box: its streams, its end, and the certainty that all of it is dead."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from shlex import quote
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteReceiveStream, ByteSendStream

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.bundle import bundle
from rollcage.sandboxes.e2b.cloud import REQUEST_TIMEOUT_S, boundary, translated
from rollcage.sandboxes.e2b.inside import door, launch
from rollcage.sandboxes.inside import division, kernel, orders, processes, system

if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox

PROGRAM = bundle(launch, kernel, processes)
"""The launcher: it is started once for each command."""
DIVIDED = bundle(launch, kernel, processes, system, division)
"""The same for commands of a divided box."""
DOOR = bundle(door, kernel, processes, system, division, orders, launch)
"""What divides a box, and serves its judge."""
_BUFFER = 1 << 20
"""What may wait here of a stream that nobody reads; then the command has to wait."""
_PIECE = 1 << 19
_START_TIMEOUT_S = 60.0
_DEATH_TIMEOUT_S = 60.0
_KILLED = 137


class OutputStream(ByteReceiveStream):
    """What the command prints, as it is sent to us."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0
        self._over = self._closed = False
        self._changed = asyncio.Event()

    async def feed(self, data: bytes) -> None:
        """Take it on, once there is room."""
        while self._size >= _BUFFER and not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if data and not self._closed:
            self._chunks.append(data)
            self._size += len(data)
            self._changed.set()

    def finish(self) -> None:
        """Nothing more will come."""
        self._over = True
        self._changed.set()

    def close(self) -> None:
        """Nobody wants any more of it."""
        self._closed = True
        self._chunks.clear()
        self._size = 0
        self._changed.set()

    async def receive(self, max_bytes: int = 1 << 16) -> bytes:
        """The next bytes."""
        await anyio.lowlevel.checkpoint()
        while not self._chunks:
            if self._closed:
                raise anyio.ClosedResourceError
            if self._over:
                raise anyio.EndOfStream
            self._changed.clear()
            await self._changed.wait()
        data = self._chunks.popleft()
        if len(data) > max_bytes:
            self._chunks.appendleft(data[max_bytes:])
            data = data[:max_bytes]
        self._size -= len(data)
        self._changed.set()
        return data

    async def aclose(self) -> None:
        """No more is wanted."""
        self.close()


class InputStream(ByteSendStream):
    """What the command reads."""

    def __init__(self, process: E2BProcess) -> None:
        self._process, self._closed = process, False

    async def send(self, item: bytes) -> None:
        """Hand over all of it."""
        await anyio.lowlevel.checkpoint()
        if self._closed:
            raise anyio.ClosedResourceError
        for at in range(0, len(item), _PIECE):
            if self._process.over:
                raise anyio.BrokenResourceError
            try:
                await self._process.put(item[at : at + _PIECE])
            except SandboxError as error:
                raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """End of file."""
        if not self._closed:
            self._closed = True
            if not self._process.over:
                # It may just have ended: then there is nobody to tell.
                with suppress(SandboxError):
                    await self._process.end_input()


class E2BProcess:
    """One launcher in the box and all that runs below it."""

    def __init__(self, program: str = PROGRAM) -> None:
        self._program = program
        self.told: dict[str, Any] = {}
        """What the program said of itself when it had begun."""
        self.stdin, self.stdout, self.stderr = InputStream(self), OutputStream(), OutputStream()
        self._head = b""
        self._begun: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._code, self._loss = _KILLED, ""
        self._watching: asyncio.Task[None] | None = None
        self._handle: AsyncCommandHandle[None] | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    async def wait(self) -> int:
        """Its exit code (128+n where signal n killed it), once it and every process it started are dead."""
        await self._ended.wait()
        if self._loss:
            raise SandboxLost(self._loss)
        return self._code

    async def begin(self, sandbox: AsyncSandbox, request: Mapping[str, object]) -> list[str]:
        """Start it; returns what of its isolation the box does not allow, in words."""
        argv = request.get("argv")
        name = str(argv[0]) if isinstance(argv, list) else "the launcher of code under test"
        with boundary(f"cannot run {name}"):
            self._handle = await sandbox.commands.run(
                f"exec python3 -I -S -c {quote(self._program)}",
                background=True,
                user="root",
                cwd="/",
                stdin=True,
                timeout=0,
                request_timeout=REQUEST_TIMEOUT_S,
                on_stdout=self._on_stdout,
                on_stderr=self._on_stderr,
                retain_output=False,
            )
        self._watching = asyncio.create_task(self._watch(self._handle))
        body = json.dumps(request).encode()
        # Where the launcher has died, what it said of that is worth more than that nobody reads.
        with suppress(anyio.BrokenResourceError):
            await self.stdin.send(struct.pack("!I", len(body)) + body)
        try:
            answer = await asyncio.wait_for(asyncio.shield(self._begun), _START_TIMEOUT_S)
        except TimeoutError as error:
            raise SandboxError(f"cannot run {name}: the box does not start it") from error
        if self._loss:
            raise SandboxLost(f"cannot run {name}: {self._loss}")
        if answer["refused"]:
            raise SandboxError(f"cannot run {name}: {answer['refused']}")
        return [str(item) for item in answer["missing"]]

    async def put(self, data: bytes) -> None:
        """Send input, and wait until the command's pipe has taken it."""
        assert self._handle is not None
        with boundary("cannot write to a command"):
            await self._handle.send_stdin(data, request_timeout=0)

    async def end_input(self) -> None:
        """Send the end of file."""
        assert self._handle is not None
        with boundary("cannot end the input of a command"):
            await self._handle.close_stdin(request_timeout=REQUEST_TIMEOUT_S)

    def lose(self, why: str) -> None:
        """The box went away: let `wait` say so."""
        if not self.over:
            self._finish(loss=why)

    async def end(self) -> None:
        """Kill what still runs, wait until it is dead, and let go of everything."""
        for stream in (self.stdout, self.stderr):
            stream.close()
        if self._handle is None or self._watching is None:
            return
        if not self.over:
            try:
                with boundary("cannot kill a command"):
                    await asyncio.wait_for(self._handle.kill(), REQUEST_TIMEOUT_S)
            except SandboxError as error:
                self.lose(str(error))
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), _DEATH_TIMEOUT_S)
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._handle.disconnect()
        if not self.over:
            self._finish(loss="a command in the box cannot be killed")
            raise SandboxError("a command in the box cannot be killed: the box does not say that it has ended")

    async def _watch(self, handle: AsyncCommandHandle[None]) -> None:
        from e2b import CommandExitException

        try:
            await handle.wait()
            code = 0
        except CommandExitException as ended:
            code = ended.exit_code
        except Exception as error:  # noqa: BLE001 - whatever it is, the command is out of our reach
            self._finish(loss=str(translated(error, "the command is lost")))
            return
        self._finish(code=code)

    def _finish(self, *, code: int = _KILLED, loss: str = "") -> None:
        if self.over:
            return
        # A launcher that was itself killed has no code.
        self._code, self._loss = (code if 0 <= code <= 255 else _KILLED), loss
        self._ended.set()
        for stream in (self.stdout, self.stderr):
            stream.finish()
        if not self._begun.done():
            # A launcher that was killed before it could say that it began did begin: the command killed it.
            killed = code < 0 or code > 128
            why = "" if killed and not loss else loss or f"the box cannot start it (exit code {code})"
            self._begun.set_result({"refused": why, "missing": []})

    async def _on_stdout(self, text: str) -> None:
        data = text.encode("latin-1", "replace")
        if self._begun.done():
            await self.stdout.feed(data)
            return
        head, line, rest = (self._head + data).partition(b"\n")
        self._head = head
        if line:
            try:
                self.told = answer = json.loads(head)
                self._begun.set_result({"refused": str(answer["refused"]), "missing": list(answer["missing"])})
            except (ValueError, KeyError, TypeError):
                self._begun.set_result({"refused": "the box says what no launcher of ours would say", "missing": []})
            await self.stdout.feed(rest)

    async def _on_stderr(self, text: str) -> None:
        await self.stderr.feed(text.encode("latin-1", "replace"))
