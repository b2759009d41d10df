"""What a node has to tell the head: in order, kept until the head has it on its disk, and never more than a window."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from rollcage.cluster.messages import Parcel
from rollcage.errors import StoreError

WINDOW = 8 << 20
"""Bytes that may wait for the head; then those who log wait, and with them the agents."""
TOGETHER = 96 << 10
"""Bytes of one answer: above this Ray keeps it in its object store, which costs ten times as much."""


class Outbox:
    """Parcels on their way to the head. Used on the event loop only."""

    def __init__(self) -> None:
        self._parcels: deque[Parcel] = deque()
        """Those that the head has not acknowledged, oldest first."""
        self._last = self._acknowledged = self._bytes = 0
        self._changed = asyncio.Event()
        self._closed = ""

    async def put(self, name: str, attempt: int, data: bytes, kind: str = "event") -> int:
        """Add one, as soon as there is room; its number. StoreError once the outbox was closed."""
        while self._bytes > WINDOW and not self._closed:
            await self._news()
        self._check()
        self._last += 1
        self._parcels.append(Parcel(self._last, name, attempt, data, kind))
        self._bytes += len(data)
        self._tell()
        return self._last

    async def delivered(self, number: int) -> None:
        """Wait until the head has this one, and all before it, on its disk."""
        while self._acknowledged < number:
            self._check()
            await self._news()

    def acknowledge(self, number: int) -> None:
        """The head has these."""
        while self._parcels and self._parcels[0].number <= number:
            self._bytes -= len(self._parcels.popleft().data)
        self._acknowledged = max(self._acknowledged, number)
        self._tell()

    async def news(self, seconds: float, other: Callable[[], bool] = lambda: False) -> list[Parcel]:
        """What the head has not acknowledged, as much as goes together; waits so long for the first.

        `other`: whether there is something else to tell; then it waits no longer (see `wake`).
        """
        try:
            async with asyncio.timeout(seconds):
                while not (self._parcels or self._closed or other()):
                    await self._news()
        except TimeoutError:
            return []
        found: list[Parcel] = []
        size = 0
        for parcel in self._parcels:
            size += len(parcel.data)
            if found and size > TOGETHER:
                break
            found.append(parcel)
        return found

    def close(self, why: str) -> None:
        """Nothing goes to the head any more: whoever logs gets an error."""
        self._closed = self._closed or why
        self._tell()

    def wake(self) -> None:
        """Let whoever waits for news look again."""
        self._tell()

    def _check(self) -> None:
        if self._closed:
            raise StoreError(f"the head's log is out of reach: {self._closed}")

    async def _news(self) -> None:
        await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
