"""Every agent that comes with rollcage holds all that an agent must; and the suite finds out those that do not.

They come from npm and PyPI, once, into the cache.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollcage.agent_events import AgentText
from rollcage.agents.base import Agent, AgentContext, AgentExit, Emit
from rollcage.agents.mini import Mini
from rollcage.conformance.agents import CHECKS, check, chosen
from rollcage.errors import UsageError
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import Settings
from rollcage.types import AgentSpec
from rollcage.wiring import agents

AGENTS = ["opencode", "claude-code", "codex", "pi", "qwen-code", "mini-swe-agent"]
CANNOT = {
    "codex": {"tools.edit", "config.tools"},
    "pi": {"turns.subagents"},
    "mini-swe-agent": {"tools.edit", "config.tools", "turns.subagents"},
    "mini": {"tools.edit", "config.tools", "turns.subagents"},
}
"""What an agent has no part for, or refuses by name: docs/agents.md has the same table."""


@pytest.fixture
async def provider(state_dir: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(state_dir) as opened:
        yield opened


async def verdicts(agent: Agent, provider: LocalProvider, *only: str) -> dict[str, tuple[str, str]]:
    # The time to abort in is the suite's own measure, for a quiet machine.
    found = check(agent, provider, only=only, pace=30)
    return {verdict.name: (verdict.outcome, verdict.detail) async for verdict in found}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", AGENTS)
async def test_a_shipped_agent_holds_what_every_agent_must(name: str, provider: LocalProvider) -> None:
    await holds(agents(Settings.from_environ(os.environ))[name], provider)


async def test_the_lean_agent_holds_it_too(provider: LocalProvider) -> None:
    await holds(Mini(), provider)


async def holds(agent: Agent, provider: LocalProvider) -> None:
    found = await verdicts(agent, provider)
    assert {name: seen for name, seen in found.items() if seen[0] == "failed"} == {}
    assert {name for name, (outcome, _) in found.items() if outcome == "not_applicable"} == CANNOT.get(
        agent.name, set()
    )
    assert len(found) == len(CHECKS)


class Careless(Mini):
    """Mini, as somebody else might have written it."""

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        async with box.spawn(["python3", "-c", LOOKS_OUTSIDE]) as process:
            await process.wait()
        ended = await super().solve(
            box,
            instruction.strip(),
            context,
            spec.model_copy(update={"env": {}}),
            workdir=workdir,
            emit=_silently(emit),
        )
        return AgentExit(code=0, error=ended.error)


LOOKS_OUTSIDE = "import socket\ntry:\n  socket.create_connection(('192.0.2.1', 443), 1)\nexcept OSError:\n  pass"


def _silently(emit: Emit) -> Emit:
    async def told(event: object) -> None:
        if not isinstance(getattr(event, "event", None), AgentText):
            await emit(event)  # type: ignore[arg-type]

    return told


async def test_the_suite_finds_out_an_agent_that_does_not_hold_it(provider: LocalProvider) -> None:
    found = await verdicts(Careless(), provider)
    failed = {name for name, (outcome, _) in found.items() if outcome == "failed"}
    assert failed == {
        "run.no_egress",
        "prompt.verbatim",
        "prompt.large",  # it ends with a line end
        "events.complete",
        "end.model_error",
        "end.limit",
        "config.env",
    }, found


def test_checks_are_chosen_by_name_or_by_how_it_begins() -> None:
    assert [one.name for one in chosen(["end.abort"])] == ["end.abort"]
    assert {one.name for one in chosen(["prompt"])} == {"prompt.verbatim", "prompt.large"}
    with pytest.raises(UsageError, match=r"no check is called 'nothing'; there are install\.layers, "):
        chosen(["nothing"])
