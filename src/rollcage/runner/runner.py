"""Starts rollouts, runs a number of them at once, stops them on request, and ends what a dead process left open."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup, TaskStatus

from rollcage.errors import StoreError
from rollcage.events import AbortRequested, Ended, Event, Queued, Requeued, Rollout
from rollcage.rollout.run import RolloutDeps, run
from rollcage.runner.live import serve
from rollcage.runner.owners import Owners
from rollcage.runner.queue import EVERYBODY, FairQueue, Quota, Slot
from rollcage.runner.registry import Registry as Registry
from rollcage.store import Store, Summary
from rollcage.store.redact import hidden
from rollcage.types import Job, Outcome, Stage

RETRY_S = 5
"""How long to wait before a log that could not be written is tried again."""
_DIED = "the process that ran it died before it ended"


BEFORE_AGENT = (Stage.QUEUED, Stage.PROVISION, Stage.SETUP)
"""Stages in which nothing was sampled yet: a rollout that dies there can begin anew."""

EventListener = Callable[[str, Event], None]
"""Gets every event that this process logs, with the rollout's id, once it is on the disk."""


@dataclass(frozen=True)
class StartOptions:
    """For whom a rollout is run, and what may be done with it."""

    quota: Quota = EVERYBODY
    """The caller, and how much it may use."""
    idempotency_key: str = ""
    """The caller's own name for this start."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Digests of what was asked for under it."""
    resumable: bool = False
    """Whether a later server may run it, should this process die before the agent begins."""
    not_resumable_because: str = ""
    """Why not."""
    reverifies: str = ""
    """The rollout whose stored work it judges again."""


@dataclass(frozen=True)
class _Running:
    scope: anyio.CancelScope
    over: anyio.Event
    slot: Slot


def _ignore(rollout_id: str, event: Event) -> None:
    pass


async def recover(store: Store, owners: Owners, on_event: EventListener = _ignore) -> list[str]:
    """End every open rollout whose process is dead; its boxes died with it. Returns their ids, and tells `on_event`.

    Those that a server may resume are left to it, unless somebody asked for them to stop.
    """
    ended = []
    for summary in await store.list(limit=1_000_000, open_only=True):
        if owners.alive(summary.owner):
            continue
        why = await _not_resumable_because(store, summary)
        over = Ended(outcome=Outcome.CRASHED, error=f"crashed: {_DIED}; {why}start it again", error_code="crashed")
        if _waits_for_a_server(summary):
            if not await store.read(summary.id, kinds=("abort_requested",), limit=1):
                continue
            error = f"aborted: stopped on request; {_DIED}"
            over = Ended(outcome=Outcome.ABORTED, error=error, error_code="aborted")
        with suppress(StoreError):  # another process was quicker
            await store.append(summary.id, over)
            ended.append(summary.id)
            on_event(summary.id, over)
    return ended


async def orphans(store: Store, owners: Owners) -> list[Summary]:
    """The rollouts whose process is dead and that a server may resume, oldest first."""
    found = await store.list(limit=1_000_000, open_only=True)
    return [each for each in reversed(found) if _waits_for_a_server(each) and not owners.alive(each.owner)]


async def _not_resumable_because(store: Store, summary: Summary) -> str:
    if summary.stage not in BEFORE_AGENT:
        return ""
    first = (await store.read(summary.id, limit=1))[0].event
    return f"{first.not_resumable_because}; " if isinstance(first, Queued) and first.not_resumable_because else ""


def _waits_for_a_server(summary: Summary) -> bool:
    return summary.resumable and summary.stage in BEFORE_AGENT


async def end_if_owner_dies(store: Store, rollout_id: str) -> None:
    """Wait until a rollout has ended; if the process that runs it dies first, end it, or leave it to a server."""
    owners = Owners.beside(store)
    while True:
        summary = await store.summary(rollout_id)
        if summary.outcome is not None:
            return
        if not owners.alive(summary.owner):
            await recover(store, owners)
        await anyio.sleep(1)


