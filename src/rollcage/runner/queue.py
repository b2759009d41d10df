"""Who may run now and who waits.

A place goes to the caller with the fewest rollouts running; among those, to the one whose turn is longest ago. The
rollouts of one caller go in the order in which they came. Nobody waits for a caller who has used up its quota, and
nobody who runs is stopped for another.

The queue is bounded, and no caller can fill it: one that quotas it with others, and has no number of its own, may hold
as many of its places as are free after that. One alone gets half, two get a third each, and so on: there is always
room for the next.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple, Self

import anyio

from rollcage.errors import QueueFull


class Quota(NamedTuple):
    """How much of the places one caller may take; None means as much as there is."""

    caller: str = ""
    """Whose quota it is; empty: everybody's."""
    at_once: int | None = None
    """How many may run at once."""
    queue: int | None = None
    """How many may wait."""
    alone: bool = True
    """Whether nobody else is there for whom places in the queue must be kept."""


EVERYBODY = Quota()
"""No limits of its own."""


class Slot:
    """A place in the queue, and then a place. `async with slot:` waits for it, and gives it back."""

    def __init__(self, places: FairQueue, quota: Quota) -> None:
        self._queue = places
        self.quota = quota
        self.granted = anyio.Event()

    async def __aenter__(self) -> Self:
        """Wait for a place."""
        try:
            await self.granted.wait()
        except BaseException:
            self.leave()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Give it back."""
        self.leave()

    def leave(self) -> None:
        """Give the place back, or stop waiting for one."""
        self._queue.leave(self)

    @property
    def position(self) -> int | None:
        """1 is the next, if rollouts end in the order in which they began; None for a slot that waits no more.

        It grows when a caller with fewer rollouts comes, and never by what the same caller asks for later.
        """
        return self._queue.position(self)


class FairQueue:
    """A number of places, and a queue in front of them. Used on the event loop only."""

    def __init__(self, at_once: int, queue: int | None = None) -> None:
        self._at_once, self._queue = at_once, queue
        self._waiting = _Lines()
        self._running: dict[Slot, None] = {}
        self._turns = _Turns()
        self._order: dict[Slot, int] | None = None
        self._closed = False

    @property
    def at_once(self) -> int:
        """How many places there are."""
        return self._at_once

    def resize(self, at_once: int) -> None:
        """There are so many places from now on; those who have one keep it."""
        self._at_once, self._order = at_once, None
        self._grant()

    def close(self) -> None:
        """Nobody gets a place any more; those who have one keep it."""
        self._closed = True

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """How many have a place."""
        return len(self._running)

    def count(self, caller: str) -> tuple[int, int]:
        """How many of this caller have a place, and how many wait for one."""
        return sum(slot.quota.caller == caller for slot in self._running), self._waiting.count(caller)

    def take(self, quota: Quota, *, always: bool = False) -> Slot:
        """Stand in the queue; QueueFull where it is as long as it may be, unless `always`."""
        if not always and not self._fits(quota):
            self._check(quota)
        slot = Slot(self, quota)
        self._waiting.add(slot)
        self._order = None
        self._grant()
        return slot

    def leave(self, slot: Slot) -> None:
        """This one waits no more and has no place any more."""
        self._order = None
        self._waiting.remove(slot)
        if slot in self._running:
            del self._running[slot]
            self._turns.ended(slot.quota)
            self._grant()

    def position(self, slot: Slot) -> int | None:
        """Its place in the queue, from 1."""
        if slot not in self._waiting:
            return None
        if self._order is None:
            self._order = {each: number for number, each in enumerate(self._foreseen(), 1)}
        return self._order[slot]

    def _foreseen(self) -> Iterable[Slot]:
        """Those who wait, in the order in which they would go if those who run ended in the order they began in."""
        turns, running, waiting = self._turns.copy(), deque(self._running), self._waiting.copy()
        while waiting:
            chosen = turns.next(waiting.heads()) if len(running) < max(1, self._at_once) else None
            if chosen is None:
                turns.ended(running.popleft().quota)
                continue
            waiting.remove(chosen)
            running.append(chosen)
            turns.began(chosen.quota)
            yield chosen

    def _fits(self, quota: Quota) -> bool:
        return not self._closed and self.running < self._at_once and self._turns.may(quota)

    def _check(self, quota: Quota) -> None:
        if self._queue is not None and self.waiting >= self._queue:
            raise QueueFull(f"{self.waiting} rollouts wait already, and no more may; try again later")
        mine = self._waiting.count(quota.caller)
        if quota.queue is not None:
            if mine >= quota.queue:
                raise QueueFull(f"{mine} rollouts of this key wait already, and no more may; try again later")
        elif self._queue is not None and not quota.alone and mine >= (free := self._queue - self.waiting):
            kept = f"the last {free} of {self._queue} places in the queue are kept for others"
            raise QueueFull(f"{mine} rollouts of this key wait already, and {kept}; try again later")

    def _grant(self) -> None:
        while not self._closed and self.running < self._at_once and (slot := self._turns.next(self._waiting.heads())):
            self._waiting.remove(slot)
            self._running[slot] = None
            self._turns.began(slot.quota)
            slot.granted.set()


class _Lines:
    """Those who wait: each caller has a line of its own."""

    def __init__(self, lines: dict[str, dict[Slot, None]] | None = None) -> None:
        self._lines = lines or {}

    def __len__(self) -> int:
        return sum(len(line) for line in self._lines.values())

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._lines.get(slot.quota.caller, ())

    def copy(self) -> _Lines:
        """The same, for thinking ahead."""
        return _Lines({caller: line.copy() for caller, line in self._lines.items()})

    def add(self, slot: Slot) -> None:
        """To the end of its caller's line."""
        self._lines.setdefault(slot.quota.caller, {})[slot] = None

    def remove(self, slot: Slot) -> None:
        """Wherever it stands, if it does."""
        line = self._lines.get(slot.quota.caller, {})
        line.pop(slot, None)
        if not line:
            self._lines.pop(slot.quota.caller, None)

    def count(self, caller: str) -> int:
        """How many of this caller wait."""
        return len(self._lines.get(caller, ()))

    def heads(self) -> Iterable[Slot]:
        """The first of every line."""
        return [next(iter(line)) for line in self._lines.values()]


class _Turns:
    """How many of each caller run, and when each had its last turn."""

    def __init__(self) -> None:
        self._running: Counter[str] = Counter()
        self._latest: Counter[str] = Counter()
        self._turn = 0

    def copy(self) -> _Turns:
        """The same, for thinking ahead."""
        other = _Turns()
        other._running, other._latest, other._turn = self._running.copy(), self._latest.copy(), self._turn
        return other

    def may(self, quota: Quota) -> bool:
        """Whether one more of this caller may run."""
        return quota.at_once is None or self._running[quota.caller] < quota.at_once

    def next(self, heads: Iterable[Slot]) -> Slot | None:
        """Whose turn it is; None where nobody may run."""
        # Those who never had a turn are equal; min() takes the first of them, who came first.
        return min((slot for slot in heads if self.may(slot.quota)), key=self._standing, default=None)

    def _standing(self, slot: Slot) -> tuple[int, int]:
        return self._running[slot.quota.caller], self._latest[slot.quota.caller]

    def began(self, quota: Quota) -> None:
        """One of this caller has a place now."""
        self._turn += 1
        self._running[quota.caller] += 1
        self._latest[quota.caller] = self._turn

    def ended(self, quota: Quota) -> None:
        """One of this caller has given its place back."""
        self._running[quota.caller] -= 1
