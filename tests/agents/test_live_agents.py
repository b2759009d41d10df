"""Every real agent while it works: its words are heard as they are said, its calls are in the log as they end, and an
abort silences its model."""

from __future__ import annotations

import os
from contextlib import aclosing
from dataclasses import replace

import anyio
import pytest

from rollcage.agent_events import AgentToolCall
from rollcage.agents.base import Scriptable
from rollcage.events import AgentEmitted, AgentStarted
from rollcage.runner import Owners, Registry, Runner
from rollcage.runner.live import subscribe
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import AgentSpec, Job, Limits, Outcome, ScriptedTurn, Task
from rollcage.wiring import agents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STREAMING = ["opencode", "claude-code", "codex", "pi", "qwen-code"]
WHOLE = ["mini-swe-agent"]
"""It asks for whole answers: nobody hears them before their end."""
SEEN = "seen 42"
"""The shell works it out: whoever says it has run the command."""


async def heard(store: Store, rollout_id: str) -> int:
    """Listen until the second turn's words are there; how many turns were in the log by then."""
    owner = Owners.beside(store).socket((await store.rollout(rollout_id)).owner)
    words = ""
    async for delta in subscribe(owner, rollout_id):
        words += delta.content if delta.turn == 1 else ""
        if words.startswith("and so on and so on"):
            return len((await store.rollout(rollout_id)).turns)
    raise AssertionError(f"heard no more than {words!r}")


async def called(store: Store, rollout_id: str) -> AgentToolCall:
    """The call that has seen it, as the log has it."""
    async with aclosing(store.follow(rollout_id)) as entries:
        async for entry in entries:
            event = entry.event.event if isinstance(entry.event, AgentEmitted) else None
            if isinstance(event, AgentToolCall) and SEEN in event.result:
                return event
    raise AssertionError("it told of no such call")


@pytest.mark.parametrize("name", [*STREAMING, *WHOLE])
async def test_an_agent_is_followed_while_its_model_speaks(
    name: str, store: Store, backends: Registry, model: ScriptedModel
) -> None:
    known = agents(Settings.from_environ(os.environ))
    agent = known[name]
    assert isinstance(agent, Scriptable)
    looks = ScriptedTurn(text="I look.", tool_calls=(agent.tool_words.run("echo seen $((6*7)); sleep 0.2"),))
    endless = ScriptedTurn(text="and so on " * 50_000, token_delay_s=0.01)
    endpoint = model.endpoint((looks, endless))
    task = Task(instruction="Look.", limits=Limits(max_tokens_cap=0))
    async with Runner.open(store, replace(backends, agents=known)) as runner:
        rollout_id = await runner.start(Job(task=task, model=endpoint, agent=AgentSpec(name=name)))
        async with aclosing(store.follow(rollout_id)) as entries:
            async for entry in entries:
                if isinstance(entry.event, AgentStarted):
                    break
        if name in STREAMING:
            assert await heard(store, rollout_id) == 1, "the log has nothing of the second turn yet"
        assert (await called(store, rollout_id)).status == "completed"
        while not model.open_requests:
            await anyio.sleep(0.01)
        assert len((await store.rollout(rollout_id)).turns) == 1, "the second is still being said"
        assert await runner.abort(rollout_id)
        assert (await runner.wait(rollout_id)).outcome is Outcome.ABORTED
    while model.open_requests:
        await anyio.sleep(0.01)
    assert model.generated(endpoint) < 50_000, "it was silenced before its end"