class Runner:
    """Runs rollouts: at most `at_once` at a time, the others wait their turn."""

    def __init__(self, store: Store, registry: Registry, tasks: TaskGroup, owner: str, waiting: FairQueue) -> None:
        self._store, self._registry, self._tasks, self._owner = store, registry, tasks, owner
        self._running: dict[str, _Running] = {}
        self._broken: dict[str, StoreError] = {}
        self.queue = waiting
        """Who runs and who waits."""
        self.on_event: EventListener = _ignore
        """Told of every event."""
        self.recovered: list[tuple[str, Event]] = []
        """What was ended at the start, because its process was dead."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls, store: Store, registry: Registry, *, at_once: int = 8, queue: int | None = None
    ) -> AsyncIterator[Runner]:
        """A runner on this log. Ends what dead processes left open; at the end of the block aborts what still runs.

        `queue`: how many may wait; None means any number.
        """
        owners = Owners.beside(store)
        recovered: list[tuple[str, Event]] = []
        await recover(store, owners, lambda *each: recovered.append(each))
        with owners.hold() as owner:
            async with anyio.create_task_group() as tasks:
                runner = cls(store, registry, tasks, owner, FairQueue(at_once, queue))
                runner.recovered = recovered
                await tasks.start(runner._watch_aborts)
                await tasks.start(serve, owners.socket(owner), registry.gateway.watch)
                try:
                    yield runner
                finally:
                    tasks.cancel_scope.cancel()

    async def start(self, job: Job, options: StartOptions | None = None) -> str:
        """Queue a rollout; its id. The log has it when this returns.

        QueueFull where no more may wait; AlreadyStarted where the idempotency key was used before.
        """
        options = options or StartOptions()
        job = self._registry.settled(job)
        deps = self._registry.deps(job)
        rollout_id = secrets.token_hex(8)
        queued = Queued(
            job=job,
            owner=self._owner,
            caller=options.quota.caller,
            idempotency_key=options.idempotency_key,
            arguments=dict(options.arguments),
            resumable=options.resumable,
            not_resumable_because=options.not_resumable_because,
            reverifies=options.reverifies,
        )
        await self._enter(rollout_id, queued, job, deps, self.queue.take(options.quota))
        return rollout_id

    async def adopt(self, orphan: Summary, job: Job, quota: Quota) -> bool:
        """Run a dead process's rollout anew, with a key in its job again; False where somebody else was quicker."""
        deps = self._registry.deps(job)
        requeued = Requeued(owner=self._owner, previous=orphan.owner)
        try:
            await self._enter(orphan.id, requeued, job, deps, self.queue.take(quota, always=True))
        except StoreError:
            return False
        if await self._store.read(orphan.id, kinds=("abort_requested",), limit=1):
            self._stop(orphan.id)
        return True

    async def give_up(self, orphan: Summary, why: str) -> None:
        """End a dead process's rollout that cannot be run anew."""
        with suppress(StoreError):  # somebody else was quicker
            await self._store.append(orphan.id, Requeued(owner=self._owner, previous=orphan.owner))
            over = Ended(outcome=Outcome.CRASHED, error=f"crashed: {_DIED}; {why}", error_code="crashed")
            await self._store.append(orphan.id, over)
            self.on_event(orphan.id, over)

    async def _enter(self, rollout_id: str, first: Queued | Requeued, job: Job, deps: RolloutDeps, slot: Slot) -> None:
        # What is in the log must be run: whoever asked may be cancelled, but not between the two.
        with anyio.CancelScope(shield=True):
            try:
                await self._store.append(rollout_id, first)
            except BaseException:
                slot.leave()
                raise
            self._running[rollout_id] = _Running(anyio.CancelScope(), anyio.Event(), slot)
            self._tasks.start_soon(self._run, rollout_id, job, deps)
        self.on_event(rollout_id, first)

    @property
    def open_ids(self) -> list[str]:
        """The rollouts that run or wait here."""
        return list(self._running)

    def position(self, rollout_id: str) -> int | None:
        """Its place in the queue, from 1; None where it does not wait here."""
        mine = self._running.get(rollout_id)
        return mine.slot.position if mine else None

    async def wait(self, rollout_id: str) -> Rollout:
        """The rollout, once it has ended; StoreError where its log broke before."""
        await self.over(rollout_id)
        return await self._store.rollout(rollout_id)

    async def over(self, rollout_id: str) -> None:
        """Wait for the end of a rollout, whichever process runs it; StoreError where its log broke before."""
        if mine := self._running.get(rollout_id):
            await mine.over.wait()
        if broken := self._broken.get(rollout_id):
            raise broken
        last, ended = await self._store.last(rollout_id)
        if ended:
            return
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(end_if_owner_dies, self._store, rollout_id)
            async with aclosing(self._store.follow(rollout_id, after=last)) as entries:
                async for _ in entries:
                    pass
            tasks.cancel_scope.cancel()

    async def abort(self, rollout_id: str, reason: str = "") -> bool:
        """Ask for a rollout to stop, whichever process runs it; it ends soon after. False where it had ended."""
        if (await self._store.last(rollout_id))[1]:
            return False
        try:
            await self._store.append(rollout_id, AbortRequested(reason=reason))
        except StoreError:
            # It may have ended at this very moment; or the log is full, and ours stops all the same.
            if rollout_id not in self._running:
                return False
        self._stop(rollout_id)
        return True

    def _stop(self, rollout_id: str) -> None:
        if mine := self._running.get(rollout_id):
            mine.scope.cancel()

    async def _watch_aborts(self, *, task_status: TaskStatus[None]) -> None:
        async with aclosing(self._store.follow_kind("abort_requested")) as requests:
            task_status.started()
            async for entry in requests:
                self._stop(entry.rollout_id)

    async def _run(self, rollout_id: str, job: Job, deps: RolloutDeps) -> None:
        kept = (job.model.key.get_secret_value(), *(deps.environments.secrets if deps.environments else ()))

        async def log(event: Event) -> None:
            for secret in kept:
                event = hidden(event, secret)
            await self._store.append(rollout_id, event)
            self.on_event(rollout_id, event)

        mine, entered = self._running[rollout_id], False
        try:
            with mine.scope:
                try:
                    async with mine.slot:
                        entered = True
                        await run(job, deps, log, name=rollout_id)
                finally:
                    if not entered:
                        with anyio.CancelScope(shield=True):
                            error = "aborted: stopped on request before it began"
                            await log(Ended(outcome=Outcome.ABORTED, error=error, error_code="aborted"))
        except StoreError as error:
            self._broken[rollout_id] = error
            self._tasks.start_soon(self._end_later, rollout_id, error)
        finally:
            mine.over.set()
            del self._running[rollout_id]

    async def _end_later(self, rollout_id: str, error: StoreError) -> None:
        """Close the log of a rollout that could not be logged, once it can be written again."""
        ended = Ended(outcome=Outcome.INTERNAL_ERROR, error=f"internal_error: {error}", error_code="log_failed")
        while True:
            await anyio.sleep(RETRY_S)
            try:
                await self._store.append(rollout_id, ended)
            except StoreError:
                if (await self._store.last(rollout_id))[1]:
                    return
            else:
                return
