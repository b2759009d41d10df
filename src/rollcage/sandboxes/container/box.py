"""One container as a box: everything that can be asked of it, as requests to the first process in it."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from errno import ENOSPC

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes import launcher
from rollcage.sandboxes.base import Separation
from rollcage.sandboxes.box import BackendBox
from rollcage.sandboxes.box_rpc import RequestRefused, listening, read_file, write_file
from rollcage.sandboxes.container import filters
from rollcage.sandboxes.container.control_channel import ControlChannel
from rollcage.sandboxes.container.engine import ContainerEngine
from rollcage.sandboxes.container.process import ContainerProcess
from rollcage.sandboxes.judged import JudgedSide, Side
from rollcage.types import HOME, SandboxSpec

OWN_PIDS = 16
"""How many more processes a box may have than was asked for: those of ours that start its commands."""
_CLOSE_S = 10


class ContainerBox(BackendBox[ContainerProcess]):
    """One running container. A thread is held by none of its commands, however many there are."""

    def __init__(
        self, name: str, engine: ContainerEngine, channel: ControlChannel, spec: SandboxSpec, env: Mapping[str, str]
    ) -> None:
        """Made by the provider. `env`: what its image gives to every command beside the plain environment."""
        super().__init__(name, image_env=env)
        self._engine, self._channel, self._spec = engine, channel, spec
        self._judged: ControlChannel | None = None
        """Where the judged's side of a divided box is asked."""
        self._live: list[str] | None = None
        """Where the judge's commands leave something to each other, in a divided box."""
        self._listeners: set[socket.socket] = set()

    @asynccontextmanager
    async def separate(self, separation: Separation) -> AsyncIterator[JudgedSide]:
        """Divide the box: what the judge launches by `untrusted` in the block runs as the judged."""
        if self._running or self._judged is not None:
            why = "it is divided already" if self._judged is not None else "a command is running in it"
            raise SandboxError(f"cannot divide the box: {why}")
        sizes = {"tmp": self._spec.tmp_mb << 20, "disk": self._spec.disk_mb << 20, "home": HOME}
        request = {**separation._asdict(), **sizes, "guards": None}
        request["tools"] = {**launcher.tools(separation.max_output), **separation.guards}
        with anyio.CancelScope(shield=True):
            try:
                answer = await self._channel.ask("divide", request)
            except RequestRefused as refused:
                remedy = "use an engine that gives containers SYS_ADMIN and lets them mount (rootful, no AppArmor)"
                raise SandboxError(f"cannot divide the box: {refused}", remedy=remedy) from refused
            door, control = answer.fds
            with socket.socket(fileno=door) as listener:
                self._judged = await ControlChannel.greeted(socket.socket(fileno=control))
                listening_on = listener.dup()
            self._live = list(separation.live)
        with listening_on:
            async with launcher.serving(listening_on, JudgedSide(self.running, separation), separation) as judged:
                yield judged

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file; FileMissing where there is none. Never leads out, never hangs."""
        return await read_file(self._channel.ask, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""
        await write_file(self._channel.ask, path, data, mode)

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket that is 127.0.0.1:port in the box and is served by this process; closed with the block."""
        return listening(self._channel.ask, port, self._listeners)

    async def populate_home(self, layers: Sequence[str]) -> None:
        """Lay these folders of the container over the home directory, topmost first; see which limits are in force."""
        try:
            answer = await self._channel.ask("populate_home", {"layers": list(layers), "home": HOME})
        except RequestRefused as refused:
            why = "it does not fit; raise disk_mb" if refused.errno == ENOSPC else str(refused)
            raise SandboxError(f"cannot put the agent into the box: {why}") from refused
        self.notes = _notes(self._spec, answer.body["bounds"])
        self.indivisible = "" if answer.body["divides"] else "the engine gives its containers no SYS_ADMIN"

    async def close(self) -> None:
        """Hang up, which ends the container, and remove it. Whatever is asked of it from now on raises SandboxLost."""
        self._channel.close()
        if self._judged is not None:
            self._judged.close()
        for process in list(self._running):
            # The container's end ends its supervisor, and this is where it is heard.
            with suppress(SandboxLost), anyio.move_on_after(_CLOSE_S):
                await process.wait()
        for listener in self._listeners:
            listener.close()
        await self._engine.remove(self.id)

    async def _begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, side: Side) -> ContainerProcess:
        channel = self._judged if side.judged and self._judged is not None else self._channel
        request = {
            "judged": side.judged,
            "scratch": list(side.scratch),
            "network": side.network,
            "live": None if side.judged else self._live,
            "home": HOME,
            "tmp": self._spec.tmp_mb << 20,
            "disk": self._spec.disk_mb << 20,
            "argv": list(argv),
            "env": dict(env),
            "cwd": cwd,
            "limits": _limits(self._spec),
            "filters": [program.hex() for program in filters.programs()],
        }
        process = ContainerProcess(channel, side.streams)
        self._running.add(process)
        try:
            try:
                await channel.ask("spawn", request, process.theirs)
            finally:
                for fd in process.theirs:
                    os.close(fd)
        except BaseException as error:
            self._running.discard(process)
            process.let_go()
            if isinstance(error, RequestRefused):
                raise SandboxError(f"cannot run {argv[0]}: {error}") from error
            raise
        return process


def _limits(spec: SandboxSpec) -> dict[str, int]:
    # DATA and not AS: runtimes reserve far more address space than they use, and some give up without it.
    return {"DATA": spec.memory_mb << 20, "FSIZE": spec.file_mb << 20, "NOFILE": 4096, "CORE": 0}


def _notes(spec: SandboxSpec, bounds: Mapping[str, int]) -> tuple[str, ...]:
    why = "(the container engine sets no such cgroup)"
    notes = []
    if bounds.get("memory", math.inf) > spec.memory_mb << 20:
        notes.append(f"memory: each process is held to {spec.memory_mb} MB, but not all of them together {why}")
    if bounds.get("pids", math.inf) > spec.pids + OWN_PIDS:
        notes.append(f"pids: {spec.pids} is not enforced {why}")
    if spec.cpus is not None and "cpus" not in bounds:
        notes.append(f"cpus: {spec.cpus:g} is not enforced {why}")
    return tuple(notes)
