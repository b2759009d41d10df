"""A rollout goes on while what it tells is written, and waits where something follows from it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from rollcage.agents.shell import Shell
from rollcage.errors import StoreError
from rollcage.events import (
    AgentEmitted,
    CommandStarted,
    Ended,
    Event,
    Scored,
    StageEnded,
    StageStarted,
    ToolCalled,
)
from rollcage.gateway import Gateway
from rollcage.rollout.run import RolloutDeps, run
from rollcage.runner.write_behind import MOST, WriteBehind
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.simulators import ScriptedModel
from rollcage.types import AgentSpec, Job, Outcome, Stage, Task

TOLD = CommandStarted(stage=Stage.SETUP, command="true")


class Disk:
    """Takes events in order, each once it is let."""

    def __init__(self) -> None:
        self.asked: list[Event] = []
        self.written: list[Event] = []
        self.ready = anyio.Event()

    async def log(self, event: Event) -> None:
        self.asked.append(event)
        await self.ready.wait()
        self.written.append(event)


async def test_what_is_only_told_is_not_waited_for_but_never_far_behind() -> None:
    disk = Disk()
    log = WriteBehind(disk.log)
    for _ in range(MOST):
        await log(TOLD)
    assert disk.written == []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log, TOLD)
        await anyio.wait_all_tasks_blocked()
        assert len(disk.asked) == MOST + 1, "the last one waits for the first"
        disk.ready.set()
    assert disk.written


@pytest.mark.parametrize(
    "event",
    [
        StageStarted(stage=Stage.AGENT),
        StageEnded(stage=Stage.VERIFY, seconds=1),
        ToolCalled(name="look"),
        Ended(outcome=Outcome.FINISHED),
    ],
    ids=lambda event: event.kind,
)
async def test_what_something_follows_from_is_on_the_disk_with_all_before_it(event: Event) -> None:
    disk = Disk()
    log = WriteBehind(disk.log)
    await log(TOLD)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log, event)
        await anyio.wait_all_tasks_blocked()
        assert disk.asked == [TOLD, event]
        disk.ready.set()
    assert disk.written == [TOLD, event]


async def test_an_append_that_fails_is_raised_by_the_next_one() -> None:
    async def log(event: Event) -> None:
        if isinstance(event, AgentEmitted):
            raise StoreError("the disk is full")

    behind = WriteBehind(log)
    with pytest.raises(StoreError, match="full"):
        for _ in range(2):
            await behind(AgentEmitted(raw={}))
            await anyio.wait_all_tasks_blocked()
    await behind(Ended(outcome=Outcome.FINISHED))


async def test_a_rollout_whose_reward_could_not_be_logged_has_not_finished(state_dir: Path) -> None:
    logged: list[Event] = []

    async def log(event: Event) -> None:
        if isinstance(event, Scored):
            raise StoreError("the disk is full")
        logged.append(event)

    async with ScriptedModel() as model, Gateway.open() as gateway, LocalProvider(state_dir) as provider:
        job = Job(
            task=Task(instruction="true", verify=("true",)), model=model.endpoint(()), agent=AgentSpec(name="shell")
        )
        await run(job, RolloutDeps(provider, Shell(), gateway), WriteBehind(log))
    ended = logged[-1]
    assert isinstance(ended, Ended)
    assert (ended.outcome, ended.error_code) == (Outcome.INTERNAL_ERROR, "log_failed")
