"""One container as a box: everything that can be asked of it, as orders to the first process in it."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from errno import ENOSPC

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.containers import filters
from rollcage.sandboxes.containers.engine import Engine
from rollcage.sandboxes.containers.line import Line
from rollcage.sandboxes.containers.process import ContainerProcess
from rollcage.sandboxes.keeper import Refusal
from rollcage.sandboxes.orders import check_command, environment_of, listening, read_file, write_file
from rollcage.types import HOME, SandboxSpec

OWN_PIDS = 16
"""So many more processes a box may have than was asked for: those that stand over its commands."""
_CLOSE_S = 10


class ContainerBox:
    """One running container. A thread is held by none of its commands, however many there are."""

    def __init__(self, name: str, engine: Engine, line: Line, spec: SandboxSpec, env: Mapping[str, str]) -> None:
        """Made by the provider. `env`: what its image gives to every command beside the plain environment."""
        self._id, self._engine, self._line, self._spec = name, engine, line, spec
        self.image_env = dict(env)
        self._notes: tuple[str, ...] = ()
        self._running: set[ContainerProcess] = set()
        self._listeners: set[socket.socket] = set()

    @property
    def id(self) -> str:
        """A name that is unique on this machine; the engine knows the container by it."""
        return self._id

    @property
    def notes(self) -> tuple[str, ...]:
        """Asked-for limits that cannot be enforced here, in words."""
        return self._notes

    @asynccontextmanager
    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = HOME
    ) -> AsyncIterator[ContainerProcess]:
        """Start a command; it and everything it started are dead when the block is left."""
        with anyio.CancelScope(shield=True):
            process = await self._begin(argv, environment_of(self.image_env, env), cwd)
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await process.end()
            self._running.discard(process)

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file; FileMissing where there is none. Never leads out, never hangs."""
        return await read_file(self._line.ask, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""
        await write_file(self._line.ask, path, data, mode)

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket that is 127.0.0.1:port in the box and is served by this process; closed with the block."""
        return listening(self._line.ask, port, self._listeners)

    async def furnish(self, layers: Sequence[str]) -> None:
        """Lay these folders of the container over the home directory, topmost first; see which limits are in force."""
        try:
            answer = await self._line.ask("furnish", {"layers": list(layers), "home": HOME})
        except Refusal as refusal:
            why = "it does not fit; raise disk_mb" if refusal.errno == ENOSPC else str(refusal)
            raise SandboxError(f"cannot put the agent into the box: {why}") from refusal
        self._notes = _notes(self._spec, answer.body["bounds"])

    async def close(self) -> None:
        """Hang up, which ends the container, and remove it. Whatever is asked of it from now on raises SandboxLost."""
        self._line.close()
        for process in list(self._running):
            # The container's end ends its supervisor, and this is where it is heard.
            with suppress(SandboxLost), anyio.move_on_after(_CLOSE_S):
                await process.wait()
        for listener in self._listeners:
            listener.close()
        await self._engine.remove(self._id)

    async def _begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> ContainerProcess:
        check_command(argv, env, cwd)
        order = {
            "argv": list(argv),
            "env": dict(env),
            "cwd": cwd,
            "limits": _limits(self._spec),
            "filters": [program.hex() for program in filters.programs()],
        }
        process = ContainerProcess(self._line)
        self._running.add(process)
        try:
            try:
                await self._line.ask("spawn", order, process.theirs)
            finally:
                for fd in process.theirs:
                    os.close(fd)
        except BaseException as error:
            self._running.discard(process)
            process.let_go()
            if isinstance(error, Refusal):
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
