"""Boxes of a backend that is not ours: whoever follows the published protocol can have sessions in them."""

from __future__ import annotations

import base64
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import anyio

from opencode_env.sandbox.base import SandboxBackend, SandboxHandle
from opencode_env.sandbox.line import Line, LineProcess
from rollcage.errors import SandboxError, SandboxLost
from rollcage.layers import Layer, LayerStore
from rollcage.sandboxes.file_commands import read_by_command, write_by_command
from rollcage.sandboxes.machine import BOX_UID
from rollcage.sandboxes.orders import check_command
from rollcage.sandboxes.relay import relayed
from rollcage.types import HOME, SandboxSpec

if TYPE_CHECKING:
    from opencode_env._loop import Loop

_UNPACK_S = 300.0
_PIECE = 6 << 20
_PORTS = 8
_NOTES = ("isolation: it is the backend's own; processes, memory, files and network are what it allows",)


class ForeignBox:
    """A box that we reach through its handle alone. Its network and its limits are its backend's."""

    def __init__(self, handle: SandboxHandle, home: str) -> None:
        """`home`: where its backend has what we call /home/user."""
        self.handle, self.home = handle, home
        self.line = Line(handle)
        """How it is reached."""

    @property
    def id(self) -> str:
        """Its backend's name for it."""
        return self.handle.sandbox_id

    @property
    def notes(self) -> tuple[str, ...]:
        """What of a box of ours it lacks."""
        return _NOTES

    @asynccontextmanager
    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = HOME
    ) -> AsyncIterator[LineProcess]:
        """Start a command with the box's own environment and `env`; it is dead, with all it started, after the block.

        Words that begin with our home are those of the box's.
        """
        environment = {"HOME": self.home, **{name: self._there(value) for name, value in (env or {}).items()}}
        words = [self._there(word) for word in argv]
        check_command(words, environment, cwd)
        process = await self.line.spawn(words, environment, self._there(cwd))
        try:
            yield process
        finally:
            with anyio.CancelScope(shield=True):
                await self.line.end(process)

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file; FileMissing where there is none."""
        return await read_by_command(self, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""
        await write_by_command(self, path, data, mode)

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[socket.socket]:
        """A listening socket that is a port on the loopback of the box and is served by this process.

        Boxes of some backends share one network: where the port is taken, another is found. Its number is its name.
        """
        async with AsyncExitStack() as stack:
            yield await self._listening(stack, port)

    async def _listening(self, stack: AsyncExitStack, port: int) -> socket.socket:
        tried = [port, *(20000 + secrets.randbelow(40000) for _ in range(_PORTS))]
        for candidate in tried:
            try:
                return await stack.enter_async_context(relayed(self, candidate))
            except SandboxLost:
                raise
            except SandboxError:
                if candidate == tried[-1]:
                    raise
        raise AssertionError("unreachable")

    async def start(self) -> None:
        """Bring our program into it."""
        await self.line.start()

    async def furnish(self, layers: Sequence[Layer], on: Loop, version: str) -> None:
        """Bring the agent into it, where it does not have it in this version."""
        binary = f"{self.home}/.rollcage/bin/opencode"
        probe = f"{quote(binary)} --version"
        found = await self.line.call(self.handle.exec, probe, timeout=60)
        if found.exit_code or found.stdout.strip() != version:
            for layer in layers:
                await self._send(await _archive(layer, on))
            found = await self.line.call(self.handle.exec, probe, timeout=60)
        if found.exit_code or version not in found.stdout:
            said = (found.stderr or found.stdout).strip()[-300:]
            raise SandboxError(f"the agent does not run in the box {self.id}: {said or found.exit_code}")

    async def close(self) -> None:
        """End what runs in it. The box itself is its handle's to close."""
        await self.line.close()

    async def _send(self, archive: Path) -> None:
        with archive.open("rb") as file:
            for number in range(10_000):
                if not (piece := file.read(_PIECE)):
                    break
                path = f"{self.line.folder}/piece-{number:04}"
                await self.line.call(self.handle.write_text, path, base64.b64encode(piece).decode())
        command = f"python3 -I -S {self.line.folder}/program.py unpack {self.line.folder} {quote(self.home)}"
        done = await self.line.call(self.handle.exec, command, timeout=_UNPACK_S)
        if done.exit_code:
            raise SandboxError(f"cannot unpack {archive.name} in the box {self.id}: {done.stderr.strip()[-300:]}")

    def _there(self, word: str) -> str:
        if word == HOME or word.startswith(f"{HOME}/"):
            return self.home + word[len(HOME) :]
        return word


class ForeignProvider:
    """Names the backend. Boxes of it are opened by the session that needs one."""

    name = "foreign"

    def check(self, spec: SandboxSpec) -> None:
        """What its backend can do is not ours to say."""

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[ForeignBox]:
        """Never: sessions open theirs through the backend."""
        raise SandboxError("boxes of a backend that is not ours are opened by its `create`")
        yield  # what makes it a context


def real_home(handle: SandboxHandle, named: str) -> str:
    """The folder that its backend calls `named`, made where there is none, with the workdir in it."""
    done = handle.exec(f"mkdir -p {quote(named)}/workdir && cd {quote(named)} && pwd -P", timeout=60)
    lines = done.stdout.strip().splitlines()
    if done.exit_code or not lines or not lines[-1].startswith("/"):
        said = done.stderr.strip()[-300:] or f"exit code {done.exit_code}"
        raise SandboxError(f"sandbox_home {named!r}: the box {handle.sandbox_id} has no such folder: {said}")
    return lines[-1]


def follows(backend: object) -> bool:
    """Whether it has what the published protocol asks of a backend."""
    return isinstance(backend, SandboxBackend)


async def _archive(layer: Layer, on: Loop) -> Path:
    from rollcage.sandboxes.e2b import pack

    owner = BOX_UID if os.geteuid() == 0 else None
    folder = await LayerStore(on.settings.home / "layers", owner=owner).ensure(layer)
    return await anyio.to_thread.run_sync(pack, folder, on.settings.home / "e2b" / "archives")
