"""A backend whose boxes offer nothing beyond the protocol: they cannot be rewound, nor divided."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.sandboxes.plain import PlainBox
from rollcage.types import SandboxSpec


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
