"""Every agent in containers and at E2B, from the same prebuilt layers at the same paths as in local boxes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollcage.conformance.agents import check
from rollcage.sandboxes.base import Provider
from rollcage.sandboxes.container.provider import ContainerProvider
from rollcage.sandboxes.e2b.provider import E2BProvider
from rollcage.settings import Settings
from rollcage.types import SandboxSpec
from rollcage.wiring import agents
from support.e2b_runtime import E2BRuntime

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

AGENTS = ["opencode", "claude-code", "codex", "pi", "qwen-code", "mini-swe-agent"]
ONE_ROLLOUT = (
    *("install.once", "run.finishes", "run.no_egress", "prompt.verbatim", "turns.trainable", "tools.run"),
    *("tools.edit", "events.complete", "end.children", "secrets.none"),
)
"""Checks that look at one and the same rollout; conformance/test_agent_suite.py tries the others in local boxes."""


@pytest.fixture
async def containers(engine_address: str, state_dir: Path) -> AsyncIterator[ContainerProvider]:
    async with ContainerProvider(state_dir, [engine_address]) as opened:
        yield opened


async def holds(name: str, provider: Provider) -> None:
    agent = agents(Settings.from_environ(os.environ))[name]
    found = [verdict async for verdict in check(agent, provider, only=ONE_ROLLOUT, pace=30)]
    assert [(one.name, one.detail) for one in found if one.outcome == "failed"] == []
    assert {one.name for one in found if one.outcome == "not_applicable"} <= {"tools.edit"}
    assert len(found) == len(ONE_ROLLOUT)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_works_in_a_container(name: str, containers: ContainerProvider) -> None:
    layers = agents(Settings.from_environ(os.environ))[name].layers()
    async with containers.open(SandboxSpec(backend="container"), layers):
        pass  # what is missing is built here, as it is for users
    await holds(name, containers)


@pytest.mark.parametrize("name", AGENTS)
async def test_an_agent_works_at_e2b(name: str, state_dir: Path, tmp_path: Path) -> None:
    layers = agents(Settings.from_environ(os.environ))[name].layers()
    async with E2BRuntime(tmp_path / "cloud") as cloud, E2BProvider(cloud.settings, state_dir) as provider:
        async with provider.open(SandboxSpec(backend="e2b"), layers):
            pass
        await holds(name, provider)
        assert not cloud.machines
