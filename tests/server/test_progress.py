"""What callers of a server see while a box is being made ready: what is done, and not only that it takes a while."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.events import BoxOpened, Ended, Event, Progress, Queued, StageStarted
from rollcage.results.fold import Rollout
from rollcage.sandboxes.progress import SharedWork, listening, tell
from rollcage.types import Outcome, Stage
from support.served import Served, served, shell
from support.stories import log_of, rollout_log

ASKING = "base system: asking this machine's package sources"


def slow_apt(folder: Path) -> tuple[Path, dict[str, str]]:
    """An `apt-get` that waits until the file is there and fails then, and the environment in which it is found."""
    folder.mkdir()
    go = folder / "go"
    program = folder / "apt-get"
    program.write_text(f'#!/bin/sh\nuntil [ -e "{go}" ]; do sleep 0.1; done\necho "no sources" >&2\nexit 100\n')
    program.chmod(0o755)
    return go, {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


async def state_with_progress(server: Served, rollout_id: str) -> dict[str, object]:
    async with server.http() as http:
        with anyio.fail_after(120):
            while True:
                state = (await http.get(f"/rollouts/{rollout_id}")).json()
                if state["progress"] or state["status"] == "done":
                    return dict(state)
                await anyio.sleep(0.1)


async def test_whoever_waits_for_the_base_system_sees_what_is_done(tmp_path: Path) -> None:
    go, environment = slow_apt(tmp_path / "bin")
    async with served(tmp_path / "home", environment=environment) as server, server.client() as client:
        arguments: dict[str, Any] = shell("true", system="base")
        first, second = [(await client.start(**arguments)).rollout_id for _ in range(2)]
        for rollout_id in (first, second):  # the second waits for what the first began
            state = await state_with_progress(server, rollout_id)
            assert (state["stage"], state["progress"]) == ("provision", ASKING)
        go.touch()
        for rollout_id in (first, second):
            result = await client.wait(rollout_id)
            assert result.error_code == "machine_not_ready" and "no sources" in str(result.error)
            told = [entry.event async for entry in client.follow(rollout_id) if entry.event.kind == "progress"]
            assert Progress(stage=Stage.PROVISION, message=ASKING) in told
            assert (await client.state(rollout_id)).progress == ""
    assert ASKING in server.log.read_text()


def test_the_state_says_it_until_the_box_is_there() -> None:
    job = rollout_log()[0].event
    assert isinstance(job, Queued)
    events: list[Event] = [
        job,
        StageStarted(stage=Stage.PROVISION),
        Progress(stage=Stage.PROVISION, message="fetching"),
    ]
    box, end = BoxOpened(sandbox_id="b", backend="local"), Ended(outcome=Outcome.SETUP_FAILED)
    assert Rollout.fold(log_of(events)).progress == "fetching"
    assert Rollout.fold(log_of([*events, box])).progress == Rollout.fold(log_of([*events, end])).progress == ""


async def test_work_is_done_once_and_all_who_wait_are_told() -> None:
    work, told = SharedWork(), dict[str, list[str]](first=[], second=[])
    begun, waiting, done = anyio.Event(), anyio.Event(), list[str]()

    async def wait(name: str) -> None:
        with listening(told[name].append):
            if name == "second":
                await begun.wait()
                waiting.set()
            async with work.alone():
                if not done:
                    tell("one")
                    begun.set()
                    await waiting.wait()
                    await anyio.wait_all_tasks_blocked()
                    tell("two")
                    done.append(name)

    async with anyio.create_task_group() as tasks:
        for name in told:
            tasks.start_soon(wait, name)
    assert done == ["first"] and told == {"first": ["one", "two"], "second": ["one", "two"]}
    tell("nobody listens")


async def test_what_breaks_in_the_work_breaks_for_each_who_waited() -> None:
    work = SharedWork()
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            async with work.alone():
                raise ValueError("broken")
