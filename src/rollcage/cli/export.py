"""`rollcage export`: rollouts of the log as files that trainers read. Heavy parts are imported when used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from rollcage.cli import codes
from rollcage.cli.completion import rollout_ids
from rollcage.cli.options import JSON, reward

if TYPE_CHECKING:
    from rollcage.settings import Settings
    from rollcage.store import Store, Summary
    from rollcage.trajectory.export import Format

FORMATS = ("sequences", "turns", "messages", "sft", "atif")
PAGE = 200


class ExportFilters(NamedTuple):
    """Which rollouts are wanted."""

    ids: tuple[str, ...]
    group: str
    batch: str
    task: str
    agent: str
    model: str
    min_reward: float | None


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=rollout_ids)
@click.option(
    "--format", "format_", type=click.Choice(FORMATS), default="sequences", show_default=True, help="What is written."
)
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), help="FILE.parquet or FILE.jsonl.")
@click.option("--group", default="", metavar="ID", help="Only the rollouts of one group.")
@click.option("--batch", default="", metavar="NAME", help="Only those of one batch.")
@click.option("--task", default="", metavar="ID", help="Only those of one task.")
@click.option("--agent", default="", metavar="NAME", help="Only those of one agent.")
@click.option("--model", default="", metavar="NAME", help="Only those of one model.")
@click.option("--min-reward", type=reward, metavar="REWARD", help="Only those that earned at least this.")
@click.option("--per-turn", is_flag=True, help="One sequence per turn, for trainers that take steps.")
@JSON
def export(
    ids: tuple[str, ...],
    format_: Format,
    output: Path | None,
    group: str,
    batch: str,
    task: str,
    agent: str,
    model: str,
    min_reward: float | None,
    per_turn: bool,
    as_json: bool,
) -> int:
    """Write rollouts to files that trainers read.

    All that have ended, oldest first, unless IDs or filters say which. Without -o, JSON lines go to stdout. An export
    that was interrupted goes on where it stopped when it is started again under the same name.

    \b
    Examples:
      rollcage export --group step-12 -o step-12.parquet
      rollcage export --batch nightly --format turns -o nightly.jsonl
      rollcage export 0a1b --format atif > trajectory.jsonl
      rollcage export --format sft --min-reward 1 -o good.parquet
    """
    if as_json and output is None:
        raise click.UsageError("--json tells what was written; it needs -o")
    if ids and (group or batch or task or agent or model or min_reward is not None):
        raise click.UsageError("IDs or filters say which rollouts are wanted, not both")
    import anyio

    from rollcage.cli.output import environment

    filters = ExportFilters(ids, group, batch, task, agent, model, min_reward)
    return anyio.run(_export, environment(), filters, format_, output, per_turn, as_json)


async def _export(
    settings: Settings, filters: ExportFilters, format_: Format, output: Path | None, per_turn: bool, as_json: bool
) -> int:
    from anyio import to_thread

    from rollcage.cli.output import write_json
    from rollcage.trajectory.export import open_export, rows_of
    from rollcage.wiring import opened_log

    rollouts = empty = rows = 0
    async with opened_log(settings) as store:
        chosen = await _chosen(store, filters)
        with open_export(output, format_) as file:
            for place, rollout_id in enumerate(chosen, 1):
                if rollout_id in file.done:
                    continue
                rollout = await store.rollout(rollout_id)
                made = await to_thread.run_sync(lambda: rows_of(rollout, format_, per_turn=per_turn))  # noqa: B023
                await to_thread.run_sync(file.add, rollout_id, made)
                rollouts, rows, empty = rollouts + 1, rows + len(made), empty + (not made)
                _progress(f"{place} of {len(chosen)} rollouts, {rows} rows")
            before = len(file.done)
    _progress("")
    if as_json:
        told = {"output": str(output), "format": format_, "rollouts": rollouts, "rows": rows, "empty": empty}
        write_json({**told, "written_before": before})
    elif output is not None:
        ending = f", {empty} had nothing for it" if empty else ""
        ending += f", {before} were there already" if before else ""
        print(f"{rows} {format_} of {rollouts} rollouts in {output}{ending}")
    return codes.OK


async def _chosen(store: Store, filters: ExportFilters) -> list[str]:
    """The rollouts that are wanted, oldest first."""
    from rollcage.errors import UsageError
    from rollcage.store import Query
    from rollcage.types import Stage

    if filters.ids:
        return list(dict.fromkeys([await store.find(prefix) for prefix in filters.ids]))
    asked = {"task_id": filters.task, "agent": filters.agent, "model": filters.model, "group_id": filters.group}
    query = Query(stages=(Stage.ENDED,), batch=filters.batch, **asked)
    found: list[Summary] = []
    before: int | None = None
    while True:
        page, before = await store.page(query, before=before, limit=PAGE)
        found += page
        if before is None:
            break
    if not found:
        named = {name: value for name, value in filters._asdict().items() if value and name != "min_reward"}
        words = ", ".join(f"{name} {value}" for name, value in named.items())
        raise UsageError(f"no rollout has ended{words and ' of ' + words}", remedy="rollcage ls shows what there is")
    least = filters.min_reward
    return [each.id for each in reversed(found) if least is None or (each.reward is not None and each.reward >= least)]


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
