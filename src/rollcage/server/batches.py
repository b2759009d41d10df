"""What the server can do with batches, without any HTTP: start, look, cancel."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

import anyio
from anyio.abc import TaskGroup, TaskStatus

from rollcage.endpoints import Scripted, named_model, not_offered
from rollcage.errors import UnknownBatch, UsageError
from rollcage.evaluation.batches import NO_MODEL_LABEL, BatchPlan, BatchReport, BatchView, Cell, TaskRef
from rollcage.jobs import NO_MODEL_AGENTS, OTHER_MODEL, to_job
from rollcage.runner.batch import BatchLimits, BatchRun, CellJob, MakeJob, batch_lock, batch_view, is_running
from rollcage.runner.batch_follower import BatchFollower
from rollcage.schema.batches import BatchRequest
from rollcage.schema.fingerprint import Conflict
from rollcage.schema.request import SECRETS, RolloutRequest
from rollcage.server.auth import Caller
from rollcage.store import Store
from rollcage.store.batches import add_to_batch, batch_names
from rollcage.types import Endpoint

if TYPE_CHECKING:
    from rollcage.server.service import Service

logger = logging.getLogger(__name__)
T = TypeVar("T")
TIMES = 100_000
"""How many rollouts a batch of a caller may have."""


@dataclass
class _Going:
    run: BatchRun
    over: anyio.Event = field(default_factory=anyio.Event)


class BatchReader:
    """Batches as the log has them, for many callers: each sees its own, an admin everybody's."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._follower = BatchFollower(store)

    async def ask(self, caller: Caller, names: Sequence[str], work: Callable[..., T]) -> T:
        """What `work` makes of these batches, in a thread; UnknownBatch where this caller has none of a name."""
        known = await self._names(caller)
        for name in names:
            if name not in known:
                raise UnknownBatch(f"no batch {name!r}")
        return await self._follower.ask(names, work)

    async def report(self, name: str, caller: Caller) -> BatchReport:
        """What it came to so far."""
        return await self.ask(caller, [name], self._report)

    async def _names(self, caller: Caller, *, own: bool = False) -> set[str]:
        whose = None if caller.admin and not own else caller.name
        known = await batch_names(self.store, caller=whose, limit=1_000_000)
        return {name for name, _ in known}

    def _report(self, view: BatchView) -> BatchReport:
        return view.report(running=is_running(self.store, view.plan.name))


class BatchService(BatchReader):
    """Starts and stops them, too."""

    def __init__(self, service: Service, tasks: TaskGroup) -> None:
        super().__init__(service.store)
        self._service, self._tasks = service, tasks
        self._runner = service.runner
        self._going: dict[str, _Going] = {}

    async def start(self, request: BatchRequest, caller: Caller) -> tuple[BatchReport, bool]:
        """Run what is asked for, and whether that is new; the same again joins it, and goes on with what is missing.

        Every combination is checked before anything is started, as a rollout of its own would be.
        """
        self._service.check_going()
        plan, tasks = plan_of(request)
        make = await self._maker(request, plan, tasks)
        await anyio.to_thread.run_sync(self._check, plan, make)
        known = plan.name in await self._names(caller, own=True)
        if known:
            before = (await batch_view(self.store, plan.name)).plan
            if changes := before.changes(plan):
                raise Conflict(
                    f"batch {plan.name} was made of something else: {'; '.join(changes[:5])}",
                    argument="name",
                    remedy="take another name",
                )
        else:
            await add_to_batch(self.store, plan.name, "planned", plan.model_dump(mode="json"), caller=caller.name)
        view = await batch_view(self.store, plan.name)
        if plan.name not in self._going and view.missing() and not is_running(self.store, plan.name):
            limits = BatchLimits(
                at_once=min(request.at_once, self._service.limits.at_once),
                max_tokens=request.max_tokens,
                max_time_s=request.max_time_s,
            )
            going = _Going(BatchRun(self._runner, self.store, view, make, limits, caller.quota))
            self._going[plan.name] = going
            await self._tasks.start(self._run, plan.name, going)
        return self._report(await batch_view(self.store, plan.name)), not known

    async def cancel(self, name: str, caller: Caller) -> BatchReport:
        """Stop what runs of it, begin nothing more, and wait for that. One that is over stays as it is."""
        await self.ask(caller, [name], lambda view: None)
        if going := self._going.get(name):
            going.run.cancel()
            await going.over.wait()
        elif is_running(self.store, name):
            raise Conflict(f"another process runs {name}", argument="name", remedy="stop it there")
        return await self.report(name, caller)

    def stop(self) -> None:
        """Begin no more rollouts; what runs is left to whoever stops the rollouts."""
        for going in self._going.values():
            going.run.stop("the server stops")

    async def ended(self) -> None:
        """Wait until no batch runs any more."""
        for going in list(self._going.values()):
            await going.over.wait()

    def _report(self, view: BatchView) -> BatchReport:
        return view.report(running=view.plan.name in self._going or is_running(self.store, view.plan.name))

    async def _run(self, name: str, going: _Going, *, task_status: TaskStatus[None]) -> None:
        begun = False

        def began() -> None:
            nonlocal begun
            begun = True
            task_status.started()

        try:
            with batch_lock(self.store, name) as mine:
                await going.run.run(began) if mine else began()
        except Exception:
            if not begun:
                raise  # whoever started it is told
            # The log says how far it came; the server goes on.
            logger.exception("the batch %s broke", name)
        finally:
            del self._going[name]
            going.over.set()

    def _check(self, plan: BatchPlan, make: MakeJob) -> None:
        """Every combination, once: what cannot be is said before anything is started."""
        for cell in plan.model_copy(update={"n": 1}).cells():
            made = make(cell)
            try:
                self._runner.check(made.job)
            finally:
                made.release()

    async def _maker(self, request: BatchRequest, plan: BatchPlan, tasks: dict[str, RolloutRequest]) -> MakeJob:
        scripted: Scripted = _no_script
        if any(named_model(model).get("endpoint") == "scripted" for model in request.models):
            scripted = (await self._service.scripted()).endpoint
        remote, allowed = self._service.environments.address, self._service.limits.allow_endpoints
        understood = partial(to_job, settings=self._service.settings, scripted=scripted, allowed=allowed, remote=remote)

        def make(cell: Cell) -> CellJob:
            job = understood(_asked(cell, tasks[cell.task.id], plan.name, request)).job
            return CellJob(job, lambda: self._service.forget_unused([job]))

        return make


