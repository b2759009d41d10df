"""One local box: everything that can be asked of it, as requests to the fork server."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import PurePosixPath
from typing import NamedTuple

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes import launcher, seccomp
from rollcage.sandboxes.base import BoxUser, Separation
from rollcage.sandboxes.box import BackendBox
from rollcage.sandboxes.box_rpc import BoxReply, RequestRefused, checked_path, listening, read_file, write_file
from rollcage.sandboxes.contents import FolderEntry
from rollcage.sandboxes.inside.orders import TOOLS
from rollcage.sandboxes.judged import JudgedSide, Side, null_streams
from rollcage.sandboxes.local.cgroups import Cgroup
from rollcage.sandboxes.local.connection import LocalConnection
from rollcage.sandboxes.local.disks import discard
from rollcage.sandboxes.local.fork_server import ForkServer
from rollcage.sandboxes.local.process import LocalProcess
from rollcage.sandboxes.pipes import pipes
from rollcage.types import HOME, SandboxSpec

_BWRAP = (
    "--unshare-user --disable-userns --unshare-pid --unshare-ipc --unshare-uts --unshare-cgroup-try "
    "--die-with-parent --new-session --cap-drop ALL --hostname box --clearenv"
).split()
_AS_USER = ("--uid", "1000", "--gid", "1000")
_AS_ROOT = ("--uid", "0", "--gid", "0")
"""As it looks from inside: outside both are the same ordinary user, and neither has any capability."""
_ROOTS_OWN = {"HOME": "/root", "USER": "root"}
_PROGRAM = ("/usr/bin/env", "-u", "PWD", "--")
"""bubblewrap adds PWD to every environment; `env` takes it away again, and gives the usual 126 and 127."""
_LOCALE = ("LANG", "LC_")
"""Set by `env` itself: if it found them set, it would load a locale first, which takes longer than all else it does."""
_OWN_PIDS = 8
_FILES = 4096
PENDING_SIGNALS, _QUEUED_BYTES = 1024, 100 << 10
"""Signals that may wait in a box, and bytes of its message queues."""
_MOST_NAMES = 1000
_LOOK_S = 0.5
_LOOK_SHARE = 10
"""Of the time, one part in so many goes into looking, at most."""
_SPARE_BYTES = 32 << 20
"""More than what was asked for, after a rewind: as where the disk is in memory."""


class Shape(NamedTuple):
    """What a box was made as."""

    spec: SandboxSpec
    """What was asked for."""
    layers: int
    """How many layers lie below its home."""
    folder: str = ""
    """Where on the host it writes, as the fork server names it; empty: to a memory disk."""
    systems: int = 0
    """How many folders its system is made of, where it is one of its own."""
    uid: int = 0
    """The host user that it runs as, where each box has its own."""


class LocalBox(BackendBox[LocalProcess]):
    """One box. Nothing runs in it but what is being spawned; idle, it is three descriptors and a little tmpfs."""

    def __init__(
        self,
        name: str,
        fork_server: ForkServer,
        namespaces: Sequence[int],
        limits: tuple[Cgroup, tuple[str, ...]],
        shape: Shape,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Made by the provider: `limits` are its cgroups and what they control.

        `env`: what its image gives to every command beside the plain environment.
        """
        self._fork_server = fork_server
        self._user, self._mnt, self._net = namespaces
        self._group, controllers = limits
        super().__init__(name, _notes(shape, controllers), env)
        self._spec, self._layers, self._folder, self._systems, self._uid = shape
        self._rooted = self._spec.writable_system
        self._listeners: set[socket.socket] = set()
        self._connections: set[LocalConnection] = set()
        self._asked: set[anyio.Event] = set()
        self._upper = 0
        self._frozen: list[int] = []
        self._open = True
        self._divided = False
        self._judges_files = _FILES
        self._live: list[str] | None = None
        """Where the judge's commands leave something to each other, in a divided box."""
        self._acts_as: BoxUser | None = None
        self._looking: asyncio.Task[None] | None = None
        self._most = self._spec.disk_mb << 20

    def act_as(self, user: BoxUser | None) -> BoxUser | None:
        """Whom commands see themselves as from now on; None: as the box has it. Returns whom before."""
        before, self._acts_as = self._acts_as, user
        return before

    def _users_own(self) -> dict[str, str]:
        if not self._rooted:
            return {}
        if (user := self._acts_as) is None:
            return _ROOTS_OWN
        return {"HOME": user.home or _ROOTS_OWN["HOME"], "USER": user.name, "LOGNAME": user.name}

    @asynccontextmanager
    async def separate(self, separation: Separation) -> AsyncIterator[JudgedSide]:
        """Divide the box: what the judge launches by `untrusted` in the block runs as the judged."""
        request: dict[str, object] = {**separation._asdict(), "tmp": self._spec.tmp_mb << 20, "door": TOOLS}
        request["tools"] = {**launcher.tools(separation.max_output), **separation.guards}
        request["guards"] = None
        request["compiled"] = launcher.compiled(separation.max_output)
        if self._divided:
            raise SandboxError("cannot divide the box: it is divided already")
        reply = await self._change("divide", request)
        self._divided = True
        self._judges_files = (4 if separation.covered else 2) * _FILES
        if not self._folder:  # where homes are on disk, tmpfs is no ground for another overlay
            self._live = list(separation.live)
        with socket.socket(fileno=reply.fds[0]) as listener:
            async with launcher.serving(listener, JudgedSide(self.running, separation), separation) as judged:
                yield judged

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file; FileMissing where there is none. Never leads out, never hangs."""
        return await read_file(self._ask_about_files, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""
        await write_file(self._ask_about_files, path, data, mode)

    async def names_in(self, folder: str) -> tuple[str, ...] | None:
        """The names in a folder, which is made, with those above it, where there is none; None where they are many."""
        reply = await self._ask_about_files("list", {"path": checked_path(folder), "most": _MOST_NAMES}, ())
        names = reply.body["names"]
        return None if names is None else tuple(names)

    async def plain_contents(self, folder: str, empty: Sequence[str]) -> list[FolderEntry] | None:
        """All that is in a folder, and the folders `empty` made; None where it takes a command to look."""
        if self._rooted:
            return None
        if self._running:
            raise SandboxError("cannot read a folder whole: a command is running in the box")
        reply = await self._ask_about_files("contents", {"path": checked_path(folder), "empty": list(empty)}, ())
        if not reply.fds:
            return None
        [content] = reply.fds
        try:
            # In the order in which they lie there.
            return [
                FolderEntry(path, mode, mtime, os.read(content, size) if size >= 0 else None)
                for path, mode, mtime, size in reply.body["entries"]
            ]
        finally:
            os.close(content)

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket that is 127.0.0.1:port in the box and is served by this process; closed with the block."""
        return listening(self._ask_about_network, port, self._listeners)

    @asynccontextmanager
    async def connect(self, port: int) -> AsyncIterator[LocalConnection]:
        """A connection to 127.0.0.1:port in the box, closed with the block; SandboxError where nobody listens there."""
        try:
            reply = await self._ask_about_network("connect", {"port": port}, ())
        except RequestRefused as refused:
            raise SandboxError(f"cannot connect to port {port} in the box: {refused}") from refused
        connection = LocalConnection(reply.fds[0], lambda: not self._open or self._fork_server.gone)
        self._connections.add(connection)
        try:
            yield connection
        finally:
            self._connections.discard(connection)
            connection.close()

    async def open_upper(self) -> int:
        """A descriptor of the folder with what was written below home since it was opened or checkpointed.

        It is as overlay keeps it, deletions included, and made by whatever ran in the box. No command may be running.
        """
        if self._running:
            raise SandboxError("cannot open what was written: a command is running in the box")
        reply = await self._ask("upper", {"upper": self._upper}, [self._user, self._mnt])
        return reply.fds[0]

    async def written(self, since: float, without: Sequence[str]) -> tuple[str, ...] | None:
        """Files that were made or changed since that time, outside these paths; None where all of its system can be
        written. No command may be running."""
        if self._rooted:
            return None
        if self._running:
            raise SandboxError("cannot tell what was written: a command is running in the box")
        request = {"upper": self._upper, "since": since, "without": list(without)}
        reply = await self._ask("written", request, [self._user, self._mnt])
        return tuple(reply.body["paths"])

    async def checkpoint(self) -> None:
        """Remember the home directory as it is. No command may be running."""
        if self._divided:
            raise SandboxError("cannot checkpoint the box: it is divided")
        await self._change("checkpoint", {})
        self._frozen.insert(0, self._upper)
        self._upper += 1

    async def rewind(self, keep: Sequence[str], restore: Sequence[str] = ()) -> tuple[str, ...]:
        """Put everything below home back as it was at the checkpoint, except the `keep` paths; /tmp becomes empty.

        What `restore` names within those is put back too. A divided box whose system can be written is whole again.
        """
        divided = self._divided
        if not self._frozen or (divided and not self._rooted):
            why = "it is divided" if divided else "there was no checkpoint"
            raise SandboxError(f"cannot rewind the box: {why}")
        for path in (*keep, *restore):
            pure = PurePosixPath(path)
            if not pure.is_relative_to("/" if self._rooted else HOME) or ".." in pure.parts:
                raise SandboxError(f"cannot keep {path}: it is not below {HOME}")
        request = {"keep": list(keep), "restore": list(restore), "tmp": self._spec.tmp_mb << 20}
        reply = await self._change("rewind", {**request, "divided": divided})
        self._divided, self._live = False, None
        self._upper += 1
        # Whatever the agent left in kept paths, who comes after it has all the room that the agent had.
        self._most = reply.body["kept"] + (self._spec.disk_mb << 20) + _SPARE_BYTES
        return tuple(reply.body["changed"])

    async def close(self) -> None:
        """Kill what runs and free everything. Whatever is asked of the box from now on raises SandboxLost."""
        if not self._open:
            return
        self._open = False
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        # Their descriptors are in use until they are answered, and a number may not be closed and used again before.
        for answered in list(self._asked):
            await answered.wait()
        for process in self._running:
            process.lose()
        for process in list(self._running):
            with suppress(SandboxLost):
                await process.wait()
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.close()
        for fd in (self._user, self._mnt, self._net):
            os.close(fd)
        self._group.close()
        if self._folder:
            await discard(self._fork_server, self._folder)

    async def _ask(self, action: str, request: Mapping[str, object], fds: Sequence[int]) -> BoxReply:
        if not self._open:
            raise SandboxLost(f"the box {self.id} is closed")
        answered = anyio.Event()
        self._asked.add(answered)
        try:
            return await self._fork_server.ask(action, {**request, "uid": self._uid}, fds)
        finally:
            self._asked.discard(answered)
            answered.set()

    async def _ask_about_files(self, action: str, request: Mapping[str, object], fds: Sequence[int]) -> BoxReply:
        return await self._ask(action, request, [self._user, self._mnt, *fds])

    async def _ask_about_network(self, action: str, request: Mapping[str, object], fds: Sequence[int]) -> BoxReply:
        return await self._ask(action, request, [self._user, self._net, *fds])

    async def _change(self, action: str, request: Mapping[str, object]) -> BoxReply:
        if self._running:
            raise SandboxError(f"cannot {action} the box: a command is running in it")
        state = {"upper": self._upper, "frozen": self._frozen, "layers": self._layers, "brought": bool(self._folder)}
        state |= {"rooted": self._rooted, "systems": self._systems}
        with anyio.CancelScope(shield=True):
            try:
                reply = await self._ask(action, {**request, **state}, [self._user, self._mnt])
            except RequestRefused as refused:
                raise SandboxError(f"cannot {action} the box: {refused}") from refused
        return reply

    async def _begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, side: Side) -> LocalProcess:
        locale = [f"{name}={value}" for name, value in env.items() if name.startswith(_LOCALE)]
        others = {name: value for name, value in env.items() if not name.startswith(_LOCALE)}
        who = _AS_ROOT if self._rooted else _AS_USER
        if self._acts_as:
            who = ("--uid", str(self._acts_as.uid), "--gid", str(self._acts_as.gid))
        options = [*_BWRAP, *who, *(word for name, value in others.items() for word in ("--setenv", name, value))]
        if not side.network:
            options.append("--unshare-net")
        files = self._judges_files if self._divided and not side.judged else _FILES
        request = {
            "options": options,
            "argv": [*_PROGRAM, *locale, *argv],
            "cwd": cwd,
            "limits": _limits(self._spec, judged=side.judged, files=files),
            "judged": side.judged,
            "scratch": list(side.scratch),
            "live": None if side.judged else self._live,
            "disk": self._spec.disk_mb << 20,
            "shm": self._spec.tmp_mb << 20,
            "seccomp": seccomp.program().hex(),
        }
        ours, streams = pipes() if side.streams is None else (null_streams(), list(side.streams))
        (from_status, status), (block, release) = os.pipe(), os.pipe()
        process = LocalProcess(ours[0], ours[1], ours[2], from_status, fork_server=self._fork_server, group=self._group)
        self._running.add(process)
        theirs = [*streams, status, block]
        try:
            try:
                fds = [*theirs, self._user, self._mnt, self._net, *self._group.joins]
                reply = await self._ask("spawn", request, fds)
            except BaseException:
                os.close(release)
                raise
            finally:
                for fd in theirs:
                    os.close(fd)
            await process.begin(reply.body["pid"], release)
        except BaseException as error:
            self._running.discard(process)
            process.abandon()
            if isinstance(error, RequestRefused):
                why = f"no such folder in the box: {cwd}" if error.kind == "NoFolder" else str(error)
                raise SandboxError(f"cannot run {argv[0]}: {why}") from error
            raise
        if self._folder and (self._looking is None or self._looking.done()):
            self._looking = asyncio.get_running_loop().create_task(self._hold_to_size())
        return process

    async def _hold_to_size(self) -> None:
        """While commands run, and once more: kill them where they wrote more than they may. A disk would refuse it."""
        more, pause = True, _LOOK_S
        while more:
            await anyio.sleep(pause)
            running, started = list(self._running), time.monotonic()
            more = bool(running)
            try:
                used = await self._used()
            except SandboxLost:
                return
            except (SandboxError, OSError):
                continue  # out of descriptors, say: the next look may do better
            if used > self._most:
                # Not those that were started since: the box may have been rewound before.
                for process in running:
                    process.kill()
            pause = max(_LOOK_S, _LOOK_SHARE * (time.monotonic() - started))

    async def _used(self) -> int:
        """How much was written, in bytes, as far as it can be seen."""
        first = [process.first for process in self._running if process.first]
        reply = await self._ask("usage", {"first": first}, [self._user, self._mnt, self._net])
        used: int = reply.body["bytes"]
        return used


