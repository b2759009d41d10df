"""A backend whose boxes offer nothing beyond the protocol: they cannot be rewound, nor divided."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from rollcage.sandboxes.base import Process, Sandbox
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec


class PlainBox:
    """A real box that offers nothing beyond the protocol."""

    def __init__(self, box: Sandbox) -> None:
        self._box, self.id, self.notes = box, box.id, box.notes

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        inherit_image_env: bool = True,
    ) -> AbstractAsyncContextManager[Process]:
        return self._box.spawn(argv, env=env, cwd=cwd, inherit_image_env=inherit_image_env)

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        return await self._box.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._box.write(path, data, mode=mode)

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        return self._box.listen(port)


class PlainProvider:
    """Opens such boxes."""

    name = "plain"

    def __init__(self, provider: LocalProvider) -> None:
        self._provider = provider

    def check(self, spec: SandboxSpec) -> None:
        pass

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Sandbox]:
        async with self._provider.open(spec, layers) as box:
            yield PlainBox(box)
