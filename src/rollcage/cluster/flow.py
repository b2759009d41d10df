"""One attempt of a rollout on a node, as the head sees it: what arrives goes into the log, in order, once."""

from __future__ import annotations

import asyncio
import pickle
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from typing import IO

import anyio
import zstandard

from rollcage.cluster.messages import OutboxItem
from rollcage.errors import RollcageError, StoreError
from rollcage.events import Ended, Event, StageStarted
from rollcage.rollout.work import WorkKeeper
from rollcage.runner.executor import Execution
from rollcage.store.packed import Packed
from rollcage.types import Stage

SPOOL = 4 << 20
"""Bytes of an agent's work that are held in memory; more lie in a file."""


class Flow:
    """What comes of one attempt. `over` is set when its end is in the log, or nothing more will come."""

    def __init__(self, rollout: Execution, attempt: int) -> None:
        self.rollout, self.attempt = rollout, attempt
        self.over = anyio.Event()
        self.ended = False
        """Whether its end is in the log."""
        self.agent_began = False
        """Whether something may have been sampled."""
        self.error: StoreError | None = None
        """Why the log could not be written."""
        self.lost = ""
        """Why nothing more will come."""
        self._work: IO[bytes] | None = None
        self._files = ExitStack()

    async def commit(self, items: Sequence[OutboxItem]) -> None:
        """Put these into the log; returns when they are on the disk. Where the log is broken, the rest is dropped."""
        events: list[Event | Packed] = []
        for item in items:
            if self.over.is_set():
                return
            if item.kind == "event":
                events.append(pickle.loads(item.data))  # noqa: S301 - of our own process on a node of our cluster
                continue
            await self._log(events)
            events = []
            await self._keep(item)
        await self._log(events)

    async def _log(self, events: Sequence[Event | Packed]) -> None:
        if not events or self.error is not None:
            return
        # All at once, and in this order: the log's writer takes them as they come, and syncs the disk once.
        results = await asyncio.gather(*map(self.rollout.log, events), return_exceptions=True)
        for event, result in zip(events, results, strict=True):
            if isinstance(result, StoreError):
                self.error = result
                self.end()
                return
            if isinstance(result, BaseException):
                raise result
            self.agent_began |= isinstance(event, StageStarted) and event.stage is Stage.AGENT
            if isinstance(event, Ended):
                self.ended = True
                self.end()

    async def _keep(self, item: OutboxItem) -> None:
        """A piece of the agent's work."""
        keeper: WorkKeeper | None = self.rollout.deps.work
        if item.kind == "piece" and keeper is not None:
            if self._work is None:
                self._work = self._files.enter_context(tempfile.SpooledTemporaryFile(SPOOL))  # noqa: SIM115
            self._work.write(len(item.data).to_bytes(4, "big") + item.data)
            return
        work, self._work = self._work, None
        if item.kind == "work" and keeper is not None:
            try:
                await keeper.put(_pieces(work))
            except RollcageError as error:
                # The node tells that it was kept: where it was not, the rollout must not say so.
                self.error = StoreError(f"the agent's work could not be kept: {error}")
                self.end()
        if work is not None:
            work.close()

    def lose(self, why: str) -> None:
        """Nothing more comes: the node is gone."""
        if not self.over.is_set():
            self.lost = why
            self.end()

    def end(self) -> None:
        """Nothing more is taken."""
        self._files.close()
        self.over.set()


async def _pieces(work: IO[bytes] | None) -> AsyncIterator[bytes]:
    if work is None:
        return
    work.seek(0)
    opened = zstandard.ZstdDecompressor()
    while size := work.read(4):
        yield opened.decompress(work.read(int.from_bytes(size, "big")))