def plan_of(request: BatchRequest) -> tuple[BatchPlan, dict[str, RolloutRequest]]:
    """The plan, and its tasks by their names in it; UsageError where it makes no sense."""
    tasks: dict[str, RolloutRequest] = {}
    for number, task in enumerate(request.tasks, 1):
        name = task.task_id or f"task-{number}"
        if name in tasks:
            raise UsageError(f"two tasks have the task_id {name!r}", argument="tasks")
        if task.model or any(getattr(task, field) for field in OTHER_MODEL if field != "hf_token"):
            raise UsageError(f"{name} names a model", argument="tasks", remedy="name it in {models}")
        if task.idempotency_key:
            raise UsageError(f"{name} has an idempotency_key: a batch has its own", argument="tasks")
        tasks[name] = task
    agents, models = request.agents or ("",), tuple(dict.fromkeys(request.models))
    for model in models:
        named_model(model)
    if not models:
        if not {agent or task.agent for agent in agents for task in tasks.values()} <= NO_MODEL_AGENTS:
            raise UsageError("is missing: name at least one model", argument="models")
        models = (NO_MODEL_LABEL,)
    refs = tuple(TaskRef(id=name, digest=_digest(task)) for name, task in tasks.items())
    plan = BatchPlan(name=request.name, models=models, agents=tuple(dict.fromkeys(agents)), n=request.n, tasks=refs)
    if plan.size > TIMES:
        raise UsageError(f"that is {plan.size:,} rollouts, more than {TIMES:,}", argument="n")
    said = blake2b(plan.model_dump_json().encode(), digest_size=6).hexdigest()
    return (plan if plan.name else plan.model_copy(update={"name": f"batch-{said}"})), tasks


def _digest(task: RolloutRequest) -> str:
    said = json.dumps(task.model_dump(mode="json", exclude=set(SECRETS), exclude_unset=True), sort_keys=True)
    return blake2b(said.encode(), digest_size=8).hexdigest()


def _asked(cell: Cell, task: RolloutRequest, batch: str, request: BatchRequest) -> RolloutRequest:
    """The rollout that is asked for with one cell."""
    more: dict[str, object] = {
        "task_id": cell.task.id,
        "seed": None if task.seed is None else task.seed + cell.sample - 1,
    }
    more["group_id"] = task.group_id or f"{batch}/{cell.task.id}/{cell.model}/{cell.agent}"[:200].rstrip("/")
    if cell.agent:
        more["agent"] = cell.agent
    if cell.model != NO_MODEL_LABEL:
        more |= named_model(cell.model)
    if request.api_key.get_secret_value():
        more["api_key"] = request.api_key.get_secret_value()
    elif task.api_key.get_secret_value():
        more.pop("api_key", None)
    given = {name: getattr(task, name) for name in task.model_fields_set}
    return RolloutRequest.parsed({**given, **more})


def _no_script(turns: object) -> Endpoint:
    raise not_offered()
