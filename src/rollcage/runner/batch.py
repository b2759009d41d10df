"""Runs a batch: every cell of its plan that has no result yet, a number at once, within the limits of the whole.

All there is to know of a batch is in the log, so the same plan goes on where it was, whatever ended the process before:
a cell's rollout is started under an idempotency key made of cell and attempt, which the log takes only once.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import anyio
from anyio.abc import TaskGroup

from rollcage.errors import AlreadyStarted, ModelUnreachable, QueueFull, StoreError, UnknownBatch, UsageError
from rollcage.evaluation.batches import BatchView, Cell
from rollcage.evaluation.rows import BatchRow, Price
from rollcage.locks import try_lock
from rollcage.runner.queue import EVERYBODY, Quota
from rollcage.runner.runner import Runner, StartOptions
from rollcage.store import Store
from rollcage.store.batches import add_to_batch, batch_changes, batch_log, batch_rows
from rollcage.types import Endpoint, Job, JsonObject, Outcome

UNREACHED = 3
"""So often a cell is run again by itself because its model was away; then it stays broken."""
LOOK_S = 0.5
"""How often a follower looks, and the first pause before a model that does not answer is asked again."""
LONGEST_PAUSE_S = 15.0


class CellJob(NamedTuple):
    """What is run for one cell."""

    job: Job
    release: Callable[[], None]
    """Called when its rollout is over."""


MakeJob = Callable[[Cell], CellJob]
"""The job of a cell; UsageError where it cannot be run here."""


@dataclass(frozen=True)
class BatchLimits:
    """How a batch is run, and where it stops."""

    at_once: int = 8
    """Rollouts at the same time."""
    max_tokens: int = 0
    """No rollout is begun once so many tokens were generated; 0: no limit."""
    max_time_s: float | None = None
    """After so long everything is stopped."""
    budget: float | None = None
    """No rollout is begun once they cost so much."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """By model, as it was named."""
    retry: str = ""
    """`broken` or `infrastructure`: what of what ended is run again."""
    patience_s: float = 600.0
    """How long to wait for a model that does not answer."""


OnRow = Callable[[BatchRow], None]


class BatchRun:
    """One run of a batch, by the one process that holds its lock."""

    def __init__(
        self,
        runner: Runner,
        store: Store,
        view: BatchView,
        make: MakeJob,
        limits: BatchLimits,
        quota: Quota = EVERYBODY,
    ) -> None:
        self._runner, self._store, self.view, self._make = runner, store, view, make
        self._limits, self._quota = limits, quota
        self._pending: deque[Cell] = deque(view.missing(limits.retry))
        self._running: set[str] = set()
        """Cells whose rollout is not over."""
        self._paused: dict[str, Endpoint] = {}
        self._unreached: Counter[str] = Counter()
        self._stop = ""
        self._cancelled = False
        self._news = anyio.Event()
        self._last_entry = 0
        self.on_row: OnRow = lambda row: None
        """Told of each rollout when it begins and when it ends."""

    async def run(self, began: Callable[[], object] = lambda: None) -> None:
        """To the end, or to a limit. The log says which; whoever cancels this finds it `interrupted`.

        `began` is called once the log says that it runs.
        """
        await self._log("began", {"pid": os.getpid()})
        began()
        try:
            with anyio.move_on_after(self._limits.max_time_s) as timed:
                await self._work()
            if timed.cancelled_caught:
                self._stop = f"max_time: {self._limits.max_time_s:g} s are over"
            await self._end()
        except StoreError as error:
            with anyio.CancelScope(shield=True):
                await self._log_if_possible("stopped", {"why": str(error)})
            raise
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._log_if_possible("interrupted", {})
            raise

    def cancel(self) -> None:
        """Stop what runs, and begin nothing more."""
        self._cancelled, self._stop = True, "it was cancelled"
        self._wake()

    def stop(self, why: str) -> None:
        """Begin no more rollouts; what runs goes on to its end."""
        self._stop = self._stop or why
        self._wake()

    async def _end(self) -> None:
        if self._cancelled or self._stop:
            await self._log("cancelled" if self._cancelled else "stopped", {"why": self._stop})
        else:
            await self._log("done", {})

    async def _work(self) -> None:
        async with anyio.create_task_group() as tasks:
            for row in [row for row in self.view.current if row.outcome is None]:
                self._running.add(row.cell)
                tasks.start_soon(self._join, row)
            while (self._pending or self._running) and not self._cancelled:
                self._stop = self._stop or self._limit_reached()
                cell = None
                if not self._stop and len(self._running) < self._limits.at_once:
                    cell = next((cell for cell in self._pending if cell.model not in self._paused), None)
                if cell is not None:
                    self._pending.remove(cell)
                    self._running.add(cell.key)
                    tasks.start_soon(self._one, cell, tasks)
                elif self._stop and not self._running:
                    break
                else:
                    await self._news.wait()
                    self._news = anyio.Event()
            tasks.cancel_scope.cancel()

    def _limit_reached(self) -> str:
        limits = self._limits
        if limits.max_tokens and (spent := self.view.tokens) >= limits.max_tokens:
            return f"max_tokens: {spent:,} of {limits.max_tokens:,} tokens were generated"
        if limits.budget is not None and (cost := self.view.cost(limits.prices) or 0.0) >= limits.budget:
            return f"budget: {cost:.2f} of {limits.budget:.2f} are spent"
        return ""

    async def _one(self, cell: Cell, tasks: TaskGroup) -> None:
        try:
            made = self._make(cell)
        except UsageError as error:
            await self._skip(cell, str(error))
            return
        try:
            row = await self._over(await self._started(cell, made.job))
        except UsageError as error:
            await self._skip(cell, str(error))
            return
        finally:
            made.release()
            self._running.discard(cell.key)
            self._wake()
        if row.outcome is Outcome.MODEL_UNREACHABLE and self._unreached[cell.key] < UNREACHED:
            self._unreached[cell.key] += 1
            self._pending.appendleft(cell)
            if cell.model not in self._paused:
                self._paused[cell.model] = made.job.model
                await self._log("paused", {"model": cell.model, "why": row.error or "it is away"})
                tasks.start_soon(self._wait_for, cell.model)

    async def _join(self, row: BatchRow) -> None:
        """Wait for a rollout that a process before this one began: it runs, or is about to be ended as crashed."""
        try:
            row = await self._over(row.rollout_id)
        finally:
            self._running.discard(row.cell)
            self._wake()
        if row.interrupted:
            self._pending.extend(cell for cell in self.view.plan.cells() if cell.key == row.cell)

    async def _over(self, rollout_id: str) -> BatchRow:
        """Wait for its end; whoever cancels this stops it."""
        try:
            await self._runner.over(rollout_id)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._runner.abort(rollout_id, self._stop or "the batch was stopped")
                await self._runner.over(rollout_id)
                await self._told(rollout_id)
            raise
        return await self._told(rollout_id)

    async def _started(self, cell: Cell, job: Job) -> str:
        attempt = self.view.attempts(cell) + 1
        place = cell.place(self.view.plan.name, job.agent.name, attempt)
        key = f"batch:{place.name}:{place.cell}:{attempt}"
        options = StartOptions(self._quota, idempotency_key=key, batch=place)
        while True:
            try:
                with anyio.CancelScope(shield=True):
                    rollout_id = await self._runner.start(job, options)
                    break
            except AlreadyStarted as other:
                rollout_id = other.rollout_id
                break
            except QueueFull as full:
                await anyio.sleep(full.retry_after_s)
        self._tell(BatchRow.begun(rollout_id, place))
        return rollout_id

    async def _told(self, rollout_id: str) -> BatchRow:
        row = (await batch_rows(self._store, self.view.plan.name, rollout_id=rollout_id))[0]
        self._tell(row)
        return row

    def _tell(self, row: BatchRow) -> None:
        self.view.add(row)
        self.on_row(row)

    async def _skip(self, cell: Cell, why: str) -> None:
        self._running.discard(cell.key)
        same = [other for other in self._pending if other[:3] == cell[:3]]
        for other in same:
            self._pending.remove(other)
        name = cell.task.id if len(self.view.plan.agents) == 1 else f"{cell.task.id} with {cell.agent}"
        await self._log("skipped", {"task": name, "why": why})
        self._wake()

    async def _wait_for(self, model: str) -> None:
        """Until a model that did not answer does, or patience is over."""
        pause = LOOK_S
        with anyio.move_on_after(self._limits.patience_s):
            while True:
                await anyio.sleep(pause)
                pause = min(LONGEST_PAUSE_S, pause * 2)
                try:
                    await self._runner.check_model(self._paused[model])
                    break
                except ModelUnreachable:
                    continue
            del self._paused[model]
            await self._log("back", {"model": model})
            self._wake()
            return
        why = f"the model {model} was away for {self._limits.patience_s:g} s"
        self._pending = deque(cell for cell in self._pending if cell.model != model)
        self._stop = self._stop or why
        self._wake()

    def _wake(self) -> None:
        self._news.set()

    async def _log(self, kind: str, body: JsonObject) -> None:
        name = self.view.plan.name
        await add_to_batch(self._store, name, kind, body, caller=self._quota.caller)
        for entry in await batch_log(self._store, name, after=self._last_entry):
            self._last_entry = entry.id
            self.view.apply(entry)

    async def _log_if_possible(self, kind: str, body: JsonObject) -> None:
        try:
            await self._log(kind, body)
        except StoreError:
            self.view.status = "stopped"


async def batch_view(store: Store, name: str) -> BatchView:
    """A batch as the log has it; UnknownBatch where there is none of that name."""
    entries = await batch_log(store, name)
    if not entries:
        raise UnknownBatch(f"there is no batch {name!r} in {store.path}; rollcage eval makes one")
    view, after, more = BatchView(entries, ()), 0, True
    while more:
        changes = await batch_changes(store, name, after=after)
        for row in changes.rows:
            view.add(row)
        after, more = changes.last, changes.fresh > 0
    return view


@contextmanager
def batch_lock(store: Store, name: str) -> Iterator[bool]:
    """Whether this process may run the batch while the block lasts; false where another one does."""
    folder = store.path.parent / "batches"
    folder.mkdir(mode=0o700, exist_ok=True)
    fd = try_lock(folder / f"{blake2b(name.encode(), digest_size=12).hexdigest()}.lock")
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def is_running(store: Store, name: str) -> bool:
    """Whether some process is at it."""
    with batch_lock(store, name) as mine:
        return not mine


async def follow_batch(
    store: Store, name: str, show: Callable[[BatchView], Awaitable[None]] | None = None
) -> BatchView:
    """Watch a batch that another process runs, until that process is done with it or gone."""
    while True:
        began = time.monotonic()
        alive = is_running(store, name)
        view = await batch_view(store, name)
        if show:
            await show(view)
        if not alive:
            return view
        await anyio.sleep(max(LOOK_S, 9 * (time.monotonic() - began)))


@asynccontextmanager
async def locked_or_followed(
    store: Store, name: str, show: Callable[[BatchView], Awaitable[None]] | None = None
) -> AsyncIterator[BatchView | None]:
    """None once this process may run the batch; the batch as it ended where another one ran it to its end.

    A process that was killed leaves the batch `running`: whoever followed it goes on with it.
    """
    while True:
        with batch_lock(store, name) as mine:
            if mine:
                yield None
                return
        view = await follow_batch(store, name, show)
        if view.status != "running":
            yield view
            return
