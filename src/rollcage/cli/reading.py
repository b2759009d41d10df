"""Reads the log from the command line."""

from __future__ import annotations

import time
from typing import Literal

import anyio

from rollcage.assembly import opened_log
from rollcage.cli import codes
from rollcage.cli.output import environment, program, write_json
from rollcage.cli.screen import marks_for, screen
from rollcage.cli.summary import event_lines, list_table, summary_of, turn_details
from rollcage.result import result_of
from rollcage.settings import Settings

Part = Literal["", "events", "turns"]


def ls(limit: int, open_only: bool, as_json: bool) -> int:
    """`rollcage ls`."""
    return anyio.run(_ls, environment(), limit, open_only, as_json)


def show(prefix: str, part: Part, as_json: bool) -> int:
    """`rollcage show`."""
    return anyio.run(_show, environment(), prefix, part, as_json)


async def _ls(settings: Settings, limit: int, open_only: bool, as_json: bool) -> int:
    rows = []
    if settings.log_path.exists():
        async with opened_log(settings) as store:
            rows = await store.list(limit=limit, open_only=open_only)
    if as_json:
        write_json([row.model_dump(mode="json") for row in rows])
    elif rows:
        screen(settings).put([list_table(rows, time.time())])
    else:
        what = "no rollout is running" if open_only else "no rollouts yet"
        print(f"{what} in {settings.home}; try: {program()} run examples/paginate.toml")
    return codes.SUCCEEDED


async def _show(settings: Settings, prefix: str, part: Part, as_json: bool) -> int:
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
    return codes.SUCCEEDED
