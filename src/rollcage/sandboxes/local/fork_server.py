"""Our side of the fork server: the one small process that forks and joins namespaces, so that this large one need not.

Every request carries the socket its reply comes back on, so requests never wait for each other.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import shutil
import socket
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from rollcage.errors import SandboxLost, SetupError
from rollcage.sandboxes.box_rpc import BoxReply, MemoryFile, RequestRefused, hung_up, send_request
from rollcage.sandboxes.inside.kernel import receive_fds
from rollcage.sandboxes.inside.requests import AGAIN_S
from rollcage.sandboxes.layers import BOX_UIDS
from rollcage.types import JsonObject

_START = "import sys; sys.path.append(sys.argv[1]); from rollcage.sandboxes.local.inside.main import main; main()"
_GONE = "the sandbox's fork server is gone, and all boxes with it"
_START_TIMEOUT_S = 60


class ForkServer:
    """A running fork server. It ends when this object is closed or collected, or when this process ends in any way."""

    def __init__(self, layers: Path, uid: int | None) -> None:
        """Starts it; boxes take their layers, which are `uid`'s, from the folder `layers`.

        Each box runs as a user of its own (`new_user`), or as `uid` where this machine allows none; as whoever we are
        where `uid` is None.
        """
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SetupError("bubblewrap is not installed", remedy="run: apt-get install bubblewrap")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [
            str(Path(__file__).parents[3]),
            str(os.getpid()),
            str(layers),
            bwrap,
            "-" if uid is None else f"{uid}:{BOX_UIDS[0]}",
        ]
        with theirs:
            pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", "-c", _START, *arguments],
                {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, "/dev/null", os.O_WRONLY, 0),
                ],
                setsid=True,  # Ctrl-C in a terminal is for us, also while it starts
            )
        self.pid = pid
        self._control = ours
        self._sending = anyio.Lock()
        self._ready = False
        self._last = secrets.randbelow(len(BOX_UIDS))
        self.own_users = False
        """Whether each box has a host user of its own: known once anything was asked."""
        self.close = weakref.finalize(self, _end, ours, pid)
        """Ends it, and every command it started."""

    @property
    def gone(self) -> bool:
        """Whether it is dead: its end of our socket closes before anything it started is killed."""
        return hung_up(self._control)

    def new_user(self) -> int:
        """A host user that no other box has, nor had lately; other processes begin elsewhere in the range."""
        self._last = (self._last + 1) % len(BOX_UIDS)
        return BOX_UIDS[self._last]

    async def ask(self, action: str, request: Mapping[str, object], fds: Sequence[int] = ()) -> BoxReply:
        """Have something done; RequestRefused where it could not be, SandboxLost where the fork server died.

        `uid` in a request is the user of the box that it is about; without, it is done as a new one.
        """
        ours, theirs = socket.socketpair()
        reply = _Reading(ours)
        try:
            with theirs, MemoryFile(self._body(request)) as body:
                async with self._sending:
                    await self._become_ready()
                    while not self._send(action, [theirs.fileno(), body.fileno(), *fds]):
                        await anyio.wait_writable(self._control)
                        await anyio.sleep(AGAIN_S)
            while not reply.take():
                await anyio.wait_readable(ours)
            return reply.result()
        except BaseException:
            reply.drop()
            raise
        finally:
            ours.close()

    def ask_now(self, action: str, request: Mapping[str, object], fds: Sequence[int] = ()) -> BoxReply:
        """The same, for callers outside an event loop."""
        ours, theirs = socket.socketpair()
        reply = _Reading(ours)
        with ours:
            with theirs, MemoryFile(self._body(request)) as body:
                if not self._ready:
                    select.select([self._control], [], [], _START_TIMEOUT_S)
                    self._check_ready()
                while not self._send(action, [theirs.fileno(), body.fileno(), *fds]):
                    time.sleep(AGAIN_S)
            while not reply.take():
                select.select([ours], [], [])
            return reply.result()

    def _body(self, request: Mapping[str, object]) -> bytes:
        return json.dumps({"uid": self.new_user(), **request}).encode()

    async def _become_ready(self) -> None:
        if not self._ready:
            with anyio.move_on_after(_START_TIMEOUT_S):
                await anyio.wait_readable(self._control)
            self._check_ready()

    def _check_ready(self) -> None:
        said = b""
        with suppress(BlockingIOError):
            said = self._control.recv(16, socket.MSG_DONTWAIT)
        self._ready, self.own_users = said.startswith(b"ready"), said == b"ready own"
        if not self._ready:
            raise SetupError(f"the sandbox's fork server does not start: try `{sys.executable} -I -S -c pass`")

    def _send(self, action: str, fds: Sequence[int]) -> bool:
        return send_request(self._control, action, fds, gone=_GONE)


class _Reading:
    """A reply as it comes in."""

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

    def result(self) -> BoxReply:
        """The whole reply; a refused may come after a first part of it."""
        body: JsonObject = {}
        for line in self._data.splitlines():
            body.update(json.loads(line))
        if "error" in body:
            raise RequestRefused(body)
        if not body:
            raise SandboxLost(_GONE)
        return BoxReply(body, self._fds)

    def drop(self) -> None:
        """Close what came, as nobody will."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


def _end(control: socket.socket, pid: int) -> None:
    control.close()
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)
