"""A box of which nothing is seen beyond the protocol: it passes everything on to another."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Unpack

from rollcage.sandboxes.base import Process, Sandbox, SpawnOptions


class PlainBox:
    """Another box, which can be neither rewound nor divided by who has this one."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    @property
    def id(self) -> str:
        """The other's."""
        return self._box.id

    @property
    def notes(self) -> tuple[str, ...]:
        """The other's."""
        return self._box.notes

    def spawn(self, argv: Sequence[str], **options: Unpack[SpawnOptions]) -> AbstractAsyncContextManager[Process]:
        """Start a command."""
        return self._box.spawn(argv, **options)

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file."""
        return await self._box.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""
        await self._box.write(path, data, mode=mode)

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket that is 127.0.0.1:port in the box."""
        return self._box.listen(port)
