"""Who may run now and who waits: first come, first served, but nobody waits for a caller who has used up its share."""

from __future__ import annotations

from collections import Counter
from types import TracebackType
from typing import NamedTuple, Self

import anyio

from rollcage.errors import QueueFull


class Share(NamedTuple):
    """How much of the places one caller may take; null means as much as there is."""

    caller: str = ""
    """Whose share it is; empty: everybody's."""
    at_once: int | None = None
    """How many may run at once."""
    queue: int | None = None
    """How many may wait."""


EVERYBODY = Share()
"""No limits of its own."""


class Ticket:
    """A place in the queue, and then a place. `async with ticket:` waits for it, and gives it back."""

    def __init__(self, places: Places, share: Share) -> None:
        self._places = places
        self.share = share
        self.granted = anyio.Event()

    async def __aenter__(self) -> Self:
        """Wait for a place."""
        try:
            await self.granted.wait()
        except BaseException:
            self.leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give it back."""
        self.leave()

    def leave(self) -> None:
        """Give the place back, or stop waiting for one."""
        self._places.leave(self)

    @property
    def position(self) -> int | None:
        """1 is the next; null for a ticket that waits no more. Nobody behind it can make it larger."""
        return self._places.position(self)


class Places:
    """A number of places, and a queue in front of them. Used on the event loop only."""

    def __init__(self, at_once: int, queue: int | None = None) -> None:
        self._at_once, self._queue = at_once, queue
        self._waiting: dict[Ticket, None] = {}
        self._running: dict[Ticket, None] = {}
        self._running_of: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many have a place."""
        return len(self._running)

    def take(self, share: Share, *, always: bool = False) -> Ticket:
        """Stand in the queue; QueueFull where it is as long as it may be, unless `always`."""
        if not always and not self._fits(share):
            self._check(share)
        ticket = Ticket(self, share)
        self._waiting[ticket] = None
        self._grant()
        return ticket

    def leave(self, ticket: Ticket) -> None:
        """This one waits no more and has no place any more."""
        self._waiting.pop(ticket, None)
        if ticket in self._running:
            del self._running[ticket]
            self._running_of[ticket.share.caller] -= 1
            self._grant()

    def position(self, ticket: Ticket) -> int | None:
        """Its place in the queue, from 1."""
        if ticket not in self._waiting:
            return None
        return next(number for number, each in enumerate(self._waiting, 1) if each is ticket)

    def _fits(self, share: Share) -> bool:
        mine = self._running_of[share.caller]
        return self.running < self._at_once and (share.at_once is None or mine < share.at_once)

    def _check(self, share: Share) -> None:
        if self._queue is not None and self.waiting >= self._queue:
            raise QueueFull(f"{self.waiting} rollouts wait already, and no more may; try again later")
        mine = sum(1 for ticket in self._waiting if ticket.share.caller == share.caller)
        if share.queue is not None and mine >= share.queue:
            raise QueueFull(f"{mine} rollouts of this key wait already, and no more may; try again later")

    def _grant(self) -> None:
        for ticket in list(self._waiting):
            if self.running >= self._at_once:
                return
            if self._fits(ticket.share):
                del self._waiting[ticket]
                self._running[ticket] = None
                self._running_of[ticket.share.caller] += 1
                ticket.granted.set()
