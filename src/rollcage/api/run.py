"""The Python face: `run` and `arun` run a rollout, `run_group` and `arun_group` n of a task, `open_runner` many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from anyio import CancelScope

from rollcage.errors import UsageError
from rollcage.jobs import job_of, opened_model, with_arguments
from rollcage.results.fold import Rollout
from rollcage.schema.arguments import RolloutArguments
from rollcage.schema.request import RolloutRequest
from rollcage.settings import Settings
from rollcage.tasks import TaskFile
from rollcage.tasks import load as load_task
from rollcage.types import Job, Task
from rollcage.wiring import AT_ONCE, MANY, opened_runner, ungrouped

if TYPE_CHECKING:
    from rollcage.api.evaluate import Batch, Evaluating
    from rollcage.cluster import Cluster
    from rollcage.runner import Runner
    from rollcage.store import Store

T = TypeVar("T")
TaskSet = Sequence["str | Task | TaskFile | Path"]
"""Sources of tasks, and tasks."""
Work = str | Task | TaskFile | Path
"""What to do: an instruction, a task, or the path of a task file or folder."""


def run(
    task: Work,
    *,
    settings: Settings | None = None,
    **arguments: Unpack[RolloutArguments],
) -> Rollout:
    """Run one rollout to its end; `arun` says what the arguments are. Works in a notebook, too."""

    async def work() -> Rollout:
        return await arun(task, settings=settings, **arguments)

    return _blocking(work)


def _blocking(work: Callable[[], Awaitable[T]]) -> T:
    import anyio
    from anyio.from_thread import start_blocking_portal

    options = {"use_uvloop": True}
    if not _in_a_loop():
        return anyio.run(work, backend_options=options)
    # This thread's loop belongs to somebody else (a notebook); ours gets a thread of its own.
    with start_blocking_portal(backend_options=options) as portal:
        return portal.call(work)


async def arun(
    task: Work,
    *,
    runner: Runner | None = None,
    settings: Settings | None = None,
    **arguments: Unpack[RolloutArguments],
) -> Rollout:
    """Run one rollout to its end and give it back, whatever its outcome; UsageError where it makes no sense.

    `task`: an instruction, a `Task`, what `load` gave, or the path of a task file or folder (a text is one that names a
    folder with a task in it, or is one word and ends in `.toml` or `.json`).
    `runner`: one that `open_runner` gave, where many rollouts share it; else this opens one on your log.
    `settings`: instead of what the environment says.
    `arguments`: those of `RolloutRequest`, by the names they have over HTTP and on the command line; they win over what
    the task says, and setup and verify commands come after the task's own.
    A call that is cancelled aborts its rollout.
    """
    async with _ready(task, runner, settings, arguments) as (running, job):
        with CancelScope(shield=True):  # a call that is cancelled here would not know what it has started
            rollout_id = await running.start(job)
        try:
            return await running.wait(rollout_id)
        except BaseException:
            await _abandon(running, [rollout_id])
            raise


async def arun_group(
    task: Work,
    n: int,
    *,
    min_usable: int = 0,
    runner: Runner | None = None,
    settings: Settings | None = None,
    **arguments: Unpack[RolloutArguments],
) -> list[Rollout]:
    """Run n rollouts of one task to their ends, as `arun` runs one; all of them, in the order of their numbers.

    `min_usable`: when so many are scored and have tokens to train on, the rest is stopped. A `seed` becomes n seeds
    that follow from it; without one each rollout is left to the engine. A call that is cancelled aborts them all.
    """
    async with _ready(task, runner, settings, arguments) as (running, job):
        with CancelScope(shield=True):
            group = await running.groups.start(job, n, min_usable=min_usable)
        ids = [member.rollout_id for member in group.rollouts]
        try:
            await running.groups.wait([group.group_id])
            return [await running.wait(rollout_id) for rollout_id in ids]
        except BaseException:
            await _abandon(running, ids)
            raise


async def _abandon(running: Runner, rollout_ids: Sequence[str]) -> None:
    """Whoever stops waiting wants no more of them, and their model is gone after this."""
    with CancelScope(shield=True):
        for rollout_id in rollout_ids:
            await running.abort(rollout_id, "nobody waits for it any more")
        for rollout_id in rollout_ids:
            await running.over(rollout_id)


def run_group(
    task: Work,
    n: int,
    *,
    min_usable: int = 0,
    settings: Settings | None = None,
    **arguments: Unpack[RolloutArguments],
) -> list[Rollout]:
    """Run n rollouts of one task to their ends; `arun_group` says what the arguments are. Works in a notebook, too."""

    async def work() -> list[Rollout]:
        return await arun_group(task, n, min_usable=min_usable, settings=settings, **arguments)

    return _blocking(work)


@asynccontextmanager
async def _ready(
    task: Work, runner: Runner | None, settings: Settings | None, arguments: RolloutArguments
) -> AsyncIterator[tuple[Runner, Job]]:
    """A runner, and the job that the arguments come to."""
    settings = settings or Settings.from_environ()
    if arguments.get("idempotency_key"):
        raise UsageError("only a server knows which starts were made before", argument="idempotency_key")
    file = read(task)
    request = RolloutRequest.parsed({"instruction": file.task.instruction, **arguments})
    given = {name: getattr(request, name) for name in arguments if name in request.model_fields_set}
    asked = with_arguments(file, given)
    shared = nullcontext(runner) if runner else open_runner(settings=settings)
    # The endpoint comes first: where it makes no sense, nothing has been started or written.
    async with opened_model(asked, settings) as model, shared as running:
        yield running, job_of(asked, model)


@asynccontextmanager
async def open_runner(
    *,
    settings: Settings | None = None,
    store: Store | None = None,
    at_once: int | None = None,
    warm: int = 0,
    cluster: Cluster | None = None,
) -> AsyncIterator[Runner]:
    """A runner for many rollouts, with everything they need. At the end of the block it stops what still runs.

    `store`: the log to write to; else yours, which `rollcage ls` shows. `at_once`: how many run at a time, the others
    wait; 8, or as many as a cluster has places. `warm`: so many boxes are kept open ahead, with the agent started in
    them. `cluster`: a Ray cluster whose nodes run the rollouts.
    """
    from rollcage.store import Store

    settings = settings or Settings.from_environ()
    with ungrouped():
        async with AsyncExitStack() as stack:
            if store is None:
                store = await stack.enter_async_context(Store.open(settings.log_path))
            yield await stack.enter_async_context(
                opened_runner(settings, store, warm=warm, at_once=at_once, cluster=cluster)
            )


def aeval(
    tasks: Work | TaskSet,
    models: str | Sequence[str] = (),
    *,
    agents: str | Sequence[str] = (),
    n: int = 1,
    at_once: int | None = None,
    name: str = "",
    retry: Literal["", "broken", "infrastructure"] = "",
    accept_changes: bool = False,
    max_tokens: int = 0,
    max_time_s: float | None = None,
    budget: float | None = None,
    runner: Runner | None = None,
    store: Store | None = None,
    settings: Settings | None = None,
    cluster: Cluster | None = None,
    **arguments: Unpack[RolloutArguments],
) -> Evaluating:
    """Evaluate: every task x model x agent, `n` times each. `await` gives the `Batch`; `async for` each row as it ends.

    `tasks`: sources as `rollcage eval` takes them (a task file, a folder, a dataset), tasks, or several of both.
    `models`: `scripted`, `vllm`, `openai/gpt-4o-mini`, `http://host/v1#model`. `agents`: else each task's own.
    The same call goes on where it was: what has a result is not run again. `retry`: see `rollcage eval --retry`.
    `budget`: in the currency of `prices.toml`. `runner` and `store`: what `open_runner` gave, and its log. `at_once`
    and `cluster`: as for `open_runner`.
    """
    from rollcage.api.evaluate import Evaluating
    from rollcage.api.planning import Evaluation, prices_in
    from rollcage.runner.batch import BatchLimits

    if (runner is None) != (store is None):
        raise UsageError("a runner and its log go together", argument="runner", remedy="give both, or neither")
    settings = settings or Settings.from_environ()
    several: Sequence[Any] = [tasks] if isinstance(tasks, str | Path | Task | TaskFile) else list(tasks)
    asked = Evaluation(
        sources=tuple(str(each) for each in several if isinstance(each, str | Path)),
        tasks=tuple(read(each) for each in several if not isinstance(each, str | Path)),
        models=(models,) if isinstance(models, str) else tuple(models),
        agents=(agents,) if isinstance(agents, str) else tuple(agents),
        n=n,
        name=name,
        arguments=dict(arguments),
        limits=BatchLimits(
            at_once=at_once or (MANY if cluster else AT_ONCE),
            max_tokens=max_tokens,
            max_time_s=max_time_s,
            budget=budget,
            prices=prices_in(settings.prices_path),
            retry=retry,
        ),
        accept_changes=accept_changes,
    )
    return Evaluating(asked, settings, runner, store, cluster)


def eval(tasks: Work | TaskSet, models: str | Sequence[str] = (), **more: Any) -> Batch:
    """Evaluate to the end; `aeval` says what the arguments are. Works in a notebook, too."""

    async def work() -> Batch:
        return await aeval(tasks, models, **more)

    return _blocking(work)


def load(path: str | Path) -> Any:
    """A file, by the ending of its name: a task (`.toml`, `.json`, a folder) as a `TaskFile`; what `rollcage export`
    wrote (`.parquet`, `.jsonl`) as a list, of `Sequence`s where it holds sequences.
    """
    if Path(path).suffix not in (".parquet", ".jsonl"):
        return load_task(path)
    from rollcage.trajectory import export

    return export.load(path)


def read(task: Work) -> TaskFile:
    """What is to be done, and what its file says beside it."""
    if isinstance(task, TaskFile):
        return task
    if isinstance(task, Task):
        return TaskFile(path=Path(), task=task)
    if isinstance(task, Path) or (task.endswith((".toml", ".json")) and len(task.split()) == 1) or _is_folder(task):
        return load_task(task)
    return TaskFile(path=Path(), task=Task(instruction=task))


def _is_folder(text: str) -> bool:
    """Whether a text is the path of a task folder."""
    from rollcage.tasks.harbor import is_folder_task

    try:
        return bool(text) and is_folder_task(Path(text))
    except OSError:
        # Longer than any name: an instruction.
        return False


def _in_a_loop() -> bool:
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
