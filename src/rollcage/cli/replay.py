"""`rollcage replay` and `fork`: recorded answers in a new box, and live continuations from one point of a rollout."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.completion import rollout_ids
from rollcage.cli.options import JSON, ROLLOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollcage.results.fold import Rollout
    from rollcage.runner.reverify import Correction
    from rollcage.settings import Settings
    from rollcage.store import Store
    from rollcage.types import Endpoint, JsonObject, Task


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID...]", shell_complete=rollout_ids)
@click.option("--batch", default="", metavar="NAME", help="Every rollout of this batch that was scored.")
@click.option(
    "--on-difference",
    type=click.Choice(["stop", "position", "live"]),
    default="stop",
    show_default=True,
    help="Where the agent asks something else: stop, answer by position, or hand over to --model.",
)
@click.option("-m", "--model", default="", metavar="MODEL", help="The live model to hand over to, as for eval.")
@click.option(
    "--task",
    "sources",
    multiple=True,
    metavar="SOURCE",
    help="Tasks as they are now (verifier, image), for the rollouts of these ids; else each is as it was.",
)
@click.option(
    "--expect",
    type=click.Choice(["same-reward", "same-requests"]),
    multiple=True,
    help="Exit with 1 unless every replay holds to it.",
)
@click.option("--at-once", type=click.IntRange(1, 256), default=4, show_default=True, help="Rollouts at a time.")
@JSON
def replay(ids: tuple[str, ...], batch: str, expect: tuple[str, ...], as_json: bool, **how: Any) -> int:
    """Run rollouts again with recorded answers.

    Each in a new box. No model is needed.
    Where the agent asks something else than it did, it says at which turn and shows the difference; dates, durations
    and ids are none. This is how a new agent version, a verifier or an image is tried on yesterday's rollouts.

    \b
    Examples:
      rollcage replay 0a1b
      rollcage replay --batch nightly --expect same-reward
      rollcage replay --batch nightly --task tasks/ --expect same-reward
    """
    if bool(ids) == bool(batch):
        raise click.UsageError("name rollouts, or a --batch")
    import anyio

    from rollcage.cli.output import environment

    chosen = (ids, batch, expect, as_json)
    return anyio.run(_replay, environment(), chosen, how, backend_options={"use_uvloop": True})


@click.command()
@ROLLOUT
@click.option(
    "--at", type=click.IntRange(1), required=True, metavar="TURN", help="The first turn, from 1, that is live."
)
@click.option(
    "-n", "samples", type=click.IntRange(1, 256), default=1, show_default=True, help="How many continuations."
)
@click.option(
    "-m", "--model", required=True, metavar="MODEL", help="The model that goes on: vllm, openai/gpt-4o-mini, ..."
)
@click.option(
    "--edit", type=click.File("r", "utf-8"), metavar="FILE", help="The answer of that turn, instead of its own."
)
@click.option(
    "--on-difference",
    type=click.Choice(["stop", "position"]),
    default="stop",
    show_default=True,
    help="Where the agent asks something else before that turn: stop, or answer by position.",
)
@click.option("--at-once", type=click.IntRange(1, 256), default=4, show_default=True, help="Rollouts at a time.")
@JSON
def fork(rollout_id: str, at: int, samples: int, edit: Any, as_json: bool, **how: Any) -> int:
    """Go on live from a turn of a rollout.

    The turns before it are replayed; -n continuations.
    With --edit, the answer of that turn is the file's: a JSON message (content, tool_calls), or plain text.
    Where the agent asks something else before that turn, it is said; by default that one is stopped.

    \b
    Example:
      rollcage fork 0a1b --at 3 -n 8 -m vllm
    """
    import anyio

    from rollcage.cli.output import environment

    message = None if edit is None else _message(edit.read())
    chosen = (rollout_id, at, samples, message, as_json)
    return anyio.run(_fork, environment(), chosen, how, backend_options={"use_uvloop": True})


def _message(text: str) -> JsonObject:
    import json

    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"content": text}


async def _live(named: str, settings: Settings, task: Task, stack: AsyncExitStack) -> Endpoint | None:
    from rollcage.endpoints import EndpointRequest, named_model, opened

    if not named:
        return None
    request = EndpointRequest.model_validate(named_model(named))
    return await stack.enter_async_context(opened(request, settings, task))


async def _replay(settings: Settings, chosen: tuple[Any, ...], how: dict[str, Any]) -> int:
    import anyio

    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.output import write_json
    from rollcage.errors import UsageError
    from rollcage.runner.batch import batch_view
    from rollcage.runner.replay import ReplayReport, replay
    from rollcage.wiring import opened_log, opened_runner

    ids, batch, expect, as_json = chosen
    found: dict[str, ReplayReport] = {}

    async def work() -> int:
        async with opened_log(settings) as store, opened_runner(settings, store, at_once=how["at_once"]) as runner:
            names = [await store.find(prefix) for prefix in ids]
            if batch:
                names = [row.rollout_id for row in (await batch_view(store, batch)).current if row.score is not None]
                if not names:
                    raise UsageError(f"no rollout of {batch} was scored: there is nothing to replay", argument="batch")
            corrections = await _corrections(store, how["sources"], names)
            limiter = anyio.CapacityLimiter(how["at_once"])

            async def one(name: str) -> None:
                async with limiter, AsyncExitStack() as stack:
                    original = await store.rollout(name)
                    live = await _live(how["model"], settings, original.job.task, stack)
                    changes = {"on_difference": how["on_difference"], "live": live}
                    _, found[name] = await replay(runner, original, correction=corrections.get(name), **changes)

            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(one, name)
        reports = [found[name] for name in names]
        write_json([each.model_dump(mode="json") for each in reports]) if as_json else _show(reports)
        good = all(
            ("same-reward" not in expect or each.same_reward) and ("same-requests" not in expect or each.same_requests)
            for each in reports
        )
        return codes.OK if good else codes.BROKEN

    return await stoppable(work)


async def _corrections(store: Store, sources: Sequence[str], names: Sequence[str]) -> dict[str, Correction]:
    """By rollout, its task as these sources have it now: the one of its id, or the only one there is."""
    from rollcage.cli.reverify import correction_of
    from rollcage.errors import UsageError
    from rollcage.tasks import open_source

    tasks = {task.id: task for source in sources for task in open_source(source)}
    ids = {name: (await store.summary(name)).task_id for name in names} if tasks else {}
    alone = next(iter(tasks)) if len(tasks) == len(set(ids.values())) == 1 else ""
    found = {name: tasks[each if each in tasks else alone] for name, each in ids.items() if each in tasks or alone}
    if sources and not found:
        missing = ", ".join(sorted(set(ids.values())))
        raise UsageError(f"there is no task {missing} in {', '.join(sources)}", argument="task")
    for task in found.values():
        if task.file is None or task.problem:
            raise UsageError(task.problem or f"{task.where} cannot be read", argument="task")
    return {name: correction_of(task.file) for name, task in found.items() if task.file}


def _show(reports: list[Any]) -> None:
    from rollcage.cli.text import one_line

    for each in reports:
        earned = f"reward {each.reward_before} -> {each.reward}"
        if each.same_reward:
            earned = f"the same reward {each.reward}"
        calls = f"{each.same} of {each.requests} requests the same"
        if each.alike:
            calls += f", {each.alike} but for times and ids"
        if each.outcome != each.outcome_before:
            earned += f", {each.outcome_before} -> {each.outcome}"
        print(f"{each.original} replayed as {each.replay}: {earned}, {calls}")
        for odd in each.differences:
            print(f"  turn {odd.turn}: {one_line(odd.what, 400)}")


async def _fork(settings: Settings, chosen: tuple[Any, ...], how: dict[str, Any]) -> int:
    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.output import write_json
    from rollcage.cli.text import one_line
    from rollcage.results.result import result_of
    from rollcage.runner.replay import fork, report_of
    from rollcage.wiring import opened_log, opened_runner

    prefix, at, samples, edit, as_json = chosen

    async def work() -> int:
        async with (
            opened_log(settings) as store,
            opened_runner(settings, store, at_once=how["at_once"]) as runner,
            AsyncExitStack() as stack,
        ):
            original = await store.rollout(await store.find(prefix))
            live = await _live(how["model"], settings, original.job.task, stack)
            assert live is not None
            changes = {"edit": edit, "on_difference": how["on_difference"]}
            rollouts: list[Rollout] = await fork(runner, original, at=at, live=live, n=samples, **changes)
        odds = {each.id: report_of(original, each).differences for each in rollouts}
        if as_json:
            write_json([result_of(each).model_dump(mode="json") for each in rollouts])
        else:
            print(f"{original.id} at turn {at} (reward {original.reward}):")
            for each in rollouts:
                print(f"  {each.id}  {each.outcome}  reward {each.reward}  {len(each.turns)} turns")
                for odd in odds[each.id]:
                    print(f"    turn {odd.turn}: {one_line(odd.what, 400)}")
        good = all(each.reward is not None and not odds[each.id] for each in rollouts)
        return codes.OK if good else codes.BROKEN

    return await stoppable(work)
