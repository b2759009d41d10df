"""Opens the box of a rollout, and logs what is told meanwhile of what takes a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import anyio

from rollcage.events import Log, Progress
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.progress import listening
from rollcage.types import Stage


@asynccontextmanager
async def opened(opening: AbstractAsyncContextManager[Sandbox], log: Log) -> AsyncIterator[Sandbox]:
    """The box; what is told while it is opened is in the log at once, and before anything that comes after."""
    async with AsyncExitStack() as stack:
        told = _Told(log)
        try:
            with listening(told.say):
                box = await stack.enter_async_context(opening)
        finally:
            with anyio.CancelScope(shield=True):
                await told.logged()
        yield box


class _Told:
    """Lines of progress on their way into the log, in their order. No task group: what breaks must keep its shape."""

    def __init__(self, log: Log) -> None:
        self._log, self._lines = log, list[str]()
        self._writing: asyncio.Task[None] | None = None

    def say(self, line: str) -> None:
        self._lines.append(line)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def logged(self) -> None:
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._lines:
            await self._log(Progress(stage=Stage.PROVISION, message=self._lines.pop(0)))
