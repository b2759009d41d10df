"""What a box is: spawn, read, write, listen. Everything else is a function over these."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypedDict, runtime_checkable

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from rollcage.errors import UsageError
from rollcage.sandboxes.layers import Layer
from rollcage.types import HOME, SandboxSpec

PATH = "/usr/local/bin:/usr/bin:/bin"
"""The only PATH a command gets unless its caller says otherwise; nothing an agent can write to is on it."""
SHELL = ("bash", "--noprofile", "--norc", "-c")
"""A shell for a script of ours: it reads no file that an agent may have left for it."""


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


class SpawnOptions(TypedDict, total=False):
    """What `Sandbox.spawn` takes beside the command, for a box that hands it on to another."""

    env: Mapping[str, str] | None
    cwd: str
    inherit_image_env: bool


class Sandbox(Protocol):
    """One isolated box with a home directory, no network, and nothing of the host in it."""

    @property
    def id(self) -> str:
        """A name that is unique on this machine."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Asked-for limits that cannot be enforced here, in words."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        inherit_image_env: bool = True,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command in fresh namespaces; PATH, HOME, USER, LANG, TMPDIR, what the box's image sets and `env` are
        its whole environment.

        `inherit_image_env=False` leaves out what the image sets: for commands of our own in a box that an agent has
        used, since what an image sets may lead to where the agent could write.
        """

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

    async def rewind(self, keep: Sequence[str], restore: Sequence[str] = ()) -> tuple[str, ...]:
        """Put everything below home back as it was at the checkpoint, except the `keep` paths; /tmp becomes empty.

        `restore`: paths within those that are put back too. One that the checkpoint does not have is removed, but only
        where the checkpoint has the folder that it lies in.
        Returns the paths outside `keep` that had been changed since. No command may be running.
        """


class Separation(NamedTuple):
    """How a box is divided between the judge, who runs as before, and the judged."""

    shared: tuple[str, ...]
    """Paths below home that both see, live: the workdir and what is kept. Nothing else of the judge's is there for the
    judged: its home is as it was at the checkpoint, its /tmp its own."""
    sealed: tuple[str, ...] = ()
    """Folders that no command of the judge can change from now on, and that the judged does not see: the tests."""
    hidden: tuple[str, ...] = ()
    """Folders that the judged does not see: where the reward is written."""
    covered: tuple[str, ...] = ()
    """Paths among the shared that the judge itself does not see either: it finds empty folders there."""
    removed: tuple[str, ...] = ()
    """What the box's image brings for the judge alone: the judged finds empty folders there."""
    unlinked: bool = False
    """The judge follows no link in what is shared: none that the judged makes leads it elsewhere."""
    timeout_s: float = 60.0
    """How long one launched command may take unless its caller says otherwise."""
    max_output: int = 64 << 20
    """How many bytes one launched command may print unless its caller says otherwise."""
    needs_launcher: bool = False
    """The judge relies on `untrusted`: a box whose image has nothing to run it with is not divided."""
    withheld: tuple[str, ...] = ()
    """Variables of the judge's environment that what it launches does not get; a name may end in `*`."""
    guards: Mapping[str, str] = MappingProxyType({})
    """Files that lie beside the launcher, by name. One that begins with `#!/bin/sh` stands before a program of its
    name, and is there only where that program is."""

    @property
    def live(self) -> tuple[str, ...]:
        """Where commands of the judge leave something to each other. What they write elsewhere is gone with them."""
        return (*self.shared, *self.sealed, *self.hidden)


class Judged(Protocol):
    """The side of a divided box on which code runs that is being judged. What runs there sees nothing of the judge:
    not its processes, memory, environment or descriptors, not its tests, and cannot signal it."""

    @property
    def tools(self) -> str:
        """A read-only folder of the judge's with the launcher `untrusted` and the Python module of that name; it goes
        to the front of the judge's PATH, and to the end of its PYTHONPATH."""

    @property
    def launched(self) -> int:
        """How many commands the judge has launched so far."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        scratch: bool = False,
        network: bool = True,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command as the judged, from here. What the image sets is not in its environment.

        `scratch`: it works in a copy of the shared paths that is gone afterwards. `network=False`: not even the box's
        own loopback.
        """


@runtime_checkable
class Separable(Protocol):
    """A box that keeps code under test apart from its judge: the ground under the launcher `untrusted`."""

    @property
    def indivisible(self) -> str:
        """Why it cannot be divided, as far as that is known before it is tried; empty where nothing speaks against."""

    def separate(self, separation: Separation) -> AbstractAsyncContextManager[Judged]:
        """Divide the box. In the block, `spawn` starts commands of the judge, and those may launch judged commands by
        `untrusted`; the end of the block kills what is still running as the judged. No command may be running before.

        The division itself lasts as long as the box. Raises SandboxError where this machine cannot do it.
        """


