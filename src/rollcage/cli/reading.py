"""`rollcage ls` and `show`: read the log. Heavy parts are imported when used."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON, ROLLOUT

if TYPE_CHECKING:
    from rollcage.settings import Settings


@click.command()
@click.option("--limit", "-n", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="How many.")
@click.option("--open", "open_only", is_flag=True, help="Only those that have not ended.")
@JSON
def ls(limit: int, open_only: bool, as_json: bool) -> int:
    """List rollouts and their rewards, newest first.

    Narrow terminals get fewer columns.

    \b
    Examples:
      rollcage ls
      rollcage ls -n 1000 --json | jq -r '.[] | select(.standing == "broken") | .id'
    """
    import anyio

    from rollcage.cli.output import environment

    return anyio.run(_ls, environment(), limit, open_only, as_json)


@click.command()
@ROLLOUT
@click.option("--events", is_flag=True, help="Every entry of its log.")
@click.option("--turns", is_flag=True, help="What the model answered, turn by turn.")
@click.option("--prompt", type=click.IntRange(1), metavar="TURN", help="What the model was asked in a turn, from 1.")
@click.option("--patch", is_flag=True, help="What the agent changed, as `git apply` takes it.")
@JSON
def show(rollout_id: str, as_json: bool, prompt: int | None, **parts: bool) -> int:
    """Show one rollout. The first characters of its ID are enough.

    \b
    Examples:
      rollcage show 0a1b
      rollcage show 0a1b --patch | git apply
      rollcage show 0a1b --json | jq .reward
    """
    chosen = [name for name, given in {**parts, "prompt": prompt}.items() if given]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} and --{chosen[1]} do not go together")
    import anyio

    from rollcage.cli.output import environment

    if chosen and chosen[0] in ("patch", "prompt"):
        return anyio.run(_show_one, environment(), rollout_id, prompt, as_json)
    return anyio.run(_show, environment(), rollout_id, chosen[0] if chosen else "", as_json)


async def _ls(settings: Settings, limit: int, open_only: bool, as_json: bool) -> int:
    from rollcage.cli.output import program, write_json
    from rollcage.cli.screen import screen
    from rollcage.cli.summary import list_table
    from rollcage.types import Standing
    from rollcage.wiring import opened_log

    rows = []
    if settings.log_path.exists():
        async with opened_log(settings) as store:
            rows = await store.list(limit=limit, open_only=open_only)
    if as_json:
        write_json(
            [{**row.model_dump(mode="json"), "standing": Standing.of(row.outcome, row.reward).value} for row in rows]
        )
    elif rows:
        console = screen(settings)
        console.put([list_table(rows, time.time(), console.width)])
    else:
        what = "no rollout is running" if open_only else "no rollouts yet"
        print(f"{what} in {settings.home}; try: {program()} demo")
    return codes.OK


async def _show_one(settings: Settings, prefix: str, turn: int | None, as_json: bool) -> int:
    """The request of a turn; without one, the agent's work as a patch."""
    import sys

    from rollcage.cli.output import write_json
    from rollcage.cli.screen import marks_for, screen
    from rollcage.cli.summary import prompt_details
    from rollcage.cli.text import clean
    from rollcage.errors import UsageError
    from rollcage.wiring import opened_log

    async with opened_log(settings) as store:
        rollout = await store.rollout(await store.find(prefix))
    if turn is None:
        if rollout.patch is None:
            raise UsageError(f"{rollout.id} has no patch", remedy="its work was not collected: see rollcage show")
        if rollout.patch_truncated:
            click.echo("rollcage: the patch was longer than is kept; it ends early", err=True)
        if as_json:
            write_json({"patch": rollout.patch, "patch_truncated": rollout.patch_truncated})
        else:
            # Whole where a program reads it; what steers a terminal does not reach one.
            sys.stdout.write(clean(rollout.patch) if sys.stdout.isatty() else rollout.patch)
        return codes.OK
    found = next((each for each in rollout.turns if each.index == turn - 1), None)
    if found is None:
        raise UsageError(f"--prompt {turn}: there is no such turn; it has {len(rollout.turns)}")
    if as_json:
        write_json(found.request)
    else:
        console = screen(settings)
        console.put(prompt_details(found, marks_for(console)))
    return codes.OK


async def _show(settings: Settings, prefix: str, part: str, as_json: bool) -> int:
    from rollcage.cli.output import program, write_json
    from rollcage.cli.screen import marks_for, screen
    from rollcage.cli.summary import event_lines, summary_of, turn_details
    from rollcage.results.result import result_of
    from rollcage.wiring import opened_log

    async with opened_log(settings) as store:
        rollout_id = await store.find(prefix)
        rollout = await store.rollout(rollout_id)
        entries = await store.read(rollout_id) if part == "events" else []
    if as_json and part == "events":
        write_json([entry.model_dump(mode="json") for entry in entries])
    elif as_json:
        result = result_of(rollout)
        write_json([turn.model_dump(mode="json") for turn in result.proxy_turns] if part == "turns" else result)
    else:
        console = screen(settings)
        marks = marks_for(console)
        if part == "events":
            for line in event_lines(entries):
                console.print(line, soft_wrap=True)
        elif part == "turns":
            console.put(turn_details(rollout, marks))
        else:
            console.put(summary_of(rollout, marks, settings.log_path, program=program()))
    return codes.OK
