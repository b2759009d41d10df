"""What the tests share: the event loop, the folder with the prebaked layers, and a way to run rollouts."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from playing import Play
from rollcage.agents.base import Agent
from rollcage.agents.opencode import OpenCode
from rollcage.agents.shell import Shell
from rollcage.events import Rollout
from rollcage.gateway import Gateway
from rollcage.runner import Backends, Runner
from rollcage.sandboxes.local import LocalProvider
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.testing import ScriptedModel
from rollcage.types import AgentSpec, Endpoint, Job, SandboxSpec, ScriptedTurn, Task

# Whoever started the tests in the background may have had them ignore Ctrl-C or hang-ups; children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How fast examples are made says only how busy the machine is. The build server tries the same ones in every run: a
# change is refused for what it did. Everywhere else they are new ones each time.
in_ci = os.environ.get("CI") in ("true", "1")
settings.register_profile("steady", deadline=None, derandomize=in_ci, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def state_dir() -> Path:
    """The machine's own state folder: layers are content-addressed and built once, here as for users."""
    return Settings.from_environ(os.environ).home


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel() as scripted:
        yield scripted


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with Store.open(tmp_path / "rollouts.db") as opened:
        yield opened


@pytest.fixture
async def backends(state_dir: Path) -> AsyncIterator[Backends]:
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway.open())
        provider = await stack.enter_async_context(LocalProvider(state_dir))
        agents: dict[str, Agent] = {"opencode": OpenCode(state_dir / "cache"), "shell": Shell()}
        yield Backends(providers={"local": provider}, agents=agents, gateway=gateway)


@pytest.fixture
async def runner(store: Store, backends: Backends) -> AsyncIterator[Runner]:
    async with Runner.open(store, backends) as opened:
        yield opened


@pytest.fixture
def play(runner: Runner, model: ScriptedModel) -> Play:
    async def play(
        task: Task,
        *,
        agent: str | AgentSpec = "opencode",
        script: tuple[ScriptedTurn, ...] | None = None,
        endpoint: Endpoint | None = None,
        sandbox: SandboxSpec | None = None,
    ) -> Rollout:
        spec = AgentSpec(name=agent) if isinstance(agent, str) else agent
        thinker = endpoint or model.endpoint(task.solution if script is None else script)
        job = Job(task=task, model=thinker, agent=spec, sandbox=sandbox or SandboxSpec())
        return await runner.wait(await runner.start(job))

    return play
