"""What the boxes of every backend do the same way: run a command on a side, and end it with its block."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Generic, Protocol, TypeVar

import anyio

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import Process
from rollcage.sandboxes.box_rpc import check_command, environment_of
from rollcage.sandboxes.judged import Side
from rollcage.types import HOME


class BackendProcess(Process, Protocol):
    """A command, as its backend holds it."""

    async def end(self) -> None:
        """Kill what still runs, wait until it is dead, and let go of everything."""


P = TypeVar("P", bound=BackendProcess)


class BackendBox(Generic[P]):
    """One box of a backend, whose commands are `P`. A backend says how one begins."""

    def __init__(self, name: str, notes: tuple[str, ...] = (), image_env: Mapping[str, str] | None = None) -> None:
        self.id = name
        """Unique on this machine; an engine or a cloud knows the box by it."""
        self.notes = notes
        """Asked-for limits that cannot be enforced here, in words."""
        self.image_env = dict(image_env or {})
        """What its image gives to every command beside the plain environment."""
        self._running: set[P] = set()
        self.indivisible = ""
        """Why it cannot be divided, as far as that is known before it is tried."""

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        inherit_image_env: bool = True,
    ) -> AbstractAsyncContextManager[P]:
        """Start a command; it and everything it started are dead when the block is left."""
        own = {**self._users_own(), **(env or {})}
        return self.running(argv, environment_of(self.image_env, own, inherit=inherit_image_env), cwd, Side())

    @asynccontextmanager
    async def running(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, side: Side) -> AsyncIterator[P]:
        """The same with this very environment, on either side of a divided box."""
        try:
            check_command(argv, env, cwd)
        except SandboxError:
            for fd in side.streams or ():
                os.close(fd)
            raise
        with anyio.CancelScope(shield=True):
            process = await self._begin(argv, env, cwd, side)
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await process.end()
            self._running.discard(process)

    async def _begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, side: Side) -> P:
        """Start it, and have it among the running; the descriptors of `side` are closed, whatever happens."""
        raise NotImplementedError

    def _users_own(self) -> Mapping[str, str]:
        """Variables that go with whom commands see themselves as."""
        return {}
