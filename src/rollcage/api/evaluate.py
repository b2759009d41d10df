"""Evaluation: a batch is planned, run or followed, and comes back as a `Batch`."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from rollcage.api.planning import Evaluation, Sources, cell_jobs, plan_of
from rollcage.errors import ModelUnreachable, UsageError
from rollcage.evaluation.batches import NO_MODEL_LABEL, BatchPlan, BatchReport, BatchView, Cell
from rollcage.evaluation.rows import BatchRow, Price
from rollcage.runner.batch import BatchLimits, BatchRun, MakeJob, batch_view, is_running, locked_or_followed
from rollcage.settings import Settings
from rollcage.store.batches import add_to_batch, batch_log
from rollcage.types import NO_MODEL, JsonObject

if TYPE_CHECKING:
    from rollcage.runner import Runner
    from rollcage.store import Store
    from rollcage.wiring import ClusterLink

Show = Callable[[BatchView, bool], Awaitable[None]]
"""Shown the batch now and then; whether this process runs it."""


class Batch:
    """An evaluated batch: what it came to, and its rollouts row by row."""

    def __init__(self, view: BatchView, *, running: bool = False, prices: Mapping[str, Price] | None = None) -> None:
        self.view = view
        self.report: BatchReport = view.report(running=running, prices=dict(prices or {}))

    @property
    def name(self) -> str:
        """Names it in the log."""
        return self.report.name

    @property
    def mean(self) -> float | None:
        """The mean reward of all that counts."""
        return self.report.overall.mean

    @property
    def rows(self) -> list[BatchRow]:
        """The latest rollout of each cell."""
        return self.view.current

    def to_dict(self) -> JsonObject:
        """As `rollcage report --json` writes it."""
        return self.report.model_dump(mode="json")

    def to_pandas(self) -> Any:
        """A data frame with one row per rollout."""
        try:
            import pandas as pd  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise UsageError("pandas is not installed", remedy="pip install pandas") from error
        return pd.DataFrame([row.to_dict() for row in self.rows])

    def table(self) -> str:
        """What it came to, by model and by task, as Markdown."""
        from rollcage.evaluation.reports import markdown

        return markdown(self.report)

    def _repr_html_(self) -> str:
        from rollcage.evaluation.reports import html

        return html(self.report)

    def __repr__(self) -> str:
        """In one line."""
        overall = self.report.overall
        return f"<Batch {self.name} {self.report.status}, {overall.done} of {self.report.size}, mean {overall.mean}>"


@asynccontextmanager
async def open_batch(
    asked: Evaluation, settings: Settings, store: Store, runner: Runner
) -> AsyncIterator[tuple[BatchView, Callable[[Show | None], Awaitable[BatchView]]]]:
    """The batch as the log has it (planned now, where it is new), and what runs it, or follows whoever does."""
    sources = Sources(asked)
    plan = plan_of(asked, sources)
    async with cell_jobs(asked, sources, settings) as make:
        _check_possible(plan, make, runner)
        if not await batch_log(store, plan.name):  # a mistake leaves no batch behind
            await _check_models(plan.model_copy(update={"n": 1}).cells(), make, runner)
    plan = await _settled(asked, plan, store)
    asked = replace(asked, name=plan.name)
    view = await batch_view(store, plan.name)

    async def work(show: Show | None) -> BatchView:
        async def followed(seen: BatchView) -> None:
            if show:
                await show(seen, False)

        async with locked_or_followed(store, plan.name, followed) as over:
            if over is not None:
                return over
            current = await batch_view(store, plan.name)
            if not current.missing(asked.limits.retry):
                if current.status != "done" and not is_paused(current):
                    await add_to_batch(store, plan.name, "done")
                return await batch_view(store, plan.name)
            async with cell_jobs(asked, sources, settings) as make:
                await _check_models(current.missing(asked.limits.retry), make, runner)
                run = BatchRun(runner, store, current, make, asked.limits)
                async with anyio.create_task_group() as tasks:
                    await run.run(lambda: tasks.start_soon(_showing, run.view, show) if show else None)
                    tasks.cancel_scope.cancel()
                return run.view

    yield view, work


def is_paused(view: BatchView) -> bool:
    """Whether it waits for a model."""
    return bool(view.paused)


async def _showing(view: BatchView, show: Show) -> None:
    while True:
        began = time.monotonic()
        await show(view, True)
        # The statistics of ten thousand rollouts take a while: at most a tenth of the time is spent on them.
        await anyio.sleep(max(0.5, 9 * (time.monotonic() - began)))


def _check_possible(plan: BatchPlan, make: MakeJob, runner: Runner) -> None:
    """A model or an agent that can run none of the tasks is a mistake of whoever named it, and no result."""
    left: dict[tuple[str, str], UsageError | None] = {(m, a): None for m in plan.models for a in plan.agents}
    for cell in plan.model_copy(update={"n": 1}).cells():
        if (cell.model, cell.agent) not in left:
            continue
        try:
            made = make(cell)
            try:
                runner.check(made.job)
            finally:
                made.release()
            del left[cell.model, cell.agent]
        except UsageError as error:
            left[cell.model, cell.agent] = left[cell.model, cell.agent] or error
    for why in left.values():
        if why is not None:
            raise why


async def _check_models(cells: Iterable[Cell], make: MakeJob, runner: Runner) -> None:
    """Every model is asked once before anything is started: a wrong address or key is no result."""
    for cell in {cell.model: cell for cell in cells}.values():
        try:
            made = make(cell)
        except UsageError:
            continue  # listed when its turn comes
        try:
            if made.job.model.kind not in (NO_MODEL.kind, "scripted"):
                await runner.check_model(made.job.model)
        except ModelUnreachable as error:
            raise ModelUnreachable(f"{cell.model}: {error}") from error
        finally:
            made.release()


async def _settled(asked: Evaluation, plan: BatchPlan, store: Store) -> BatchPlan:
    """The plan as it is in the log from now on: that of the batch of this name, a changed one, or a new one."""
    name, number = plan.name, 2
    while await batch_log(store, name):
        view = await batch_view(store, name)
        if asked.name or view.missing(asked.limits.retry) or is_running(store, name):
            changes = view.plan.changes(plan)
            if changes and not asked.accept_changes:
                raise UsageError(
                    f"batch {name} was made of something else: " + "; ".join(changes[:5]),
                    remedy="give --accept-changes to run again what changed, or another --name",
                )
            plan = plan.model_copy(update={"name": name})
            if changes or view.plan.skipped != plan.skipped:
                await add_to_batch(store, name, "planned", plan.model_dump(mode="json"))
            return plan
        name, number = f"{plan.name}-{number}", number + 1
    plan = plan.model_copy(update={"name": name})
    await add_to_batch(store, name, "planned", plan.model_dump(mode="json"))
    return plan


async def resumed(
    name: str,
    store: Store,
    limits: BatchLimits,
    *,
    accept_changes: bool = False,
    more: Mapping[str, Any] | None = None,
) -> Evaluation:
    """What was asked for under a name, to go on with it. `more`: arguments given anew, such as a key."""
    plan = (await batch_view(store, name)).plan
    if not plan.sources:
        raise UsageError(f"the tasks of {name} came from no file", remedy="start it again from where it was started")
    return Evaluation(
        sources=plan.sources,
        models=() if plan.models == (NO_MODEL_LABEL,) else plan.models,
        agents=() if plan.agents == ("",) else plan.agents,
        n=plan.n,
        name=name,
        arguments={**plan.arguments, **(more or {})},
        limits=limits,
        accept_changes=accept_changes,
    )


class Evaluating:
    """What `aeval` gives: `await` it for the whole `Batch`, or `async for row in` it as rollouts end."""

    def __init__(
        self,
        asked: Evaluation,
        settings: Settings,
        runner: Runner | None,
        store: Store | None,
        cluster: ClusterLink | None = None,
    ) -> None:
        self._asked, self._settings, self._runner, self._store = asked, settings, runner, store
        self._cluster = cluster

    def __await__(self) -> Generator[Any, None, Batch]:
        return self._whole().__await__()

    async def _whole(self) -> Batch:
        async with self._opened() as (_, work):
            return Batch(await work(None), prices=self._asked.limits.prices)

    async def __aiter__(self) -> AsyncIterator[BatchRow]:
        send, receive = anyio.create_memory_object_stream[BatchRow](float("inf"))
        told: set[str] = set()

        async def show(view: BatchView, mine: bool) -> None:
            for row in view.current:
                if row.outcome is not None and not row.interrupted and row.rollout_id not in told:
                    told.add(row.rollout_id)
                    send.send_nowait(row)

        async def run(work: Callable[[Show | None], Awaitable[BatchView]]) -> None:
            async with send:
                await show(await work(show), True)

        async with self._opened() as (_, work), anyio.create_task_group() as tasks:
            tasks.start_soon(run, work)
            async with receive:
                async for row in receive:
                    yield row

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[tuple[BatchView, Callable[[Show | None], Awaitable[BatchView]]]]:
        from rollcage.store import Store
        from rollcage.wiring import opened_runner, ungrouped

        with ungrouped():
            async with AsyncExitStack() as stack:
                store, runner = self._store, self._runner
                if store is None:
                    store = await stack.enter_async_context(Store.open(self._settings.log_path))
                if runner is None:
                    at_once = self._asked.limits.at_once
                    opened = opened_runner(self._settings, store, at_once=at_once, cluster=self._cluster)
                    runner = await stack.enter_async_context(opened)
                yield await stack.enter_async_context(open_batch(self._asked, self._settings, store, runner))
