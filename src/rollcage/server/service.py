"""What the server can do with rollouts, without any HTTP: start, look at, follow, stop and list them."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

import anyio
from anyio.abc import TaskGroup
from pydantic import Field

from rollcage.endpoints import Scripted, not_offered
from rollcage.errors import AlreadyStarted, StoreError, UsageError
from rollcage.events import Ended, Entry, Event, Queued
from rollcage.jobs import CallerJob, is_scripted, rebuild_job, to_job
from rollcage.results.result import RolloutResult, result_of
from rollcage.runner import Runner, StartOptions, orphans, recover
from rollcage.runner.recovery import EventListener
from rollcage.schema.errors import Stopping
from rollcage.schema.fingerprint import check_same, fingerprint
from rollcage.schema.request import RolloutRequest
from rollcage.schema.views import STATUS, Aborted, Started
from rollcage.server.auth import Caller
from rollcage.server.batches import BatchService
from rollcage.server.environments import RemoteEnvironments
from rollcage.server.feeds import FeedLine
from rollcage.server.groups import GroupService
from rollcage.server.metrics import Metrics
from rollcage.server.reading import LogReader, still_running, written
from rollcage.settings import Settings
from rollcage.store import Store, Summary
from rollcage.store.retention import file_bytes, size_of
from rollcage.types import Endpoint, Job, Value
from rollcage.wiring import ClusterLink, opened_executor, opened_listener, opened_registry

if TYPE_CHECKING:
    from rollcage.simulators import ScriptedModel

Lines = list[FeedLine]

LOOK_S = 5.0
"""How often the service looks for rollouts whose process has died."""
PROBE_S = 2.0
"""How old the answer may be to whether the log can be written."""
MEASURE_S = 60.0
"""How often the archives beside the log are counted."""
ADOPTED = 100
"""How many of them are begun anew together."""


class ServerLimits(Value):
    """How much a server takes on."""

    at_once: int = Field(default=8, ge=1)
    """Rollouts that run at the same time."""
    queue: int = Field(default=256, ge=0)
    """Rollouts that may wait; the next one is refused."""
    allow_endpoints: tuple[str, ...] = ()
    """Model addresses that callers may name (`https://host[:port][/path]`); none means any."""


class Service(LogReader):
    """Rollouts for many callers. Everything here may be awaited by any number of tasks at once.

    Every method raises `UnknownRollout` for an id that nobody knows or that belongs to another caller,
    `UsageError` (with `.argument`) for what cannot be, `QueueFull` (with `.retry_after_s`) when there is no place
    left, `Stopping` when the server is about to end.
    """

    def __init__(
        self, settings: Settings, store: Store, runner: Runner, tasks: TaskGroup, limits: ServerLimits
    ) -> None:
        """Use `Service.open`."""
        super().__init__(store, tasks)
        self.settings = settings
        self.limits = limits
        self._runner = self.runner = runner
        self._stack = AsyncExitStack()
        self._model: ScriptedModel | None = None
        self._opening = anyio.Lock()
        self._scripts: dict[str, Endpoint] = {}
        self._stopping = False
        self._probing, self._log_problem = anyio.Lock(), ""
        self._probed = self._measured = -math.inf
        self.environments = RemoteEnvironments({}, {}, settings, tasks)
        """Remote environments that rollouts can be given, and that callers can try."""
        self.metrics = Metrics(runner.queue, lambda: self._feeds.followers, lambda: runner.nodes)
        """What this process counts."""
        self.clustered = False
        """Whether other machines run the rollouts."""
        self.groups = GroupService(self)
        """Rollouts that belong together."""
        self.batches = BatchService(self, tasks)
        """Whole task sets."""
        self._listener: EventListener = lambda rollout_id, event: None
        runner.on_event = self._on_event

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        *,
        limits: ServerLimits | None = None,
        callers: Mapping[str, Caller] | None = None,
        warm: int = 0,
        environments: Mapping[str, str] | None = None,
        cluster: ClusterLink | None = None,
    ) -> AsyncIterator[Service]:
        """A service with everything it needs: log, runner, boxes, gateway. Takes over what dead servers left.

        `callers`: those that have limits of their own, by name. `warm`: see `opened_registry`.
        `environments`: names that callers may use, and the addresses of remote environments they stand for.
        `cluster`: other machines that run the rollouts.
        """
        limits = limits or ServerLimits()
        async with (
            Store.open(settings.log_path) as store,
            opened_registry(settings, warm=0 if cluster else warm, local=False) as backends,
            opened_listener(settings, store) as on_event,
            anyio.create_task_group() as tasks,
            # Before the runner, so that it outlives the rollouts.
            AsyncExitStack() as stack,
            opened_executor(settings, backends, cluster) as executor,
            Runner.open(
                store, backends, at_once=limits.at_once, queue=limits.queue, recovers=False, executor=executor
            ) as runner,
        ):
            service = cls(settings, store, runner, tasks, limits)
            service.environments = RemoteEnvironments(backends.environments, environments or {}, settings, tasks)
            service.agents = backends.agents
            service._listener = on_event
            service._stack = stack
            service.clustered = cluster is not None
            tasks.start_soon(service._look_after, callers or {})
            try:
                yield service
            finally:
                tasks.cancel_scope.cancel()

    @property
    def running(self) -> int:
        """Rollouts that have a place."""
        return self._runner.queue.running

    @property
    def waiting(self) -> int:
        """Rollouts that wait for one."""
        return self._runner.queue.waiting

    @property
    def stopping(self) -> bool:
        """Whether nothing more is started."""
        return self._stopping

    async def log_problem(self) -> str:
        """Why the log cannot be written; empty where it can. Tried at most every few seconds."""
        async with self._probing:
            if time.monotonic() - self._probed > PROBE_S:
                try:
                    await self._store.check_writable()
                    self._log_problem = ""
                except StoreError as error:
                    self._log_problem = str(error)
                self._probed = time.monotonic()
        return self._log_problem

    async def measure_log(self) -> None:
        """Bring what is counted of the log up to date."""
        self.metrics.log_writable.set(not await self.log_problem())
        self.metrics.log_bytes.set(file_bytes(self._store.path))
        if time.monotonic() - self._measured > MEASURE_S:
            self._measured = time.monotonic()
            size = await anyio.to_thread.run_sync(size_of, self._store.path, self.settings.work_dir)
            self.metrics.work_bytes.set(size.work_bytes)

    async def start(self, request: RolloutRequest, caller: Caller) -> Started:
        """Queue a rollout. Its idempotency key, if it has one, joins the first rollout of this caller with that key."""
        if request.idempotency_key:
            first = await self._store.started(caller.name, request.idempotency_key)
            if first is not None:
                return await self._joined(first, request)
        self.check_going()
        job, because = await self.understood(request)
        same = await anyio.to_thread.run_sync(fingerprint, request) if request.idempotency_key else {}
        options = StartOptions(
            caller.quota,
            request.idempotency_key,
            same,
            resumable=not because,
            not_resumable_because=because,
        )
        try:
            rollout_id = await self._runner.start(job, options)
        except AlreadyStarted as other:
            self._forget(job.model)
            return await self._joined(other.rollout_id, request)
        except BaseException:
            self._forget(job.model)
            raise
        return Started(rollout_id=rollout_id, task_id=job.task.id, started_at=time.time())

    def check_going(self) -> None:
        """Stopping where nothing more is started."""
        if self._stopping:
            raise Stopping("the server is about to stop and starts nothing more; ask again when it is back")

    async def understood(self, request: RolloutRequest) -> CallerJob:
        """The job that is asked for. A large request takes a while to check; meanwhile the others go on."""
        in_thread = anyio.to_thread.run_sync
        scripted: Scripted = _no_script
        if await in_thread(is_scripted, request):
            scripted = (await self.scripted()).endpoint
        remote, allowed = self.environments.address, self.limits.allow_endpoints
        return await in_thread(
            partial(to_job, request, self.settings, scripted=scripted, allowed=allowed, remote=remote)
        )

    def forget_unused(self, jobs: Sequence[Job]) -> None:
        """The scripts of jobs that were not begun."""
        used = list(self._scripts.values())
        for job in jobs:
            if job.model not in used:
                self._forget(job.model)

    async def _joined(self, rollout_id: str, request: RolloutRequest) -> Started:
        first = (await self._store.read(rollout_id, limit=1))[0].event
        if isinstance(first, Queued) and first.arguments:  # logs of before have no digests
            await anyio.to_thread.run_sync(check_same, request, first.arguments, rollout_id)
        summary = await self._store.summary(rollout_id)
        status = STATUS[summary.stage]
        return Started(
            rollout_id=rollout_id, task_id=summary.task_id, status=status, started_at=summary.created_at, joined=True
        )

    async def finalize(self, rollout_id: str, caller: Caller, *, wait_s: float | None = None) -> RolloutResult:
        """Wait for the end (at most `wait_s`), then the result; `outcome` is None where it still runs. Repeatable.

        Cancelling this leaves the rollout running: whoever wants it gone calls `abort`.
        """
        await self.over(rollout_id, caller, wait_s)
        rollout = await self._store.rollout(rollout_id)
        result = await anyio.to_thread.run_sync(result_of, rollout)
        return result if result.outcome is not None else still_running(result, wait_s)

    async def written(self, rollout_id: str, caller: Caller, *, wait_s: float) -> AsyncGenerator[bytes, None]:
        """As `finalize`, as JSON in pieces: however long the rollout was, little of it is in memory at a time."""
        await self.over(rollout_id, caller, wait_s)
        return written(self._store, rollout_id, wait_s)

    async def over(self, rollout_id: str, caller: Caller, wait_s: float | None) -> None:
        """Wait for the end, at most so long; nothing is read of the log."""
        await self.visible(rollout_id, caller)
        with anyio.move_on_after(wait_s):
            await self._runner.over(rollout_id)

    async def follow(self, rollout_id: str, caller: Caller, *, after: int = 0) -> AsyncGenerator[Entry, None]:
        """Entries above `after`, then each new one as it comes; over after `Ended`. `await` gives the generator.

        An unknown id raises before anything is yielded. Use `aclosing`.
        """
        return _entries(await self.lines(rollout_id, caller, after=after))

    async def abort(self, rollout_id: str, caller: Caller, *, reason: str = "") -> Aborted:
        """Ask it to stop; it ends soon after. `finalize` waits for that."""
        await self.visible(rollout_id, caller)
        aborted = await self._runner.abort(rollout_id, reason or "asked for by the caller")
        return Aborted(rollout_id=rollout_id, aborted=aborted, reason=reason if aborted else "it had ended already")

    async def stop(self, how: Literal["finish", "abort"], *, grace_s: float = 5) -> None:
        """Start nothing more. `finish` waits for all; `abort` ends what waits at once, what runs after `grace_s`."""
        self._stopping = True
        self.batches.stop()
        if how == "finish":
            await self._runner.idle()
        await self._runner.stop("the server stops", grace_s=grace_s)
        await self.batches.ended()

    def position(self, rollout_id: str) -> int | None:
        """Its place in the queue; None where it does not wait."""
        return self._runner.position(rollout_id)

    async def scripted(self) -> ScriptedModel:
        """The one that answers from scripts, running."""
        async with self._opening:
            if self._model is None:
                self._model = await self._stack.enter_async_context(await anyio.to_thread.run_sync(_scripted_model))
        return self._model

    def _forget(self, endpoint: Endpoint | None) -> None:
        if self._model is not None and endpoint is not None and endpoint.kind == "scripted":
            self._model.forget(endpoint)

    def _on_event(self, rollout_id: str, event: Event) -> None:
        self.metrics.on_event(rollout_id, event)
        self._listener(rollout_id, event)
        if isinstance(event, Queued) and event.job.model.kind == "scripted":
            self._scripts[rollout_id] = event.job.model
        elif isinstance(event, Ended):
            self._forget(self._scripts.pop(rollout_id, None))

    async def _look_after(self, callers: Mapping[str, Caller]) -> None:
        """End, or begin anew, what processes that died have left: at the start, and whenever one dies later."""
        while True:
            if not self._stopping:
                try:
                    await recover(self._store, self._owners, self._on_event)
                    found = await orphans(self._store, self._owners)
                    for at in range(0, len(found), ADOPTED):
                        await self._adopt(found[at : at + ADOPTED], callers)
                except StoreError:
                    pass  # a full disk, say; the next look may fare better
            await anyio.sleep(LOOK_S)

    async def _adopt(self, found: Sequence[Summary], callers: Mapping[str, Caller]) -> None:
        firsts = {e.rollout_id: e.event for e in await self._store.read_all([each.id for each in found], "queued")}
        wanted = []
        for orphan in found:
            first = firsts[orphan.id]
            if not isinstance(first, Queued) or self._stopping:
                continue
            scripted: Scripted = (await self.scripted()).endpoint if first.job.model.kind == "scripted" else _no_script
            try:
                job = rebuild_job(first.job, self.settings, scripted=scripted)
                self._runner.check(job)
            except UsageError as error:
                await self._runner.give_up(orphan, f"it cannot be resumed: {error}")
                continue
            self._scripts[orphan.id] = job.model
            caller = callers.get(orphan.caller) or Caller(name=orphan.caller)
            wanted.append((orphan, job, caller.quota))
        adopted = await self._runner.adopt(wanted)
        for orphan, _, _ in wanted:
            if orphan.id not in adopted:
                self._forget(self._scripts.pop(orphan.id, None))


async def _entries(pages: AsyncGenerator[Lines, None]) -> AsyncGenerator[Entry, None]:
    async with aclosing(pages):
        async for page in pages:
            for line in page:
                yield line.entry


def _scripted_model() -> ScriptedModel:
    from rollcage.simulators import ScriptedModel

    return ScriptedModel(keep_requests=0)


def _no_script(turns: object) -> Endpoint:
    raise not_offered()
