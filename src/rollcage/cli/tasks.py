"""`rollcage tasks`: what a source of tasks holds, and whether each can run here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollcage.tasks import SourcedTask
    from rollcage.types import JsonObject


@click.group()
def tasks() -> None:
    """List tasks: of a file, a folder, a dataset.

    \b
    Example:
      rollcage tasks ls examples
    """


@tasks.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@JSON
def ls(sources: tuple[str, ...], as_json: bool) -> int:
    """List tasks: id, image, size, verifier; can each run here?

    A source is a task file, a folder of tasks, or a dataset on disk: .jsonl, parquet, Harbor's registry.json. Exit
    code 1: one of them cannot run here.

    \b
    Examples:
      rollcage tasks ls examples
      rollcage tasks ls DATASET.jsonl --json | jq -r '.[] | select(.runs) | .id'
    """
    from rollcage.cli.output import environment, write_json
    from rollcage.tasks import open_source
    from rollcage.wiring import provider

    images = provider(environment()).images
    rows = [_row(task, task.why_not(images.has)) for name in sources for task in open_source(name)]
    if as_json:
        write_json(rows)
    else:
        _print(rows)
    return codes.OK if all(row["runs"] for row in rows) else codes.BROKEN


def _print(rows: Sequence[JsonObject]) -> None:
    from rich.cells import cell_len

    from rollcage.cli.text import one_line

    table = [("ID", "IMAGE", "SIZE", "VERIFIER", "")]
    for row in rows:
        state = "runs" if row["runs"] else one_line(f"cannot run: {row['why_not']}", 300)
        size = f"{row['bytes'] / 1024:.1f} kB"
        table.append((one_line(row["id"], 200), row["image"] or "-", size, row["verifier"], state))
    widths = [max(cell_len(line[column]) for line in table) for column in range(4)]
    for line in table:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(line, widths, strict=False)]
        name, image, size, verifier, state = line
        print(f"{name}{gaps[0]}  {image}{gaps[1]}  {gaps[2]}{size}  {verifier}{gaps[3]}  {state}".rstrip())


def _row(task: SourcedTask, why_not: str) -> JsonObject:
    template = task.file.sandbox.template if task.file else ""
    return {
        "id": task.id,
        "digest": task.digest,
        "where": task.where,
        "image": template,
        "bytes": task.size,
        "verifier": task.verifier,
        "runs": not why_not,
        "why_not": why_not,
        "notices": list(task.file.notices) if task.file else [],
    }
