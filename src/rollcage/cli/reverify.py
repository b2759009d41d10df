"""`rollcage reverify`: judge the stored work of ended rollouts again. Heavy parts are imported when used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.completion import rollout_ids
from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollcage.results.fold import Rollout, Verdict
    from rollcage.runner import Runner
    from rollcage.runner.reverify import Correction
    from rollcage.settings import Settings
    from rollcage.store import Store
    from rollcage.tasks import TaskFile


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID...]", shell_complete=rollout_ids)
@click.option("--task", metavar="FILE", help="A corrected task file; else each is judged as it was.")
@click.option("--task-id", metavar="NAME", help="All rollouts of this task.")
@click.option("--outcome", metavar="NAME", help="All with this outcome: verify_failed, finished, ...")
@click.option("--model", metavar="NAME", help="All of this model.")
@click.option("--limit", type=click.IntRange(1, 1_000_000), default=1000, show_default=True, help="At most so many.")
@click.option("--at-once", type=click.IntRange(1, 256), default=4, show_default=True, help="Rollouts at a time.")
@JSON
def reverify(
    ids: tuple[str, ...], task: str | None, limit: int, at_once: int, as_json: bool, **wanted: str | None
) -> int:
    """Judge the stored work of rollouts again.

    Nothing is sampled again. Name rollouts, or say which: --task-id, --outcome and --model together. Setup runs anew in
    a new box, the stored work is put where it was, and the verifier runs. The new verdict stands beside the old one
    (`rollcage show`); the rollout's own reward stays what it was. Exit code 1: some could not be judged.

    \b
    Examples:
      rollcage reverify 0a1b
      rollcage reverify --task-id paginate --task paginate-mended.toml
      rollcage reverify --outcome verify_failed --json | jq '.[] | select(.reward != null)'
    """
    if bool(ids) == any(wanted.values()):
        raise click.UsageError("name rollouts, or say which by --task-id, --outcome or --model")
    import anyio

    from rollcage.cli.output import environment
    from rollcage.tasks import load

    file = load(task) if task else None
    how = (ids, {name: value for name, value in wanted.items() if value}, limit, at_once, as_json)
    return anyio.run(_reverify, environment(), file, how, backend_options={"use_uvloop": True})


async def _reverify(settings: Settings, file: Any, how: tuple[tuple[str, ...], dict[str, str], int, int, bool]) -> int:
    import sys

    from rollcage.cli.interrupts import stoppable
    from rollcage.cli.screen import progress, screen
    from rollcage.wiring import opened_log, opened_runner

    ids, wanted, limit, at_once, as_json = how
    correction = None if file is None else correction_of(file)
    tell = progress(screen(settings, file=sys.stderr), "reverify")

    async def work() -> int:
        async with opened_log(settings) as store, opened_runner(settings, store, at_once=at_once) as runner:
            chosen = [await store.find(prefix) for prefix in ids] or await _matching(store, wanted, limit)
            rows = await _all(runner, store, chosen, correction, tell)
        _show(settings, rows, as_json)
        return codes.OK if all(row["reward"] is not None for row in rows) else codes.BROKEN

    return await stoppable(work)


def correction_of(file: TaskFile) -> Correction:
    """What a task file says now; of the box only where it speaks of one."""
    from rollcage.runner.reverify import Correction

    return Correction(task=file.task, sandbox=file.sandbox if "sandbox" in file.model_fields_set else None)


async def _matching(store: Store, wanted: dict[str, str], limit: int) -> list[str]:
    """The rollouts that ended, newest first; those that judged another's work again are none."""
    from rollcage.errors import UsageError
    from rollcage.store import Query
    from rollcage.types import Outcome, Stage

    if "outcome" in wanted and wanted["outcome"] not in [*Outcome, "succeeded"]:
        raise UsageError(f"no outcome {wanted['outcome']!r}", remedy=f"known: {', '.join(Outcome)}")
    query = Query.model_validate({**wanted, "stages": (Stage.ENDED,)})
    found: list[str] = []
    before: int | None = None
    while len(found) < limit:
        rows, before = await store.page(query, before=before, limit=200)
        found += [row.id for row in rows if not row.reverifies]
        if before is None:
            break
    return found[:limit]


async def _all(
    runner: Runner,
    store: Store,
    ids: Sequence[str],
    correction: Correction | None,
    tell: Callable[[int, int, str], None],
) -> list[dict[str, Any]]:
    import anyio

    from rollcage.errors import UsageError
    from rollcage.runner.reverify import reverify

    rows: dict[str, dict[str, Any]] = {}

    async def one(rollout_id: str) -> None:
        rollout = await store.rollout(rollout_id)
        try:
            rows[rollout_id] = _row(rollout, await reverify(runner, rollout, correction))
        except UsageError as error:
            rows[rollout_id] = _row(rollout, None, str(error))
        tell(len(rows), len(ids), rollout_id)

    async with anyio.create_task_group() as tasks:
        for rollout_id in ids:
            tasks.start_soon(one, rollout_id)
    return [rows[rollout_id] for rollout_id in ids]


def _row(rollout: Rollout, verdict: Verdict | None, error: str = "") -> dict[str, Any]:
    score = verdict.reward if verdict else None
    return {
        "rollout_id": rollout.id,
        "task_id": rollout.job.task.id,
        "before": rollout.reward,
        "reward": score.total if score else None,
        "reward_parts": score.parts if score else {},
        "trust": score.trust if score else None,
        "changed": list(verdict.changed) if verdict else [],
        "verdict_id": verdict.rollout_id if verdict else None,
        "error": error or (verdict.error if verdict else None),
    }


def _show(settings: Settings, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from rollcage.cli.output import write_json
    from rollcage.cli.screen import screen
    from rollcage.cli.text import one_line, reward_text

    if as_json:
        write_json(list(rows))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in ("rollout", "task", "was", "is", "", "judged by"):
        table.add_column(name, no_wrap=name in ("rollout", "was", "is"))
    told = [["none" if row[name] is None else reward_text(row[name]) for name in ("before", "reward")] for row in rows]
    for row, (was, now) in zip(rows, told, strict=True):
        by = f"changed: {', '.join(row['changed'])}" if row["changed"] else "the same verifier"
        what = "same" if was == now else "changed"
        style = "red" if row["reward"] is None else "dim" if was == now else "yellow"
        last = one_line(row["error"], 300) if row["reward"] is None and row["error"] else by
        table.add_row(row["rollout_id"], one_line(row["task_id"], 32), was, now, Text(what, style=style), last)
    differ = sum(was != now for was, now in told)
    screen(settings).put([table, Text(f"{len(rows)} judged again, {differ} with another reward")])
