"""What the tests share: the event loop, the folder with the prebaked layers, and a way to run rollouts."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# Fetched by the fixtures that need it: most tests use few of these, and each is collected in every process.
if TYPE_CHECKING:
    from playwright.async_api import Browser

    from rollcage.agents.base import Agent
    from rollcage.results.fold import Rollout
    from rollcage.runner import Registry, Runner
    from rollcage.sandboxes.container.provider import ContainerProvider
    from rollcage.simulators import FleetRuntime, ScriptedModel
    from rollcage.store import Store
    from rollcage.types import AgentSpec, Endpoint, SandboxSpec, ScriptedTurn, Task
    from support.playing import Play

# Whoever started the tests in the background may have had them ignore Ctrl-C or hang-ups; children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """No report of a library that no test used: it would be loaded for that, which takes a second."""
    if "hypothesis" not in sys.modules:
        session.config.pluginmanager.unregister(name="hypothesispytest")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def state_dir() -> Path:
    """The machine's own state folder: layers are content-addressed and built once, here as for users."""
    from rollcage.settings import Settings

    return Settings.from_environ(os.environ).home


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    from rollcage.simulators import ScriptedModel

    async with ScriptedModel() as scripted:
        yield scripted


@pytest.fixture
async def fleet() -> AsyncIterator[FleetRuntime]:
    """A local Fleet; whatever a test does, it leaves no instance running."""
    from rollcage.simulators import FleetRuntime

    async with FleetRuntime() as runtime:
        yield runtime
        assert runtime.running == []


@pytest.fixture(scope="module")
def fleet_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables that lead to a local Fleet in another process, where nothing is left at the end."""
    from support.fleet_stand import served_fleet

    with served_fleet(tmp_path_factory.mktemp("fleet")) as variables:
        yield variables


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    from support.browser import chromium

    async with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def engine_address() -> Iterator[str]:
    """A container engine."""
    from support.container_engine import an_engine

    with an_engine() as found:
        yield found


@pytest.fixture(scope="module")
async def containers(engine_address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContainerProvider]:
    from rollcage.sandboxes.container.provider import ContainerProvider

    async with ContainerProvider(tmp_path_factory.mktemp("state"), [engine_address]) as opened:
        yield opened


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    from rollcage.store import Store

    async with Store.open(tmp_path / "rollouts.db") as opened:
        yield opened


@pytest.fixture
async def backends(state_dir: Path, tmp_path: Path) -> AsyncIterator[Registry]:
    from rollcage.agents.cli_agent import Downloads
    from rollcage.agents.mini import Mini
    from rollcage.agents.nop import Nop
    from rollcage.agents.opencode.agent import OpenCode
    from rollcage.agents.oracle import Oracle
    from rollcage.agents.shell import Shell
    from rollcage.agents.stored import StoredWork
    from rollcage.gateway import Gateway
    from rollcage.runner import Registry
    from rollcage.sandboxes.local.provider import LocalProvider
    from rollcage.store.work import WorkStore

    async with AsyncExitStack() as stack:
        work, trees = WorkStore(tmp_path / "work", 4 << 20), WorkStore(tmp_path / "trees", 4 << 20)
        gateway = await stack.enter_async_context(Gateway.open())
        provider = await stack.enter_async_context(LocalProvider(state_dir))
        mine: list[Agent] = [Nop(), Oracle(files=trees.get), StoredWork(work.get)]
        known: list[Agent] = [OpenCode(Downloads(state_dir / "cache")), Mini(), Shell(), *mine]
        agents = {agent.name: agent for agent in known}
        yield Registry(providers={"local": provider}, agents=agents, gateway=gateway, work=work, trees=trees)


@pytest.fixture
async def runner(store: Store, backends: Registry) -> AsyncIterator[Runner]:
    from rollcage.runner import Runner

    async with Runner.open(store, backends) as opened:
        yield opened


@pytest.fixture
def play(runner: Runner, model: ScriptedModel) -> Play:
    from rollcage.types import AgentSpec, Job, SandboxSpec

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
