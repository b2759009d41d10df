"""`rollcage ls` on real terminals: the reward is there at every width, in the colour of the rollout's standing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollcage.events import Ended, Event, Queued, Scored, StageStarted
from rollcage.runner import Owners
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Outcome, Reward, Stage, Task
from support.commands import environ, rollcage
from support.terminal import terminal

JOB = Job(
    task=Task(id="a-task-with-a-rather-long-name", instruction="Do it."),
    model=Endpoint(base_url="http://h/v1", model="some-vendor/some-model-of-230B-instruct", kind="vllm"),
)
LOGS: dict[str, tuple[list[Event], str, str]] = {
    "a" * 16: ([Scored(reward=Reward(total=1.0)), Ended(outcome=Outcome.FINISHED)], "1.0", "passed"),
    "b" * 16: ([Scored(reward=Reward(total=0.8333)), Ended(outcome=Outcome.AGENT_TIMEOUT)], "0.8333", "partial"),
    "c" * 16: ([Scored(reward=Reward(total=0.0)), Ended(outcome=Outcome.FINISHED)], "0.0", "failed"),
    "d" * 16: ([Ended(outcome=Outcome.FINISHED)], "-", "unscored"),
    "e" * 16: ([Ended(outcome=Outcome.ENVIRONMENT_FAILED, error="x", error_code="y")], "-", "broken"),
    "f" * 16: ([StageStarted(stage=Stage.AGENT)], "-", "running"),
}
"""Rollouts: their events, the reward as it is shown, and their standing."""
COLOURS = {"passed": "32", "partial": "33", "failed": "31", "unscored": "2", "broken": "35", "running": "36"}


@asynccontextmanager
async def filled(home: Path) -> AsyncIterator[None]:
    """A log with all of them, whose owner lives as long as the block."""
    async with Store.open(home / "state" / "rollouts.db") as store:
        with Owners.beside(store).hold() as owner:
            for name, (events, _, _) in LOGS.items():
                for event in (Queued(job=JOB, owner=owner), *events):
                    await store.append(name, event)
            yield


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 200])
async def test_the_reward_is_shown_at_any_width(tmp_path: Path, columns: int) -> None:
    async with filled(tmp_path):
        with terminal([sys.executable, "-m", "rollcage", "ls"], environ(tmp_path), tmp_path, columns) as screen:
            text = screen.rest()
    head, *rows = text.rstrip("\n").split("\n")
    assert "reward" in head and all(len(line.rstrip()) <= columns for line in (head, *rows)), text
    assert len(rows) == len(LOGS)
    for name, (_, reward, _) in LOGS.items():
        [row] = [row for row in rows if row.startswith(name[:8])]
        assert re.match(rf"{name[0]}+ +{re.escape(reward)}( |$)", row), row
    assert ("model" in head) is (columns == 200)


async def test_the_colour_is_the_one_of_the_standing(tmp_path: Path) -> None:
    async with filled(tmp_path):
        with terminal([sys.executable, "-m", "rollcage", "ls"], environ(tmp_path), tmp_path) as screen:
            screen.rest()
    for name, (_, reward, standing) in LOGS.items():
        [row] = [row for row in screen.seen.split("\n") if name in row]
        coloured = re.findall(r"\x1b\[([0-9;]+)m\s*([^\x1b]+)", row.partition(name)[2])
        assert next(code for code, text in coloured if text.strip() == reward) == COLOURS[standing], row


async def test_programs_get_the_standing_too(tmp_path: Path) -> None:
    async with filled(tmp_path):
        rows = {row["id"]: row["standing"] for row in json.loads(rollcage(tmp_path, "ls", "--json").stdout)}
    assert rows == {name: standing for name, (_, _, standing) in LOGS.items()}
