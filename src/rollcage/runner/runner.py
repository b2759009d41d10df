"""Starts rollouts, runs a number of them at once, and stops them on request."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field

import anyio
from anyio.abc import TaskGroup, TaskStatus

from rollcage.errors import AlreadyStarted, RollcageError, StoreError
from rollcage.events import AbortRequested, Ended, Entry, Event, Queued, Requeued
from rollcage.results.fold import Rollout
from rollcage.rollout.run import RolloutDeps
from rollcage.runner.executor import Execution, Executor, InThisProcess
from rollcage.runner.groups import Groups
from rollcage.runner.live import serve
from rollcage.runner.owners import Owners
from rollcage.runner.queue import EVERYBODY, FairQueue, Quota, Slot
from rollcage.runner.recovery import EventListener, crashed, end_if_owner_dies, ignore, recover
from rollcage.runner.registry import Registry as Registry
from rollcage.schema.nodes import NodeView
from rollcage.store import Store, Summary
from rollcage.store.packed import Packed
from rollcage.store.redact import hidden
from rollcage.types import BatchPlace, Endpoint, GroupPlace, Job, Origin, Outcome

RETRY_S = 5
"""How long to wait before a log that could not be written is tried again."""
Entering = tuple[str, Queued | Requeued, Job, RolloutDeps, Slot]
"""A rollout that is about to run here: its id, what its log gets, and what it is run with."""


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
    group: GroupPlace | None = None
    """Its place among those that are started with it."""
    batch: BatchPlace | None = None
    """Its place in a batch."""
    origin: Origin | None = None
    """The rollout it replays, or is forked from."""


@dataclass(frozen=True)
class _Running:
    scope: anyio.CancelScope
    over: anyio.Event
    slot: Slot
    began: float | None
    """When it was queued, by a clock that nobody sets; None where another process did that."""


class Runner:
    """Runs rollouts: at most `at_once` at a time, the others wait their turn."""

    def __init__(
        self,
        store: Store,
        registry: Registry,
        tasks: TaskGroup,
        owner: str,
        waiting: FairQueue,
        executor: Executor | None = None,
    ) -> None:
        self._store, self._registry, self._tasks, self._owner = store, registry, tasks, owner
        self._executor = executor or InThisProcess(registry.gateway)
        self._executor.attach(waiting)
        self._running: dict[str, _Running] = {}
        self._broken: dict[str, StoreError] = {}
        self.queue = waiting
        """Who runs and who waits."""
        self.on_event: EventListener = ignore
        """Told of every event."""
        self.gateway = registry.gateway
        """Between the agents and their models; `pause` and `resume` it while weights are changed."""
        self.groups = Groups(self, store)
        """Rollouts that belong together."""

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        store: Store,
        registry: Registry,
        *,
        at_once: int = 8,
        queue: int | None = None,
        recovers: bool = True,
        executor: Executor | None = None,
    ) -> AsyncIterator[Runner]:
        """A runner on this log. Ends what dead processes left open; at the end of the block aborts what still runs.

        `queue`: how many may wait; None means any number. `recovers`: False where the caller does that later.
        `executor`: where rollouts are run, if not here.
        """
        owners = Owners.beside(store)
        if recovers:
            await recover(store, owners)
        with owners.hold() as owner:
            async with anyio.create_task_group() as tasks:
                runner = cls(store, registry, tasks, owner, FairQueue(at_once, queue), executor)
                await tasks.start(runner._watch_aborts)
                await tasks.start(runner.groups.stop_when_enough)
                await tasks.start(serve, owners.socket(owner), runner._executor.watch)
                try:
                    yield runner
                finally:
                    runner.queue.close()
                    tasks.cancel_scope.cancel()

    async def start(self, job: Job, options: StartOptions | None = None) -> str:
        """Queue a rollout; its id. The log has it when this returns.

        QueueFull where no more may wait; AlreadyStarted where the idempotency key was used before.
        """
        begun = (await self.start_all([(job, options or StartOptions())]))[0]
        if isinstance(begun, AlreadyStarted):
            raise begun
        return begun

    async def start_all(self, starts: Sequence[tuple[Job, StartOptions]]) -> list[str | AlreadyStarted]:
        """Queue several rollouts, all of them or none; their ids, or what says that a key was used before."""
        ready = []
        for asked, options in starts:
            job = self._registry.settled(asked)
            ready.append((secrets.token_hex(8), self._queued(job, options), job, self._registry.deps(job)))
        slots = self._take([options.quota for _, options in starts])
        # What is in the log must be run: whoever asked may be cancelled, but not between the two.
        with anyio.CancelScope(shield=True):
            results = await self._enter([(*each, slot) for each, slot in zip(ready, slots, strict=True)])
            begun = [
                each[0] if isinstance(result, Entry) else result for each, result in zip(ready, results, strict=True)
            ]
            for broken in begun:
                if isinstance(broken, RollcageError) and not isinstance(broken, AlreadyStarted):
                    await self._abort(
                        "another of its group could not be started", [b for b in begun if isinstance(b, str)]
                    )
                    raise broken
        return [each for each in begun if isinstance(each, str | AlreadyStarted)]

    def _take(self, quotas: Sequence[Quota]) -> list[Slot]:
        """Places in the queue, all of them or none."""
        slots: list[Slot] = []
        try:
            for quota in quotas:
                slots.append(self.queue.take(quota))
        except BaseException:
            for slot in slots:
                slot.leave()
            raise
        return slots

    def _queued(self, job: Job, options: StartOptions) -> Queued:
        return Queued(
            job=job,
            owner=self._owner,
            caller=options.quota.caller,
            idempotency_key=options.idempotency_key,
            arguments=dict(options.arguments),
            resumable=options.resumable,
            not_resumable_because=options.not_resumable_because,
            reverifies=options.reverifies,
            group=options.group,
            batch=options.batch,
            origin=options.origin,
        )

    def check(self, job: Job) -> None:
        """UsageError where nobody here can do this job."""
        self._registry.deps(job)

    async def adopt(self, orphans: Sequence[tuple[Summary, Job, Quota]]) -> set[str]:
        """Run dead processes' rollouts anew, with keys in their jobs again; the ids where nobody else was quicker."""
        entering = [
            (
                orphan.id,
                Requeued(owner=self._owner, previous=orphan.owner),
                *(job, self._registry.deps(job), self.queue.take(quota, always=True)),
            )
            for orphan, job, quota in orphans
        ]
        with anyio.CancelScope(shield=True):
            results = await self._enter(entering)
        adopted = {each[0] for each, result in zip(entering, results, strict=True) if isinstance(result, Entry)}
        for entry in await self._store.read_all(tuple(adopted), "abort_requested"):
            self._stop(entry.rollout_id)
        for orphan in {(each.caller, each.group_id): each for each, *_ in orphans if each.id in adopted}.values():
            await self.groups.settle(orphan)
        return adopted

    async def recover(self) -> None:
        """End what processes have left open that died since."""
        await recover(self._store, Owners.beside(self._store), self.on_event)

    async def give_up(self, orphan: Summary, why: str) -> None:
        """End a dead process's rollout that cannot be run anew."""
        with suppress(StoreError):  # somebody else was quicker
            await self._store.append(orphan.id, Requeued(owner=self._owner, previous=orphan.owner))
            over = crashed(why)
            await self._store.append(orphan.id, over)
            self.on_event(orphan.id, over)

    async def _enter(self, entering: Sequence[Entering]) -> list[Entry | RollcageError]:
        """Log how these begin, and run those that the log took; shielded by the caller."""
        try:
            results = await self._store.append_all([(rollout_id, first) for rollout_id, first, *_ in entering])
        except BaseException:
            for *_, slot in entering:
                slot.leave()
            raise
        for (rollout_id, first, job, deps, slot), result in zip(entering, results, strict=True):
            if isinstance(result, Entry):
                began = time.monotonic() if isinstance(first, Queued) else None
                self._running[rollout_id] = _Running(anyio.CancelScope(), anyio.Event(), slot, began)
                self._tasks.start_soon(self._run, rollout_id, job, deps)
                self.on_event(rollout_id, first)
            else:
                slot.leave()
        return results

    async def check_model(self, endpoint: Endpoint) -> None:
        """Ask a model whether it is there; ModelUnreachable where it is not."""
        await self._registry.gateway.check(endpoint, fresh=True)

    @property
    def open_ids(self) -> list[str]:
        """The rollouts that run or wait here."""
        return list(self._running)

    @property
    def nodes(self) -> list[NodeView]:
        """The machines that run its rollouts; none: this process alone."""
        return self._executor.nodes_view()

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
        mine = self._running.get(rollout_id)
        if mine:
            await mine.over.wait()
        if broken := self._broken.get(rollout_id):
            raise broken
        if mine:
            return
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

    async def stop(self, reason: str, *, grace_s: float = 0) -> None:
        """Abort all that wait here at once, and all that run after `grace_s`; done when all have ended."""
        self.queue.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._abort, reason, [each for each in self._running if not self._began(each)])
            with anyio.move_on_after(grace_s):
                await self.idle()
        while self._running:
            await self._abort(reason, self.open_ids)
            await self.idle()

    async def idle(self) -> None:
        """Wait until nothing of what is here now runs or waits any more."""
        for each in list(self._running.values()):
            await each.over.wait()

    async def _abort(self, reason: str, rollout_ids: Sequence[str]) -> None:
        await self._store.append_all([(each, AbortRequested(reason=reason)) for each in rollout_ids])
        for each in rollout_ids:
            self._stop(each)

    def _began(self, rollout_id: str) -> bool:
        return self._running[rollout_id].slot.granted.is_set()

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

        async def log(given: Event | Packed) -> None:
            if isinstance(given, Packed):
                await self._store.append(rollout_id, given)
                self.on_event(rollout_id, given.event)
                return
            event = given
            if isinstance(event, Ended) and mine.began is not None:
                event = event.model_copy(update={"seconds": time.monotonic() - mine.began})
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
                        await self._executor.run(Execution(rollout_id, job, deps, log, self._owner))
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
