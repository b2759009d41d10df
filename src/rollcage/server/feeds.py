"""Many followers of one rollout, read from the log once: each entry is fetched and written as JSON a single time."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from rollcage.errors import StoreError
from rollcage.events import Ended, Entry
from rollcage.schema.writing import json_of, on_one_line
from rollcage.store import Store

log = logging.getLogger("rollcage.server")

KEPT = 512
"""Entries of a rollout that are kept at hand for its followers; whoever is further behind reads the log."""
KEPT_BYTES = 16 << 20
PAGE = 200
PORTION_BYTES = 1 << 20
"""About so much is written as JSON, and sent, at a time: turns can be large, and everybody else waits meanwhile."""


class FeedLine(NamedTuple):
    """One entry, and the same as JSON."""

    entry: Entry
    json: bytes

    @property
    def last(self) -> bool:
        """Whether nothing follows."""
        return isinstance(self.entry.event, Ended)


def line_of(entry: Entry) -> FeedLine:
    """The entry with its JSON."""
    return FeedLine(entry, on_one_line(json_of(entry)))


class _Feed:
    """The newest entries of one rollout."""

    def __init__(self) -> None:
        self.followers = 0
        self.news = asyncio.Event()
        self.broken: StoreError | None = None
        self.scope = anyio.CancelScope()
        self._lines: deque[FeedLine] = deque()
        self._size = 0

    def add(self, line: FeedLine) -> None:
        self._lines.append(line)
        self._size += len(line.json)
        while len(self._lines) > KEPT or (self._size > KEPT_BYTES and len(self._lines) > 1):
            self._size -= len(self._lines.popleft().json)
        self.wake()

    def wake(self) -> None:
        news, self.news = self.news, asyncio.Event()
        news.set()

    def after(self, seq: int) -> list[FeedLine] | None:
        """What follows; None where that is no longer (or not yet) at hand."""
        if not self._lines or self._lines[0].entry.seq > seq + 1:
            return None
        skipped = seq + 1 - self._lines[0].entry.seq
        return [self._lines[at] for at in range(skipped, len(self._lines))]


class Feeds:
    """The feeds of all rollouts that somebody follows."""

    def __init__(self, store: Store, tasks: TaskGroup) -> None:
        self._store, self._tasks = store, tasks
        self._feeds: dict[str, _Feed] = {}

    @property
    def followers(self) -> int:
        """How many follow at the moment."""
        return sum(feed.followers for feed in self._feeds.values())

    async def follow(self, rollout_id: str, *, after: int = 0) -> AsyncGenerator[list[FeedLine], None]:
        """A rollout's entries above `after`, then new ones, as many at a time as there are; over after `Ended`.

        None is lost, none comes twice. An `after` beyond the newest entry means the newest one.
        """
        last, ended = await self._store.last(rollout_id)
        after = min(after, last)
        if ended:
            while entries := await self._store.read(rollout_id, after=after, limit=PAGE):
                after = entries[-1].seq
                while entries:
                    lines = await _portion(entries)
                    entries = entries[len(lines) :]
                    yield lines
            return
        async with self._feed(rollout_id, last) as feed:
            behind: list[Entry] = []
            while True:
                news = feed.news
                at_hand = [] if behind else feed.after(after)
                if at_hand is None:
                    behind = await self._store.read(rollout_id, after=after, limit=PAGE)
                lines = at_hand or await _portion(behind)
                behind = behind[len(lines) :]
                if lines:
                    yield lines
                    after = lines[-1].entry.seq
                    if lines[-1].last:
                        return
                elif feed.broken:
                    raise feed.broken
                else:
                    await news.wait()

    @asynccontextmanager
    async def _feed(self, rollout_id: str, last: int) -> AsyncIterator[_Feed]:
        feed = self._feeds.get(rollout_id)
        if feed is None:
            feed = self._feeds[rollout_id] = _Feed()
            self._tasks.start_soon(self._read, rollout_id, feed, last)
        feed.followers += 1
        try:
            yield feed
        finally:
            feed.followers -= 1
            if not feed.followers:
                if self._feeds.get(rollout_id) is feed:
                    del self._feeds[rollout_id]
                feed.scope.cancel()

    async def _read(self, rollout_id: str, feed: _Feed, after: int) -> None:
        try:
            with feed.scope:
                async with aclosing(self._store.follow(rollout_id, after=after)) as entries:
                    async for entry in entries:
                        feed.add(line_of(entry))
        except StoreError as error:
            feed.broken = error
        except Exception as error:  # whatever is in one log must not end the server for all
            log.exception("a rollout could not be followed")
            feed.broken = StoreError(f"rollout {rollout_id} cannot be followed: {type(error).__name__}")
        finally:
            feed.wake()


async def _portion(entries: list[Entry]) -> list[FeedLine]:
    """The first of these entries with their JSON, which is written in a thread."""

    def work() -> list[FeedLine]:
        lines: list[FeedLine] = []
        size = 0
        while len(lines) < len(entries) and size < PORTION_BYTES:
            lines.append(line_of(entries[len(lines)]))
            size += len(lines[-1].json)
        return lines

    return await anyio.to_thread.run_sync(work) if entries else []