class BoxUser(NamedTuple):
    """Whom commands see themselves as. Outside, and for what they may do, all of a box are one ordinary user."""

    uid: int
    gid: int
    name: str
    home: str = ""
    """Empty: the box's own."""


@runtime_checkable
class ActsAs(Protocol):
    """A box whose commands can look like another user to themselves."""

    def act_as(self, user: BoxUser | None) -> BoxUser | None:
        """Commands from now on; None: as the box has it. Returns whom they looked like before."""


class Connection(Protocol):
    """Two streams to something in a box."""

    @property
    def stdin(self) -> ByteSendStream:
        """What it reads."""

    @property
    def stdout(self) -> ByteReceiveStream:
        """What it says."""

    async def wait(self) -> int:
        """Once it is over; SandboxLost where the box went away."""


@runtime_checkable
class Reachable(Protocol):
    """A box whose ports can be reached from here without a command in it that passes on what is said."""

    def connect(self, port: int) -> AbstractAsyncContextManager[Connection]:
        """A connection to 127.0.0.1:port in the box, closed with the block; SandboxError where nobody listens there."""


@runtime_checkable
class Traced(Protocol):
    """A box that knows what was written in it, without a command in it that looks."""

    async def written(self, since: float, without: Sequence[str]) -> tuple[str, ...] | None:
        """Files below home and in /tmp that were made or changed since that time, by name, outside these paths.

        What is hidden in /tmp is not among them, and not more than a few thousand are. None where a
        command has to look after all. No command may be running.
        """


@runtime_checkable
class Listed(Protocol):
    """A box that tells what is in a folder, without a command in it that looks."""

    async def names_in(self, folder: str) -> tuple[str, ...] | None:
        """The names in a folder, which is made, with those above it, where there is none; None where they are many."""


@runtime_checkable
class Imaged(Protocol):
    """A box whose image may set environment variables."""

    @property
    def image_env(self) -> Mapping[str, str]:
        """What its image gives to every command beside the plain environment."""


@runtime_checkable
class InProcessSandbox(Protocol):
    """Stands in for a box where the agent works in this process: it has ports, but no commands and no files."""

    def socket_path(self, port: int) -> str:
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


def check_system(spec: SandboxSpec) -> None:
    """UsageError where a spec names both an image, which has a system, and a system."""
    if spec.system and spec.template:
        raise UsageError(
            f"the image {spec.template!r} has a system of its own", argument="system", remedy="name one: {template}"
        )


def refuse_writable_system(spec: SandboxSpec) -> None:
    """UsageError where a box of this kind is asked for a system that can be written."""
    if spec.writable_system:
        raise UsageError(
            f"a task whose paths are those of the system runs in local boxes only, not in {spec.backend!r} ones",
            argument="sandbox",
            remedy="use local",
        )


class CapturedOutput(NamedTuple):
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
    stdout: CapturedOutput
    stderr: CapturedOutput
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
    def output(self) -> CapturedOutput:
        """What was kept."""
        data = b"".join(self._chunks)
        return CapturedOutput(data[-self._limit :], self._cut or len(data) > self._limit)


async def tail(stream: ByteReceiveStream, limit: int) -> CapturedOutput:
    """Drain a stream to its end, keeping only its last `limit` bytes."""
    kept = Tail(limit)
    await kept.drain(stream)
    return kept.output


async def run(
    box: Sandbox,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    stdin_after: anyio.Event | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str = HOME,
    inherit_image_env: bool = True,
    timeout_s: float = 60,
    limit: int = 64 << 10,
) -> Exit:
    """Run a command to its end; at the time limit it is killed with all it started (exit code 124).

    `stdin_after`: its input waits for that, and so does a command that reads it first.
    """
    started = time.monotonic()
    stdout, stderr = Tail(limit), Tail(limit)
    code, timed_out = 124, True

    async def feed(stream: ByteSendStream) -> None:
        # It may close its input or die before it has read all: its exit code tells.
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await stream.send(stdin)

    async with box.spawn(argv, env=env, cwd=cwd, inherit_image_env=inherit_image_env) as process:
        with anyio.move_on_after(timeout_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stdout.drain, process.stdout)
                tasks.start_soon(stderr.drain, process.stderr)
                if stdin_after:
                    await stdin_after.wait()
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
    inherit_image_env: bool = True,
    timeout_s: float = 60,
    limit: int = 64 << 10,
) -> Exit:
    """Run shell text a user wrote, with no start-up files read."""
    argv = [*SHELL, script]
    inherit = inherit_image_env
    return await run(box, argv, env=env, cwd=cwd, inherit_image_env=inherit, timeout_s=timeout_s, limit=limit)
