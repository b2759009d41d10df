"""Our side of the keeper: the one small process that forks and joins namespaces, so that this large one need not.

Every request carries the socket its answer comes back on, so requests never wait for each other.
"""

from __future__ import annotations

import array
import json
import os
import select
import shutil
import socket
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio

from rollcage.errors import SandboxError, SandboxLost, SetupError
from rollcage.sandboxes.inside.kernel import receive_fds
from rollcage.types import JsonObject

_START = "import sys; sys.path.insert(0, sys.argv[1]); from inside.main import main; main()"
_GONE = "the sandbox's keeper process is gone, and all boxes with it"
_START_TIMEOUT_S = 60


class Refusal(SandboxError):
    """The keeper could not do what was asked: `kind` and `errno` for programs, the message for people."""

    def __init__(self, answer: JsonObject) -> None:
        step = answer["step"]
        super().__init__(f"{step}: {answer['text']}" if step else str(answer["text"]))
        self.kind: str = answer["error"]
        self.errno: int = answer["errno"] or 0
        self.step: str = step


class Answer(NamedTuple):
    """What the keeper sent back."""

    body: JsonObject
    fds: list[int]


class Keeper:
    """A running keeper. It ends when this object is closed or collected, or when this process ends in any way."""

    def __init__(self, layers: Path, uid: int | None) -> None:
        """Starts it; boxes run as `uid` (null: as whoever we are) and take their layers from the folder `layers`."""
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SetupError("bubblewrap is not installed; run: apt-get install bubblewrap")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(Path(__file__).parent), str(os.getpid()), str(layers), bwrap, "-" if uid is None else str(uid)]
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", "-c", _START, *arguments],
                {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                ],
            )
        self.pid = pid
        self._control = ours
        self._sending = anyio.Lock()
        self._ready = False
        self.close = weakref.finalize(self, _end, ours, pid)
        """Ends it, and every command it started."""

    @property
    def gone(self) -> bool:
        """Whether it is dead: its end of our socket closes before anything it started is killed."""
        try:
            return self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def ask(self, action: str, order: Mapping[str, object], fds: Sequence[int] = ()) -> Answer:
        """Have something done; Refusal where it could not be, SandboxLost where the keeper died."""
        ours, theirs = socket.socketpair()
        answer = _Reading(ours)
        try:
            with theirs, InMemory(json.dumps(order).encode()) as body:
                async with self._sending:
                    await self._become_ready()
                    while not self._send(action, [theirs.fileno(), body.fileno(), *fds]):
                        await anyio.wait_writable(self._control)
            while not answer.take():
                await anyio.wait_readable(ours)
            return answer.result()
        except BaseException:
            answer.drop()
            raise
        finally:
            ours.close()

    def ask_now(self, action: str, order: Mapping[str, object], fds: Sequence[int] = ()) -> Answer:
        """The same, for callers outside an event loop."""
        ours, theirs = socket.socketpair()
        answer = _Reading(ours)
        with ours:
            with theirs, InMemory(json.dumps(order).encode()) as body:
                if not self._ready:
                    select.select([self._control], [], [], _START_TIMEOUT_S)
                    self._check_ready()
                self._send(action, [theirs.fileno(), body.fileno(), *fds])
            while not answer.take():
                select.select([ours], [], [])
            return answer.result()

    async def _become_ready(self) -> None:
        if not self._ready:
            with anyio.move_on_after(_START_TIMEOUT_S):
                await anyio.wait_readable(self._control)
            self._check_ready()

    def _check_ready(self) -> None:
        try:
            self._ready = self._control.recv(16, socket.MSG_DONTWAIT) == b"ready"
        except BlockingIOError:
            self._ready = False
        if not self._ready:
            raise SetupError(f"the sandbox's keeper process does not start: try `{sys.executable} -I -S -c pass`")

    def _send(self, action: str, fds: Sequence[int]) -> bool:
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            self._control.sendmsg([action.encode()], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SandboxLost(_GONE) from error
        return True


class _Reading:
    """An answer as it comes in."""

    def __init__(self, source: socket.socket) -> None:
        source.setblocking(False)
        self._source = source
        self._data = b""
        self._fds: list[int] = []

    def take(self) -> bool:
        """Read what is there; true at the end."""
        while True:
            try:
                data, fds = receive_fds(self._source, 1 << 16)
            except BlockingIOError:
                return False
            except ConnectionError as error:
                raise SandboxLost(_GONE) from error
            self._fds += fds
            self._data += data
            if not data:
                return True

    def result(self) -> Answer:
        """The whole answer; a refusal may come after a first part of it."""
        body: JsonObject = {}
        for line in self._data.splitlines():
            body.update(json.loads(line))
        if "error" in body:
            raise Refusal(body)
        if not body:
            raise SandboxLost(_GONE)
        return Answer(body, self._fds)

    def drop(self) -> None:
        """Close what came, as nobody will."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class InMemory:
    """A file in memory with this content, for the length of a block."""

    def __init__(self, data: bytes) -> None:
        self._fd = os.memfd_create("order")
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    def __enter__(self) -> InMemory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _end(control: socket.socket, pid: int) -> None:
    control.close()
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
