"""What the server can do with rollouts, without any HTTP: start, look at, follow, stop and list them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Literal

import anyio
from anyio.abc import TaskGroup

from rollcage.api.errors import Stopping
from rollcage.api.request import BadArgument, RolloutRequest, again, argument_error, is_scripted, wanted
from rollcage.api.views import (
    STATUS,
    Aborted,
    EventPage,
    Files,
    Messages,
    RolloutPage,
    RolloutState,
    Started,
    Trace,
    TurnPage,
    state_of,
    traced,
)
from rollcage.assembly import opened_backends
from rollcage.endpoints import Scripted
from rollcage.errors import AlreadyStarted, StoreError, UnknownRollout, UsageError
from rollcage.events import Ended, Entry, Event, FilesCollected, Queued, TurnEnded
from rollcage.gateway.live import Delta
from rollcage.live import heard
from rollcage.result import RolloutResult, proxy_turn, result_of
from rollcage.runner import Owners, Runner, Terms, orphans, recover
from rollcage.server.admission import Caller, Limits
from rollcage.server.environments import RemoteEnvironments
from rollcage.server.feeds import Feeds, Line
from rollcage.server.metrics import Metrics
from rollcage.server.transcript import KINDS, transcript_of
from rollcage.settings import Settings
from rollcage.store import Query, Store, Summary
from rollcage.types import Endpoint

if TYPE_CHECKING:
    from rollcage.testing import ScriptedModel

Lines = list[Line]
Entries = list[Entry]

LOOK_S = 5.0
"""How often the service looks for rollouts whose process has died."""


class Service:
    """Rollouts for many callers. Everything here may be awaited by any number of tasks at once.

    Every method raises `UnknownRollout` for an id that nobody knows or that belongs to another caller,
    `UsageError` (`BadArgument`, with `.argument`, from `start`) for what cannot be, `QueueFull` (with
    `.retry_after_s`) when there is no place left, `Stopping` when the server is about to end.
    """

    def __init__(self, settings: Settings, store: Store, runner: Runner, tasks: TaskGroup, limits: Limits) -> None:
        """Use `Service.open`."""
        self.settings = settings
        self.limits = limits
        self._store, self._runner = store, runner
        self._owners = Owners.beside(store)
        self._feeds = Feeds(store, tasks)
        self._stack = AsyncExitStack()
        self._model: ScriptedModel | None = None
        self._opening = anyio.Lock()
        self._scripts: dict[str, Endpoint] = {}
        self._stopping = False
        self.environments = RemoteEnvironments({}, {}, settings, tasks)
        """Remote environments that rollouts can be given, and that callers can try."""
        self.metrics = Metrics(runner.places, lambda: self._feeds.followers)
        """What this process counts."""
        runner.heard = self._heard

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        *,
        limits: Limits | None = None,
        callers: Mapping[str, Caller] | None = None,
        warm: int = 0,
        environments: Mapping[str, str] | None = None,
    ) -> AsyncIterator[Service]:
        """A service with everything it needs: log, runner, boxes, gateway. Takes over what dead servers left.

        `callers`: those that have limits of their own, by name. `warm`: see `opened_backends`.
        `environments`: names that callers may use, and the addresses of remote environments they stand for.
        """
        limits = limits or Limits()
        async with (
            Store.open(settings.log_path) as store,
            opened_backends(settings, warm=warm) as backends,
            anyio.create_task_group() as tasks,
            # Before the runner, so that it outlives the rollouts.
            AsyncExitStack() as stack,
            Runner.open(store, backends, at_once=limits.at_once, queue=limits.queue) as runner,
        ):
            service = cls(settings, store, runner, tasks, limits)
            service.environments = RemoteEnvironments(backends.environments, environments or {}, settings, tasks)
            service._stack = stack
            tasks.start_soon(service._look_after, callers or {})
            try:
                yield service
            finally:
                tasks.cancel_scope.cancel()

    @property
    def running(self) -> int:
        """Rollouts that have a place."""
        return self._runner.places.running

    @property
    def waiting(self) -> int:
        """Rollouts that wait for one."""
        return self._runner.places.waiting

    async def start(self, request: RolloutRequest, caller: Caller) -> Started:
        """Queue a rollout. Its idempotency key, if it has one, joins the first rollout of this caller with that key."""
        if request.idempotency_key:
            first = await self._store.started(caller.name, request.idempotency_key)
            if first is not None:
                return await self._joined(first, request)
        if self._stopping:
            raise Stopping("the server is about to stop and starts nothing more; ask again when it is back")
        scripted: Scripted = (await self._scripted()).endpoint if is_scripted(request) else _no_script
        job, because = wanted(
            request,
            self.settings,
            scripted=scripted,
            allowed=self.limits.allow_endpoints,
            remote=self.environments.address,
        )
        terms = Terms(caller.share, request.idempotency_key, resumable=not because, not_resumable_because=because)
        try:
            rollout_id = await self._runner.start(job, terms)
        except AlreadyStarted as other:
            self._forget(job.model)
            return await self._joined(other.rollout_id, request)
        except UsageError as error:
            self._forget(job.model)
            raise argument_error(error) from None
        except BaseException:
            self._forget(job.model)
            raise
        return Started(rollout_id=rollout_id, task_id=job.task.id, started_at=time.time())

    async def _joined(self, rollout_id: str, request: RolloutRequest) -> Started:
        entry = (await self._store.read(rollout_id, limit=1))[0]
        first = entry.event.job.task if isinstance(entry.event, Queued) else None
        if first is None or first.instruction != request.instruction or first.id != request.task_id:
            raise BadArgument(
                "idempotency_key", f"idempotency_key: rollout {rollout_id} has it, with another task; use a new key"
            )
        summary = await self._store.summary(rollout_id)
        status = STATUS[summary.stage]
        return Started(
            rollout_id=rollout_id, task_id=first.id, status=status, started_at=summary.created_at, joined=True
        )

    async def finalize(self, rollout_id: str, caller: Caller, *, wait_s: float | None = None) -> RolloutResult:
        """Wait for the end (at most `wait_s`), then the result; `outcome` is null where it still runs. Repeatable.

        Cancelling this leaves the rollout running: whoever wants it gone calls `abort`.
        """
        await self._visible(rollout_id, caller)
        with anyio.move_on_after(wait_s):
            return result_of(await self._runner.wait(rollout_id))
        result = result_of(await self._store.rollout(rollout_id))
        if result.outcome is not None:
            return result
        error = f"still_running: it had not ended after {wait_s:g} s; ask again"
        return result.model_copy(update={"error": error, "error_code": "still_running"})

    async def result(self, rollout_id: str, caller: Caller) -> RolloutResult:
        """What it came to so far, at once."""
        await self._visible(rollout_id, caller)
        return result_of(await self._store.rollout(rollout_id))

    async def state(self, rollout_id: str, caller: Caller) -> RolloutState:
        """Where it is. One row of one table: cheap."""
        return self._state(await self._visible(rollout_id, caller))

    async def reached(self, rollout_id: str, caller: Caller) -> tuple[RolloutState, int]:
        """Where it is, and the seq of its newest entry."""
        state = await self.state(rollout_id, caller)
        return state, (await self._store.last(rollout_id))[0]

    async def list(self, query: Query, caller: Caller, *, cursor: str = "", limit: int = 50) -> RolloutPage:
        """Rollouts that match, newest first; those of this caller only, unless it may see all."""
        if cursor and not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
            raise BadArgument("cursor", "cursor: is not one that this server gave; leave it out to start anew")
        if not caller.admin:
            query = query.model_copy(update={"caller": caller.name})
        rows, more = await self._store.page(query, before=int(cursor) if cursor else None, limit=limit)
        return RolloutPage(rollouts=[self._state(row) for row in rows], next_cursor=None if more is None else str(more))

    async def messages(self, rollout_id: str, caller: Caller) -> Messages:
        """The agent's own transcript so far, in the shape of OpenCode's `GET /session/:id/message`."""
        summary = await self._visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, kinds=KINDS)
        return Messages(
            rollout_id=rollout_id,
            status=STATUS[summary.stage],
            serve_session_id=summary.session or None,
            messages=transcript_of(entries),
        )

    async def events(self, rollout_id: str, caller: Caller, *, after: int = 0, limit: int = 200) -> EventPage:
        """Entries of its log with a seq above `after`, oldest first."""
        await self._visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, after=after, limit=limit)
        summary = await self._store.summary(rollout_id)
        last, ended = await self._store.last(rollout_id)
        reached = entries[-1].seq if entries else min(after, last)
        return EventPage(
            rollout_id=rollout_id,
            status=STATUS[summary.stage],
            events=entries,
            next_after=reached,
            ended=ended and reached >= last,
            sse=f"/rollouts/{rollout_id}/events",
        )

    async def follow(self, rollout_id: str, caller: Caller, *, after: int = 0) -> AsyncGenerator[Entry, None]:
        """Entries above `after`, then each new one as it comes; over after `Ended`. `await` gives the generator.

        An unknown id raises before anything is yielded. Use `aclosing`.
        """
        return _entries(await self.lines(rollout_id, caller, after=after))

    async def lines(self, rollout_id: str, caller: Caller, *, after: int = 0) -> AsyncGenerator[Lines, None]:
        """As `follow`, as many at a time as there are, and each as JSON too, written once for all followers."""
        await self._visible(rollout_id, caller)
        return self._feeds.follow(rollout_id, after=after)

    async def live(self, rollout_id: str, caller: Caller) -> AsyncIterator[Delta]:
        """What its model says from now on, while it says it; over when its agent is, or where nothing is said."""
        summary = await self._visible(rollout_id, caller)
        return heard(self._owners.socket(summary.owner), rollout_id)

    async def turns(self, rollout_id: str, caller: Caller, *, after: int = 0, limit: int = 20) -> TurnPage:
        """Model calls, whole, oldest first."""
        entries, more = await self._turns(rollout_id, caller, after, limit)
        turns = [proxy_turn(entry.event.turn) for entry in entries if isinstance(entry.event, TurnEnded)]
        return TurnPage(rollout_id=rollout_id, turns=turns, next_after=more)

    async def trace(self, rollout_id: str, caller: Caller, *, after: int = 0, limit: int = 20) -> Trace:
        """Model calls token by token, as trainers need them."""
        entries, more = await self._turns(rollout_id, caller, after, limit)
        summary = await self._store.summary(rollout_id)
        return Trace(
            rollout_id=rollout_id,
            reward=summary.reward if summary.outcome is not None else None,
            outcome=summary.outcome,
            turns=[traced(entry.event.turn) for entry in entries if isinstance(entry.event, TurnEnded)],
            next_after=more,
            raw=f"/rollouts/{rollout_id}/turns?after={after}&limit={limit}",
        )

    async def _turns(self, rollout_id: str, caller: Caller, after: int, limit: int) -> tuple[Entries, int | None]:
        await self._visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, after=after, limit=limit + 1, kinds=("turn_ended",))
        more = entries[limit - 1].seq if len(entries) > limit else None
        return entries[:limit], more

    async def files(self, rollout_id: str, caller: Caller) -> Files:
        """What the agent left in the workdir; nothing before it was collected."""
        await self._visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, kinds=("files_collected",))
        if entries and isinstance(found := entries[-1].event, FilesCollected):
            first = (await self._store.read(rollout_id, limit=1))[0].event
            folder = first.job.task.workdir if isinstance(first, Queued) else ""
            files = {f"{folder}/{path}": text for path, text in found.files.items()}
            return Files(rollout_id=rollout_id, files=files, files_extra=[f"{folder}/{path}" for path in found.extra])
        return Files(rollout_id=rollout_id)

    async def abort(self, rollout_id: str, caller: Caller, *, reason: str = "") -> Aborted:
        """Ask it to stop; it ends soon after. `finalize` waits for that."""
        await self._visible(rollout_id, caller)
        aborted = await self._runner.abort(rollout_id, reason or "asked for by the caller")
        return Aborted(rollout_id=rollout_id, aborted=aborted, reason=reason if aborted else "it had ended already")

    async def stop(self, how: Literal["finish", "abort"], *, grace_s: float = 5) -> None:
        """Start nothing more; wait for what runs: to its end, or for `grace_s`, and then abort it."""
        self._stopping = True
        with anyio.move_on_after(None if how == "finish" else grace_s):
            await self._all_ended()
        for rollout_id in self._runner.open_ids:
            await self._runner.abort(rollout_id, "the server stops")
        await self._all_ended()

    async def _all_ended(self) -> None:
        for rollout_id in self._runner.open_ids:
            try:
                await self._runner.wait(rollout_id)
            except StoreError:
                continue

    async def _visible(self, rollout_id: str, caller: Caller) -> Summary:
        """The rollout's row, if this caller may see it: what it may not see does not exist."""
        try:
            summary = await self._store.summary(rollout_id)
        except UnknownRollout:
            summary = None
        if summary is None or not (caller.admin or summary.caller == caller.name):
            raise UnknownRollout(f"unknown rollout_id: {rollout_id}")
        return summary

    def _state(self, summary: Summary) -> RolloutState:
        return state_of(summary, self._runner.position(summary.id))

    async def _scripted(self) -> ScriptedModel:
        async with self._opening:
            if self._model is None:
                self._model = await self._stack.enter_async_context(await anyio.to_thread.run_sync(_scripted_model))
        return self._model

    def _forget(self, endpoint: Endpoint | None) -> None:
        if self._model is not None and endpoint is not None and endpoint.kind == "scripted":
            self._model.forget(endpoint)

    def _heard(self, rollout_id: str, event: Event) -> None:
        self.metrics.heard(rollout_id, event)
        if isinstance(event, Queued) and event.job.model.kind == "scripted":
            self._scripts[rollout_id] = event.job.model
        elif isinstance(event, Ended):
            self._forget(self._scripts.pop(rollout_id, None))

    async def _look_after(self, callers: Mapping[str, Caller]) -> None:
        """End, or begin anew, what processes that died have left: at the start, and whenever one dies later."""
        while True:
            if not self._stopping:
                try:
                    await recover(self._store, self._owners)
                    for orphan in await orphans(self._store, self._owners):
                        await self._adopt(orphan, callers.get(orphan.caller) or Caller(name=orphan.caller))
                except StoreError:
                    pass  # a full disk, say; the next look may fare better
            await anyio.sleep(LOOK_S)

    async def _adopt(self, orphan: Summary, caller: Caller) -> None:
        first = (await self._store.read(orphan.id, limit=1))[0].event
        if not isinstance(first, Queued):
            return
        scripted: Scripted = (await self._scripted()).endpoint if first.job.model.kind == "scripted" else _no_script
        try:
            job = again(first.job, self.settings, scripted=scripted)
            self._scripts[orphan.id] = job.model
            if not await self._runner.adopt(orphan, job, caller.share):
                self._forget(self._scripts.pop(orphan.id, None))
        except UsageError as error:
            await self._runner.give_up(orphan, f"it cannot be resumed: {error}")


async def _entries(pages: AsyncGenerator[Lines, None]) -> AsyncGenerator[Entry, None]:
    async with aclosing(pages):
        async for page in pages:
            for line in page:
                yield line.entry


def _scripted_model() -> ScriptedModel:
    from rollcage.testing import ScriptedModel

    return ScriptedModel(keep_requests=0)


def _no_script(turns: object) -> Endpoint:
    raise UsageError("endpoint 'scripted' is not offered here; name another one")
