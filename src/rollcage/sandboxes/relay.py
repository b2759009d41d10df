"""Listening in a box over nothing but a process in it: connections come out through that process's standard streams.

A small program (`inside/relay.py`) listens in the box and carries each connection, framed, over its own input and
output. Here each becomes a connection to a listener of ours, which is what the caller gets and serves. Whatever comes
out of the box is taken for hostile: every frame is checked, and nothing it says can make us hold more than its windows.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.base import Process, Sandbox, Tail
from rollcage.sandboxes.inside import relay as frames
from rollcage.sandboxes.relay_stream import Stream

_PROGRAM = Path(frames.__file__).read_text()
_START_TIMEOUT_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
_DEATH_TIMEOUT_S = 5.0
_FULL, _ROOM = 1 << 20, 1 << 18
_MOST_CONTROL = 4 << 20
"""A box that provokes answers and does not read them is cut off here."""
_STREAM_ENDS = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError)


@asynccontextmanager
async def relayed(box: Sandbox, port: int) -> AsyncIterator[socket.socket]:
    """A listening socket of ours that gets every connection made to 127.0.0.1:port in the box; closed with the block.

    It is a Unix socket in a folder that only we may enter, and its name is the port. If the relay dies in the block,
    all its connections are cut and no new ones come; that is raised as SandboxError when the block has ended well.
    """
    with tempfile.TemporaryDirectory(prefix="rollcage-relay-", ignore_cleanup_errors=True) as folder:
        path = f"{folder}/{port}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with listener:
            listener.bind(path)
            listener.listen(frames.MOST_STREAMS)
            listener.setblocking(False)
            command = ["python3", "-I", "-S", "-c", _PROGRAM, str(port)]
            async with box.spawn(command, cwd="/") as process:
                link = Link(process, path)
                try:
                    await _ready(link, process, port)
                    yield listener
                finally:
                    failure = link.failure
                    with anyio.CancelScope(shield=True):
                        await link.close()
                if failure and not await _is_lost(process):
                    raise SandboxError(f"the relay for port {port} in the box broke: {failure}")


async def _ready(link: Link, process: Process, port: int) -> None:
    try:
        await link.ready(port)
    except SandboxError as error:
        if link.failure and await _is_lost(process):
            raise SandboxLost(f"cannot listen on port {port} in the box: it is gone") from error
        raise


async def _is_lost(process: Process) -> bool:
    """Whether the whole box is gone: then whoever uses it is told so, and this is no news."""
    try:
        with anyio.move_on_after(_DEATH_TIMEOUT_S):
            await process.wait()
    except SandboxLost:
        return True
    return False


class Link:
    """Our end of a relay: takes its frames apart, and puts together what goes to it."""

    def __init__(self, process: Process, path: str) -> None:
        self._process, self._path = process, path
        self._streams: dict[int, Stream] = {}
        self._last = 0
        self._out: deque[bytes] = deque()
        self._out_size = 0
        self._wake = asyncio.Event()
        self._answered: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._complaint = Tail(2000)
        self._closed = False
        self.failure = ""
        """Why it broke, in words; empty while it serves."""
        self._tasks = [
            asyncio.create_task(step)
            for step in (self._read(process.stdout), self._write(process.stdin), self._complaints(process.stderr))
        ]
        self._opening: set[asyncio.Task[None]] = set()

    async def ready(self, port: int) -> None:
        """Wait until it listens; SandboxError where it cannot."""
        try:
            refusal = await asyncio.wait_for(asyncio.shield(self._answered), _START_TIMEOUT_S)
        except TimeoutError as error:
            raise SandboxError(f"cannot listen on port {port} in the box: the relay does not start") from error
        if refusal is not None:
            raise SandboxError(f"cannot listen on port {port} in the box: {refusal}")

    async def close(self) -> None:
        """Cut every connection and let the relay end."""
        self._closed = True
        tasks = [*self._tasks, *self._opening]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._cut()
        with suppress(*_STREAM_ENDS, SandboxError):
            await self._process.stdin.aclose()
        if not self._answered.done():
            self._answered.cancel()

    # What streams use.

    @property
    def full(self) -> bool:
        """Whether streams should stop reading until there is room."""
        return self._out_size > _FULL

    def put(self, kind: int, number: int, data: bytes = b"") -> None:
        """Queue a frame."""
        if self._closed or self.failure:
            return
        self._out.append(frames.HEAD.pack(kind, number, len(data)))
        if data:
            self._out.append(data)
        self._out_size += frames.HEAD.size + len(data)
        if self._out_size > _MOST_CONTROL:
            self._break("it does not read what is sent to it")
        self._wake.set()

    def forget(self, number: int) -> None:
        """That stream is over."""
        self._streams.pop(number, None)

    # The three pipes.

    async def _read(self, stdout: ByteReceiveStream) -> None:
        rest = b""
        try:
            async for chunk in stdout:
                rest = self._take(rest + chunk if rest else chunk)
        except ValueError as error:
            self._break(f"it sent garbage ({error})")
        except SandboxLost as error:
            self._break(str(error))
        except _STREAM_ENDS:
            self._break("it ended")
        else:
            self._break("it ended")

    async def _write(self, stdin: ByteSendStream) -> None:
        with suppress(*_STREAM_ENDS, SandboxError):
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._out:
                    data = b"".join(self._out)
                    self._out.clear()
                    await stdin.send(data)
                    self._out_size -= len(data)
                    if self._out_size <= _ROOM:
                        for stream in list(self._streams.values()):
                            stream.go_on()

    async def _complaints(self, stderr: ByteReceiveStream) -> None:
        with suppress(*_STREAM_ENDS, SandboxError):
            await self._complaint.drain(stderr)

    def _break(self, why: str) -> None:
        if self.failure or self._closed:
            return
        said = self._complaint.output.text.strip().rpartition("\n")[2]
        self.failure = f"{why}: {said}" if said else why
        if not self._answered.done():
            self._answered.set_result(f"the relay does not start ({self.failure}); the box needs python3 on its PATH")
        # Nobody can come in by it any more: the caller's listener has no address any more.
        with suppress(OSError):
            os.unlink(self._path)  # noqa: PTH108
        self._cut()

    def _cut(self) -> None:
        for stream in list(self._streams.values()):
            stream.cut()
        self._streams.clear()
        self._out.clear()
        self._out_size = 0

    # Frames.

    def _take(self, data: bytes) -> bytes:
        """Act on every whole frame; returns what is left. ValueError for what no relay of ours would send."""
        at, head = 0, frames.HEAD.size
        while len(data) - at >= head:
            kind, number, length = frames.HEAD.unpack_from(data, at)
            if length > frames.MOST_DATA or not frames.READY <= kind <= frames.RESET:
                raise ValueError(f"a frame of kind {kind} and {length} bytes")
            if len(data) - at < head + length:
                break
            self._handle(kind, number, data[at + head : at + head + length])
            at += head + length
        return data[at:] if at else data

    def _handle(self, kind: int, number: int, payload: bytes) -> None:
        if kind in (frames.READY, frames.REFUSED):
            if self._answered.done():
                raise ValueError("it started twice")
            self._answered.set_result(None if kind == frames.READY else payload.decode("utf-8", "replace")[:200])
        elif kind == frames.OPEN:
            self._open(number)
        elif number > self._last:
            raise ValueError(f"stream {number} was never opened")
        elif (stream := self._streams.get(number)) is not None:
            # Where it is none of ours, we have ended it, and the relay did not know yet.
            stream.handle(kind, payload)

    def _open(self, number: int) -> None:
        if number <= self._last or not self._answered.done():
            raise ValueError(f"stream {number} opened out of turn")
        if len(self._streams) >= frames.MOST_STREAMS * 2:
            raise ValueError("too many streams")
        self._last = number
        stream = self._streams[number] = Stream(self, number)
        task = asyncio.create_task(self._connect(stream))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self, stream: Stream) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                # A Unix socket whose queue is full does not say when it no longer is.
                while True:
                    try:
                        sock.connect(self._path)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(0.01)
                await loop.create_unix_connection(lambda: stream, sock=sock)
        except (OSError, TimeoutError):
            sock.close()
            stream.cut()
            self.put(frames.RESET, stream.number)
            self.forget(stream.number)
        except BaseException:
            sock.close()
            raise
