"""What a node has to tell the head: in order, kept until the head has it on its disk, and never more than a window."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import pickle
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rollcage.cluster.messages import OutboxItem
from rollcage.errors import StoreError
from rollcage.events import Ended, Event, Scored, StageStarted, TurnEnded
from rollcage.store.packed import EventPacker, Packed
from rollcage.types import Stage

WINDOW = 8 << 20
"""Bytes that may wait for the head; then those who log wait, and with them the agents."""
TOGETHER = 96 << 10
"""Bytes of one answer: above this Ray keeps it in its object store, which costs ten times as much."""

LINGER_S = 0.2
"""How long what nobody waits for stays, so that more goes together: each answer costs the head a call of Ray's."""


class Outbox:
    """Items on their way to the head. Used on the event loop only.

    Each who waits is woken by what it waits for, and by nothing else: dozens of rollouts wait here.
    """

    def __init__(self) -> None:
        self._items: deque[OutboxItem] = deque()
        """Those that the head has not acknowledged, oldest first."""
        self._last = self._acknowledged = self._awaited = self._bytes = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """A heap: the number that is waited for, one more for each who waits, and who."""
        self._order = itertools.count()
        self._told = asyncio.Event()
        """There may be something for whoever asks for news."""
        self._room = asyncio.Event()
        """Something has left."""
        self._closed = ""

    async def put(self, name: str, attempt: int, data: bytes | Callable[[], bytes], kind: str = "event") -> int:
        """Add one, as soon as there is room; its number. StoreError once the outbox was closed.

        Data that must be made in the order in which it goes is made then.
        """
        while self._bytes > WINDOW and not self._closed:
            self._room.clear()
            await self._room.wait()
        self._check()
        data = data if isinstance(data, bytes) else data()
        self._last += 1
        self._items.append(OutboxItem(self._last, name, attempt, data, kind))
        self._bytes += len(data)
        self._told.set()
        return self._last

    async def delivered(self, number: int) -> None:
        """Wait until the head has this one, and all before it, on its disk."""
        if self._acknowledged >= number:
            return
        self._check()
        self._awaited = max(self._awaited, number)
        self._told.set()
        here = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (number, next(self._order), here))
        await here
        if self._acknowledged < number:
            self._check()

    def acknowledge(self, number: int) -> None:
        """The head has these."""
        while self._items and self._items[0].number <= number:
            self._bytes -= len(self._items.popleft().data)
        self._acknowledged = max(self._acknowledged, number)
        self._let_go(self._acknowledged)
        self._room.set()

    async def news(self, seconds: float, other: Callable[[], bool] = lambda: False) -> list[OutboxItem]:
        """What the head has not acknowledged, as much as goes together; waits so long for the first, and for more.

        `other`: whether there is something else to tell; then it waits no longer (see `wake`).
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._until(lambda: bool(self._items) or other())
            async with asyncio.timeout(LINGER_S):
                await self._until(lambda: self._urgent or other())
        found: list[OutboxItem] = []
        size = 0
        for item in self._items:
            size += len(item.data)
            if found and size > TOGETHER:
                break
            found.append(item)
        return found

    def close(self, why: str) -> None:
        """Nothing goes to the head any more: whoever logs gets an error."""
        self._closed = self._closed or why
        self._let_go(self._last)
        self._room.set()
        self._told.set()

    def wake(self) -> None:
        """Let whoever waits for news look again."""
        self._told.set()

    @property
    def _urgent(self) -> bool:
        """Whether somebody waits for what is here, or no more goes with it."""
        return self._awaited > self._acknowledged or self._bytes > TOGETHER

    def _check(self) -> None:
        if self._closed:
            raise StoreError(f"the head's log is out of reach: {self._closed}")

    async def _until(self, there: Callable[[], bool]) -> None:
        while not (self._closed or there()):
            self._told.clear()
            await self._told.wait()

    def _let_go(self, number: int) -> None:
        """Wake those who wait for items up to this one."""
        while self._waiting and self._waiting[0][0] <= number:
            *_, here = heapq.heappop(self._waiting)
            if not here.done():
                here.set_result(None)


class EventSender:
    """Sends the events of one attempt. Turns are packed here, each with what no earlier one brought: the head only
    writes them down."""

    def __init__(self, outbox: Outbox, name: str, attempt: int) -> None:
        self._outbox, self._name, self._attempt, self._packer = outbox, name, attempt, EventPacker()

    async def send(self, event: Event) -> None:
        """Add it; where the rollout may go on only once the head has it, wait for that."""
        number = await self._outbox.put(self._name, self._attempt, lambda: pickle.dumps(self._packed(event), 5))
        if _counts(event):
            await self._outbox.delivered(number)

    def _packed(self, event: Event) -> Event | Packed:
        try:
            return self._packer.pack(event) if isinstance(event, TurnEnded) else event
        except StoreError:
            return event  # the log says what is wrong with it, where it is


def _counts(event: Event) -> bool:
    """Whether the rollout goes on only when the head has it: from the first that an agent could act on."""
    return isinstance(event, TurnEnded | Scored | Ended) or (
        isinstance(event, StageStarted) and event.stage is Stage.AGENT
    )
