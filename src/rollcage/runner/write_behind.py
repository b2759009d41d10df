"""Lets a rollout go on while what it tells of itself is on its way to the disk: in order, and never far behind."""

from __future__ import annotations

import asyncio
from collections import deque

from rollcage import events
from rollcage.events import Event, Log
from rollcage.types import Stage

MOST = 8
"""Events on their way at once; the next one waits for the oldest."""

_TOLD = (
    events.Progress,
    events.StageStarted,
    events.StageEnded,
    events.BoxOpened,
    events.CommandStarted,
    events.CommandEnded,
    events.AgentStarted,
    events.AgentEmitted,
    events.AgentEnded,
    events.FilesCollected,
    events.Suspicion,
    events.WorkStored,
    events.Scored,
)
"""What nothing outside the rollout follows from. Everything else is on the disk before the rollout goes on: a turn
before the agent sees its end, a call of a tool before its answer, the end before anybody is told."""


class WriteBehind:
    """The log of one rollout in this process. An append that fails is raised by one that comes after it."""

    def __init__(self, log: Log) -> None:
        """`log`: takes events in the order of its calls; each is on the disk when its call returns."""
        self._log = log
        self._under_way: deque[asyncio.Task[object]] = deque()

    async def __call__(self, event: Event) -> None:
        """Add an event."""
        # Tasks begin in the order in which they are made.
        own = asyncio.ensure_future(self._append(event))
        self._under_way.append(own)
        if not _may_lag(event):
            await asyncio.wait([own])
        while self._under_way and (len(self._under_way) > MOST or self._under_way[0].done()):
            first = self._under_way[0]
            if not first.done():
                await asyncio.wait([first])
            elif first.exception() is None:
                self._under_way.popleft()
            else:
                await self._fail()
        if own.done():
            own.result()

    async def _fail(self) -> None:
        """One error stands for all that was on its way; what comes after it is tried again."""
        tried = list(self._under_way)
        await asyncio.wait(tried)
        self._under_way.clear()
        failed = [each for each in tried if each.cancelled() or each.exception()]  # each is asked: none is told unheard
        for each in failed:
            each.result()

    async def _append(self, event: Event) -> object:
        return await self._log(event)


def _may_lag(event: Event) -> bool:
    # What died before its agent began may be begun anew, for nothing was sampled; and nothing ends as if all of it had
    # been logged where something could not be.
    if isinstance(event, events.StageStarted) and event.stage is Stage.AGENT:
        return False
    if isinstance(event, events.StageEnded) and event.stage is Stage.VERIFY:
        return False
    return isinstance(event, _TOLD)
