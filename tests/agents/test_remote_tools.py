"""The tools of a remote environment in the hands of real agents: a local Fleet behind its SDK, a scripted model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollcage.agents.base import Agent
from rollcage.errors import UsageError
from rollcage.runner import Registry, Runner
from rollcage.settings import Settings
from rollcage.simulators import FleetRuntime, ScriptedModel
from rollcage.simulators.fleet.task import desk_task
from rollcage.store import Store
from rollcage.types import AgentSpec, Job, Limits, Outcome
from rollcage.wiring import agents
from support.remote_work import DESK, with_environments

PREFIXES = {"claude-code": "mcp__env__", "codex": "", "qwen-code": "mcp__env__"}
"""What stands before the name of a remote tool, where the agent offers it."""


@pytest.fixture
async def runner(store: Store, backends: Registry, state_dir: Path) -> AsyncIterator[Runner]:
    async with FleetRuntime() as fleet:
        known: dict[str, Agent] = dict(agents(Settings.from_environ(os.environ)))
        parts = with_environments(replace(backends, agents=known), fleet)
        async with Runner.open(store, parts) as opened:
            yield opened
        assert fleet.running == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", PREFIXES)
async def test_an_agent_works_on_a_remote_environment(name: str, runner: Runner, model: ScriptedModel) -> None:
    prefix = PREFIXES[name]
    task = desk_task(prefix=prefix, limits=Limits(agent_timeout_s=600))
    job = Job(task=task, model=model.endpoint(task.solution), agent=AgentSpec(name=name), environment=DESK)
    rollout = await runner.wait(await runner.start(job))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward == 1.0
    used = ["search_tickets", "read_ticket", "assign_ticket", "reply_to_ticket", "resolve_ticket"]
    assert [(call.name, call.failed) for call in rollout.tool_calls] == [(tool, False) for tool in used]
    offered = {tool["function"]["name"] for tool in rollout.turns[0].request["tools"]}
    assert {prefix + tool for tool in used} <= offered, "from the start: a model need not search for them"
    assert [turn.trainable for turn in rollout.turns] == [True] * 6


@pytest.mark.parametrize("name", ["pi", "mini-swe-agent", "mini"])
async def test_an_agent_that_cannot_take_them_is_refused_before_anything_starts(
    name: str, runner: Runner, model: ScriptedModel
) -> None:
    job = Job(task=desk_task(), model=model.endpoint([]), agent=AgentSpec(name=name), environment=DESK)
    with pytest.raises(UsageError, match=f"agent: {name} cannot be given the tools of a remote environment"):
        await runner.start(job)
