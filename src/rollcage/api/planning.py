"""From what is to be evaluated, as it was asked for, to a plan and the job of each of its cells."""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr, TypeAdapter, ValidationError

from rollcage.endpoints import named_model, resolve
from rollcage.errors import UsageError
from rollcage.evaluation.batches import NO_MODEL_LABEL, BatchPlan, Cell, TaskRef
from rollcage.evaluation.rows import Price
from rollcage.jobs import NO_MODEL_AGENTS, job_of, needs_model, with_arguments
from rollcage.runner.batch import BatchLimits, CellJob, MakeJob
from rollcage.schema.request import SECRETS, RolloutRequest
from rollcage.settings import Settings
from rollcage.tasks import SourcedTask, TaskFile, open_source
from rollcage.types import NO_MODEL, Endpoint

if TYPE_CHECKING:
    from rollcage.simulators import ScriptedModel

_PRICES = TypeAdapter(dict[str, Price])
_OWN = ("agent", "endpoint", "base_url", "model", "instruction", "idempotency_key", "task_id")
"""Arguments that a batch sets itself, or that belong to its tasks."""


@dataclass(frozen=True)
class Evaluation:
    """What is to be evaluated, as it was asked for."""

    sources: tuple[str, ...] = ()
    """Task files, folders, datasets."""
    tasks: tuple[TaskFile, ...] = ()
    """Tasks that are there already, beside or instead of sources."""
    models: tuple[str, ...] = ()
    """`scripted`, `vllm`, `openai/gpt-4o-mini`, `http://host/v1#model`."""
    agents: tuple[str, ...] = ()
    """None: the agent that each task names."""
    n: int = 1
    name: str = ""
    """None given: one is made of what is asked, so that the same goes on where it was."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of a rollout that hold for all."""
    limits: BatchLimits = field(default_factory=BatchLimits)
    accept_changes: bool = False
    """Go on though tasks or arguments have changed; what changed is run again."""


class Sources:
    """The tasks of an evaluation, by their ids in the batch."""

    def __init__(self, asked: Evaluation) -> None:
        self.found: dict[str, SourcedTask] = {}
        self.skipped: dict[str, str] = {}
        for source in asked.sources:
            for task in open_source(source):
                self._add(task)
        for file in asked.tasks:
            from rollcage.tasks.sources import digest_of

            name = file.task.id or f"task-{len(self.found) + 1}"
            self._add(SourcedTask(id=name, digest=digest_of(file), where=str(file.path), file=file))
        if not self.found:
            why = next(iter(self.skipped.values()), "there is no task in it")
            remedy = "" if self.skipped else "name a task file or a folder of them"
            raise UsageError(why, argument="sources", remedy=remedy)

    def _add(self, task: SourcedTask) -> None:
        if (there := self.found.get(task.id)) and there.digest == task.digest and there.where == task.where:
            return  # the same source, named twice
        name, number = task.id, 2
        while name in self.found or name in self.skipped:
            name, number = f"{task.id}#{number}", number + 1
        if task.file is None or task.problem:
            self.skipped[name] = task.problem or "it cannot be read"
        else:
            self.found[name] = task

    @property
    def refs(self) -> tuple[TaskRef, ...]:
        """What the plan says of them."""
        return tuple(TaskRef(id=name, digest=task.digest[:16]) for name, task in self.found.items())


def plan_of(asked: Evaluation, sources: Sources) -> BatchPlan:
    """The plan; UsageError, before anything is started, where it makes no sense."""
    given = {name: value for name, value in asked.arguments.items() if value is not None}
    for name in set(given) & set(_OWN):
        raise UsageError("a batch sets this itself", argument=name)
    RolloutRequest.parsed({"instruction": "", **given})
    for model in asked.models:
        named_model(model)
    agents = asked.agents or ("",)
    models = tuple(dict.fromkeys(asked.models))
    if not models:
        used = {agent or task.file.agent.name for agent in agents for task in sources.found.values() if task.file}
        if not used <= NO_MODEL_AGENTS:
            raise UsageError("no model is named", argument="model", remedy="give -m scripted, -m vllm, -m openai/NAME")
        models = (NO_MODEL_LABEL,)
    plan = BatchPlan(
        name=asked.name,
        sources=tuple(str(Path(source).absolute()) for source in asked.sources),
        models=models,
        agents=tuple(dict.fromkeys(agents)),
        n=asked.n,
        tasks=sources.refs,
        skipped=sources.skipped,
        arguments=json.loads(json.dumps({name: given[name] for name in sorted(given) if name not in SECRETS})),
    )
    return plan if plan.name else plan.model_copy(update={"name": _default_name(plan)})


def _default_name(plan: BatchPlan) -> str:
    """The same for the same command, so that it goes on where it was."""
    said = plan.model_copy(update={"tasks": (), "skipped": {}}).model_dump_json()
    first = Path(plan.sources[0]).stem if plan.sources else "tasks"
    model = plan.models[0].rpartition("/")[2].rpartition("#")[2]
    return f"{first}-{model}-{blake2b(said.encode(), digest_size=3).hexdigest()}"[:100]


def prices_in(path: Path) -> dict[str, Price]:
    """The price list; empty where there is none. UsageError where it makes no sense."""
    if not path.exists():
        return {}
    try:
        return _PRICES.validate_python(tomllib.loads(path.read_text("utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        line = str(error).splitlines()[0]
        remedy = 'it holds tables such as ["openai/gpt-4o-mini"] with input and output'
        raise UsageError(f"{path}: {line}", remedy=remedy) from error


@asynccontextmanager
async def cell_jobs(asked: Evaluation, sources: Sources, settings: Settings) -> AsyncIterator[MakeJob]:
    """Makes the job of each cell, for as long as the block lasts: the scripted model lives in it."""
    async with AsyncExitStack() as stack:
        scripted: ScriptedModel | None = None
        if any(named_model(model).get("endpoint") == "scripted" for model in asked.models):
            from rollcage.simulators import ScriptedModel

            scripted = await stack.enter_async_context(ScriptedModel(keep_requests=0))

        def make(cell: Cell) -> CellJob:
            task = sources.found[cell.task.id]
            if task.file is None:
                raise UsageError(task.problem)
            file = with_arguments(task.file, _arguments(cell, asked))
            model = _model(file, cell, settings, scripted)
            release = (lambda: scripted.forget(model)) if scripted and model.kind == "scripted" else _nothing
            return CellJob(job_of(file, model), release)

        yield make


def _arguments(cell: Cell, asked: Evaluation) -> dict[str, Any]:
    """What is said over a task for one cell."""
    more: dict[str, Any] = dict(asked.arguments)
    if more.get("seed") is not None:
        more["seed"] += cell.sample - 1
    if cell.agent:
        more["agent"] = cell.agent
    if cell.model != NO_MODEL_LABEL:
        named = named_model(cell.model)
        if key := more.get("api_key"):
            named["api_key"] = key.get_secret_value() if isinstance(key, SecretStr) else key
        more |= named
    more.setdefault("task_id", cell.task.id[:200])
    more.setdefault("group_id", f"{asked.name}/{cell.task.id}/{cell.model}/{cell.agent}"[:200].rstrip("/"))
    return more


def _model(file: TaskFile, cell: Cell, settings: Settings, scripted: ScriptedModel | None) -> Endpoint:
    if cell.model == NO_MODEL_LABEL and not needs_model(file.agent.name, file.endpoint):
        return NO_MODEL
    return resolve(file.endpoint, settings, file.task, scripted=scripted.endpoint if scripted else None)


def _nothing() -> None:
    pass
