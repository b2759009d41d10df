"""Every agent that comes with rollcage holds all that an agent must; and the suite finds out those that do not.

They come from npm and PyPI, once, into the cache.
"""

from __future__ import annotations

import os
import re
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
from support.paths import ROOT

AGENTS = ["opencode", "claude-code", "codex", "pi", "qwen-code", "mini-swe-agent"]
SMALL = ["mini", "loop", "shell", "oracle", "nop"]
DOCS = ROOT / "docs" / "agents.md"


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


@pytest.mark.parametrize("name", SMALL)
async def test_a_small_agent_holds_what_it_can(name: str, provider: LocalProvider) -> None:
    await holds(agents(Settings.from_environ(os.environ))[name], provider)


async def holds(agent: Agent, provider: LocalProvider) -> None:
    found = await verdicts(agent, provider)
    assert {name: seen for name, seen in found.items() if seen[0] == "failed"} == {}
    not_tried = {name: why for name, (outcome, why) in found.items() if outcome == "not_applicable"}
    assert set(not_tried) == not_tried_by_the_docs(agent.name)
    assert all(not_tried.values()), "each says why"
    assert len(found) == len(CHECKS)


def not_tried_by_the_docs(agent: str) -> set[str]:
    """The rows of the table in docs/agents.md that name the agent."""
    table = DOCS.read_text().partition("| agent | not tried | since |\n")[2].partition("\n\n")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines()[1:]]
    return {check for names, checks in rows if f"`{agent}`" in names for check in re.findall(r"`(.+?)`", checks)}


def test_the_docs_name_every_check() -> None:
    known = DOCS.read_text().partition("| check | what holds |")[2].partition("\n\n")[0]
    assert re.findall(r"`([a-z]+\.[a-z_]+)`", known) == [one.name for one in CHECKS]


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
        "prompt.commands",  # one of them, too
        "events.complete",
        "end.model_error",
        "end.limit",
        "config.env",
    }, found


def test_checks_are_chosen_by_name_or_by_how_it_begins() -> None:
    assert [one.name for one in chosen(["end.abort"])] == ["end.abort"]
    assert {one.name for one in chosen(["prompt"])} == {"prompt.verbatim", "prompt.large", "prompt.commands"}
    with pytest.raises(UsageError, match=r"no check is called 'nothing'; there are install\.layers, "):
        chosen(["nothing"])
