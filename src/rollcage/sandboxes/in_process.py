"""Stands in for a box where the agent is no program: it works in this process, on a remote environment's tools."""

from __future__ import annotations

import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Unpack

from rollcage.errors import FileMissing, SandboxError
from rollcage.sandboxes.base import Process, Sandbox, SpawnOptions
from rollcage.sandboxes.layers import Layer
from rollcage.types import SandboxSpec

BACKLOG = 16


class InProcessProvider:
    """The provider `none`."""

    name = "none"

    def check(self, spec: SandboxSpec) -> None:
        """Nothing to check: no limit applies where nothing runs."""

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Sandbox]:
        """A folder for sockets that only this user can reach; gone at the end of the block."""
        with tempfile.TemporaryDirectory(prefix="rollcage-") as folder:
            yield _InProcessBox(Path(folder))


class _InProcessBox:
    """Has ports, and nothing else."""

    notes: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.id = f"none-{secrets.token_hex(4)}"
        self._folder = folder

    def spawn(self, argv: Sequence[str], **options: Unpack[SpawnOptions]) -> AbstractAsyncContextManager[Process]:
        """Refused."""
        raise SandboxError("there is no box to run a command in")

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """There are no files."""
        raise FileMissing(f"no {path}: there is no box")

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Refused."""
        raise SandboxError(f"cannot write {path}: there is no box")

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[socket.socket]:
        """A unix socket named after the port."""
        path = Path(self.socket_path(port))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.bind(str(path))
            try:
                sock.listen(BACKLOG)
                sock.setblocking(False)
                yield sock
            finally:
                path.unlink(missing_ok=True)  # noqa: ASYNC240 - in memory, as good as

    def socket_path(self, port: int) -> str:
        """The unix socket that stands for a port."""
        return str(self._folder / str(port))
