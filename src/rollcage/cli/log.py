"""`rollcage prune`, `pin`, `vacuum`, `backup` and `import`: the log over months. Heavy parts are imported when used."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollcage.cli import codes
from rollcage.cli.completion import rollout_ids
from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from rollcage.settings import Settings

IDS = click.argument("ids", nargs=-1, metavar="[ID]...", shell_complete=rollout_ids)
_AGES = {"m": 60, "h": 3600, "d": 86400, "w": 604800}
_SIZES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def age(text: str) -> float:
    """How long ago: `90m`, `12h`, `30d`, `8w`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip().lower())
    if not found:
        raise click.BadParameter(f"{text!r} is no age; it looks like 12h, 30d or 8w")
    return float(found[1]) * _AGES[found[2]]


def size(text: str) -> int:
    """How many bytes: `500M`, `20G`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgt]?)(?:i?b)?", text.strip().lower())
    if not found:
        raise click.BadParameter(f"{text!r} is no size; it looks like 500M or 20G")
    return int(float(found[1]) * _SIZES[found[2]])


def size_text(count: int) -> str:
    """A size as people say it."""
    for unit, one in (("GB", 1 << 30), ("MB", 1 << 20), ("kB", 1 << 10)):
        if count >= one:
            return f"{count / one:.1f} {unit}"
    return f"{count} bytes"


@click.command()
@click.option("--older-than", type=age, metavar="AGE", help="Those that ended longer ago than this: 12h, 30d, 8w.")
@click.option("--group", default="", metavar="ID", help="Those of one group or batch.")
@click.option("--max-size", type=size, metavar="SIZE", help="The oldest, until the log takes no more: 500M, 20G.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@JSON
def prune(older_than: float | None, group: str, max_size: int | None, dry_run: bool, as_json: bool) -> int:
    """Remove old rollouts and the kept work of their agents.

    Files that only their tasks brought go, too. Rollouts that are open or pinned stay. A server may go on meanwhile.
    The space is used again; `rollcage vacuum` gives it back to the disk.

    \b
    Examples:
      rollcage prune --older-than 30d
      rollcage prune --max-size 20G --dry-run
      rollcage prune --group step-12
    """
    from rollcage.cli.narrator import counted
    from rollcage.cli.output import environment, write_json
    from rollcage.store.retention import Prune
    from rollcage.store.retention import prune as remove

    settings = environment()
    what = Prune(older_than_s=older_than, group=group, max_bytes=max_size)
    done = remove(_log(settings), settings.work_dir, what, trees=settings.trees_dir, dry_run=dry_run)
    if as_json:
        write_json({**done.model_dump(mode="json"), "dry_run": dry_run})
        return codes.OK
    kept = f"; {done.kept_pinned} pinned ones stay" if done.kept_pinned else ""
    if dry_run:
        print(f"{counted(len(done.rollouts), 'rollout')} would go{kept}")
    else:
        work = (
            f" and {counted(done.work_files, 'archive')} of work ({size_text(done.work_bytes)})"
            if done.work_files
            else ""
        )
        if done.tree_files:
            work += f" and {counted(done.tree_files, 'archive')} of tasks' files ({size_text(done.tree_bytes)})"
        gone = counted(len(done.rollouts), "rollout")
        print(f"{gone} gone, with {counted(done.entries, 'entry')}{work}{kept}")
    return codes.OK


@click.command()
@IDS
@click.option("--remove", is_flag=True, help="Unpin them.")
@JSON
def pin(ids: tuple[str, ...], remove: bool, as_json: bool) -> int:
    """Keep rollouts, whatever is pruned; list those that are kept.

    \b
    Examples:
      rollcage pin 0a1b
      rollcage pin 0a1b --remove
    """
    from rollcage.cli.output import environment, write_json
    from rollcage.store import retention

    settings = environment()
    if ids:
        retention.pin(_log(settings), _found(settings, ids), keep=not remove)
    kept = retention.pinned(_log(settings))
    if as_json:
        write_json({"pinned": kept})
    else:
        print("\n".join(kept) if kept else "nothing is pinned")
    return codes.OK


@click.command()
@JSON
def vacuum(as_json: bool) -> int:
    """Give the space of what was pruned back to the disk.

    Writers wait meanwhile.

    \b
    Example:
      rollcage prune --older-than 30d && rollcage vacuum
    """
    from rollcage.cli.output import environment, write_json
    from rollcage.store import retention

    before, after = retention.vacuum(_log(environment()))
    if as_json:
        write_json({"bytes_before": before, "bytes": after})
    else:
        print(f"{size_text(before)} before, {size_text(after)} now")
    return codes.OK


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@IDS
@JSON
def backup(folder: Path, ids: tuple[str, ...], as_json: bool) -> int:
    """Copy the log into a new state folder, while servers write.

    With IDs, only these rollouts. The copy is of one moment and a whole state folder: ROLLCAGE_HOME=FOLDER reads it,
    `rollcage import FOLDER` brings it into another.

    \b
    Examples:
      rollcage backup /backups/monday
      rollcage backup to-share 0a1b 77fe
    """
    import anyio

    from rollcage.cli.narrator import counted
    from rollcage.cli.output import environment, write_json
    from rollcage.store import Store, copying

    settings = environment()
    if not ids:
        done = copying.backup(_log(settings), settings.work_dir, folder)
    else:

        async def make() -> None:
            async with Store.open(folder / copying.LOG):
                pass

        _log(settings)
        wanted = _found(settings, ids)
        anyio.run(make)
        done = copying.copy_rollouts(settings.home, folder, wanted)
    if as_json:
        write_json({**done.model_dump(mode="json"), "folder": str(folder)})
    else:
        rollouts, work = counted(len(done.rollouts), "rollout"), counted(done.work_files, "archive")
        print(f"{rollouts} and {work} of work are in {folder}{_left(done.open)}")
    return codes.OK


@click.command("import")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@JSON
def import_(folder: Path, as_json: bool) -> int:
    """Bring the rollouts of another state folder into this log.

    Whole, with the work of their agents, where they have ended. Those that are here already are left as they are.

    \b
    Example:
      rollcage import /backups/monday
    """
    import anyio

    from rollcage.cli.narrator import counted
    from rollcage.cli.output import environment, write_json
    from rollcage.store import Store, copying

    settings = environment()

    async def make() -> None:
        async with Store.open(settings.log_path):
            pass

    anyio.run(make)
    done = copying.copy_rollouts(folder, settings.home)
    if as_json:
        write_json(done)
    else:
        there = f", {len(done.present):,} here already" if done.present else ""
        print(f"{counted(len(done.rollouts), 'rollout')} came in{there}{_left(done.open)}")
    return codes.OK


def _left(rollouts: tuple[str, ...]) -> str:
    return f"; {len(rollouts)} have not ended and were left" if rollouts else ""


def _log(settings: Settings) -> Path:
    """The log, brought to the newest schema where it can be written."""
    import anyio

    from rollcage.wiring import opened_log

    async def look() -> None:
        async with opened_log(settings):
            pass

    anyio.run(look)
    return settings.log_path


def _found(settings: Settings, prefixes: tuple[str, ...]) -> list[str]:
    import anyio

    from rollcage.wiring import opened_log

    async def find() -> list[str]:
        async with opened_log(settings) as store:
            return [await store.find(prefix) for prefix in prefixes]

    return anyio.run(find)
