"""What a box is: spawn, read, write, listen. Everything else is a function over these."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import NamedTuple, Protocol, runtime_checkable

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from rollcage.layers import Layer
from rollcage.types import HOME, SandboxSpec

PATH = "/usr/local/bin:/usr/bin:/bin"
"""The only PATH a command gets unless its caller says otherwise; nothing an agent can write to is on it."""


class Whole(dict[str, str]):
    """An environment to which a box adds nothing of its image's, only what every command gets: for commands of our own
    in a box that an agent has used, since what an image sets may lead to where the agent could write."""


class Process(Protocol):
    """A command running in a box. It and everything it started die with the block that spawned it."""

    @property
    def stdin(self) -> ByteSendStream:
        """Its standard input; `aclose()` is end of file."""

    @property
    def stdout(self) -> ByteReceiveStream:
        """Its standard output."""

    @property
    def stderr(self) -> ByteReceiveStream:
        """Its standard error."""

    async def wait(self) -> int:
        """Its exit code (128+n where signal n killed it), once it and every process it started are dead.

        Raises SandboxLost where the box itself went away.
        """


class Sandbox(Protocol):
    """One isolated box with a home directory, no network, and nothing of the host in it."""

    @property
    def id(self) -> str:
        """A name that is unique on this machine."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Asked-for limits that cannot be enforced here, in words."""

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = HOME
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command in fresh namespaces; PATH, HOME, USER, LANG, TMPDIR, what the box's image sets (unless `env`
        is Whole) and `env` are its whole environment."""

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file; FileMissing where there is none. Never leads out, never hangs."""

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket that is 127.0.0.1:port in the box and is served by this process; closed with the block."""


@runtime_checkable
class Rewindable(Protocol):
    """A box that can put its home directory back: the ground under `verify_in = "box"`."""

    async def checkpoint(self) -> None:
        """Remember the home directory as it is. No command may be running."""

    async def rewind(self, keep: Sequence[str]) -> tuple[str, ...]:
        """Put everything below home back as it was at the checkpoint, except the `keep` paths; /tmp becomes empty.

        Returns the paths outside `keep` that had been changed since. No command may be running.
        """


@runtime_checkable
class Imaged(Protocol):
    """A box whose image may set environment variables."""

    @property
    def image_env(self) -> Mapping[str, str]:
        """What its image gives to every command beside the plain environment."""


@runtime_checkable
class Bare(Protocol):
    """A box that is none: nothing runs in it and nothing is kept, and its ports are reached from this process alone."""

    def door(self, port: int) -> str:
        """The unix socket that stands for a port."""


class Provider(Protocol):
    """A backend: it opens boxes."""

    @property
    def name(self) -> str:
        """`local`, `container`, ..."""

    def check(self, spec: SandboxSpec) -> None:
        """Raise UsageError for a box it cannot give, before anything is started."""

    def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AbstractAsyncContextManager[Sandbox]:
        """A box whose home starts as these layers, topmost first. Closed, with all in it, at the end of the block."""


class Output(NamedTuple):
    """The end of a stream that may have been endless."""

    data: bytes
    truncated: bool

    @property
    def text(self) -> str:
        """As text, with whatever is no UTF-8 replaced."""
        return self.data.decode("utf-8", "replace")


class Exit(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    stdout: Output
    stderr: Output
    seconds: float
    timed_out: bool


class Tail:
    """Keeps the last `limit` bytes of what goes by, and has what came so far also before the end."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size, self._cut = limit, 0, False
        self._chunks: deque[bytes] = deque()

    async def drain(self, stream: ByteReceiveStream) -> None:
        """Read a stream to its end."""
        async for chunk in stream:
            self._chunks.append(chunk)
            self._size += len(chunk)
            while self._size - len(self._chunks[0]) >= self._limit:
                self._size -= len(self._chunks.popleft())
                self._cut = True

    @property
    def output(self) -> Output:
        """What was kept."""
        data = b"".join(self._chunks)
        return Output(data[-self._limit :], self._cut or len(data) > self._limit)


async def tail(stream: ByteReceiveStream, limit: int) -> Output:
    """Drain a stream to its end, keeping only its last `limit` bytes."""
    kept = Tail(limit)
    await kept.drain(stream)
    return kept.output


async def run(
    box: Sandbox,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str = HOME,
    timeout_s: float = 60,
    limit: int = 64 << 10,
) -> Exit:
    """Run a command to its end; at the time limit it is killed with all it started (exit code 124)."""
    started = time.monotonic()
    stdout, stderr = Tail(limit), Tail(limit)
    code, timed_out = 124, True

    async def feed(stream: ByteSendStream) -> None:
        # It may close its input or die before it has read all: its exit code tells.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await stream.send(stdin)

    async with box.spawn(argv, env=env, cwd=cwd) as process:
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stdout.drain, process.stdout)
                tasks.start_soon(stderr.drain, process.stderr)
                if stdin:
                    await feed(process.stdin)
                await process.stdin.aclose()
            code, timed_out = await process.wait(), False
    return Exit(code, stdout.output, stderr.output, time.monotonic() - started, timed_out)


async def sh(
    box: Sandbox,
    script: str,
    *,
    env: Mapping[str, str] | None = None,
    cwd: str = HOME,
    timeout_s: float = 60,
    limit: int = 64 << 10,
) -> Exit:
    """Run shell text a user wrote, with no start-up files read."""
    argv = ["bash", "--noprofile", "--norc", "-c", script]
    return await run(box, argv, env=env, cwd=cwd, timeout_s=timeout_s, limit=limit)
