"""A connection from here to a port in a local box, with the streams of a command but without one."""

from __future__ import annotations

import os
from collections.abc import Callable

import anyio

from rollcage.errors import SandboxLost
from rollcage.sandboxes.pipes import PipeReader, PipeWriter


class _Receiver(PipeReader):
    async def receive(self, max_bytes: int = 1 << 16) -> bytes:
        try:
            return await super().receive(max_bytes)
        except ConnectionError as error:
            raise anyio.EndOfStream from error


class _Sender(PipeWriter):
    async def send(self, item: bytes) -> None:
        try:
            await super().send(item)
        except ConnectionError as error:
            raise anyio.BrokenResourceError from error


class LocalConnection:
    """A socket that was connected in the box's network, by whoever can be there."""

    def __init__(self, fd: int, lost: Callable[[], bool]) -> None:
        """Takes over the descriptor. `lost`: whether the box is gone."""
        self._lost = lost
        self.stdin, self.stdout = _Sender(os.dup(fd)), _Receiver(fd)

    async def wait(self) -> int:
        """Nothing to wait for: 0, or SandboxLost where it ended because the box did."""
        if self._lost():
            raise SandboxLost("the box was closed while something was connected to it")
        return 0

    def close(self) -> None:
        """End it, waking whoever waits for the other side."""
        self.stdin.close()
        self.stdout.close()