def _limits(spec: SandboxSpec, *, judged: bool, files: int) -> dict[str, int]:
    # DATA and not AS: runtimes reserve far more address space than they use, and some give up without it.
    return {
        # Processes are counted for both sides together: the judge can start some whatever the judged does.
        "NPROC": (spec.pids // 2 if judged else spec.pids) + _OWN_PIDS,
        "DATA": spec.memory_mb << 20,
        "FSIZE": spec.file_mb << 20,
        # It also bounds how many descriptors the host user may have on their way through sockets when one more is sent.
        # Where boxes share a user, what agents have on their way so never keeps a judge from handing over what it
        # launches; nor does what a judge has that runs hostile code beside itself keep one that runs none.
        "NOFILE": files,
        # As NPROC: of all commands of the box together. The host user's own allowance is many times as large.
        "SIGPENDING": PENDING_SIGNALS,
        "MSGQUEUE": _QUEUED_BYTES,
        "CORE": 0,
    }


def _notes(shape: Shape, controllers: Sequence[str]) -> tuple[str, ...]:
    spec, notes = shape.spec, []
    if "memory" not in controllers:
        notes.append(
            f"memory: each process is held to {spec.memory_mb} MB, but not all of them together "
            "(no memory cgroup that we may write)"
        )
    if spec.cpus is not None and "cpu" not in controllers:
        notes.append(f"cpus: {spec.cpus:g} is not enforced (no cpu cgroup that we may write)")
    if shape.folder:
        notes.append(
            f"disk: {spec.disk_mb} MB is held by looking now and then: commands that wrote more are killed, "
            "but more can be written before that, and nameless files that no process has open (they are mapped, or on "
            "their way through a socket) are not seen (home is on a disk of the host, not in memory)"
        )
    return tuple(notes)
