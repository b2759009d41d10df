"""Builds the parts from the settings: the one place that says what rollouts are made of. Used by edges only."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from rollcage.errors import UnknownRollout
from rollcage.settings import Settings

if TYPE_CHECKING:
    from rollcage.agents.base import Agent
    from rollcage.agents.opencode import OpenCode
    from rollcage.environments.base import Environments
    from rollcage.runner import Backends, Runner
    from rollcage.sandboxes.base import Provider
    from rollcage.sandboxes.container import ContainerProvider
    from rollcage.sandboxes.e2b import E2BProvider
    from rollcage.sandboxes.local import LocalProvider
    from rollcage.store import Store


def provider(settings: Settings) -> LocalProvider:
    """Opens boxes on this machine."""
    from rollcage.sandboxes.local import LocalProvider

    return LocalProvider(settings.home)


def container_provider(settings: Settings) -> ContainerProvider:
    """Opens boxes in docker or podman."""
    from rollcage.sandboxes.container import ContainerProvider

    return ContainerProvider(settings.home, settings.engines)


def e2b_provider(settings: Settings) -> E2BProvider:
    """Opens boxes in E2B's cloud."""
    from rollcage.sandboxes.e2b import E2BProvider

    return E2BProvider(settings.e2b, settings.home)


def providers(settings: Settings) -> Mapping[str, Callable[[], AbstractAsyncContextManager[Provider]]]:
    """Every kind of box by its name, each ready to be made. Making one costs nothing until its first box is opened."""
    return {
        "local": lambda: provider(settings),
        "container": lambda: container_provider(settings),
        "e2b": lambda: e2b_provider(settings),
    }


def agent(settings: Settings) -> OpenCode:
    """The agent that comes with rollcage."""
    from rollcage.agents.opencode import OpenCode

    return OpenCode(settings.cache_dir)


def environments(settings: Settings) -> dict[str, Environments]:
    """Remote environments, by the word their addresses begin with. None is asked for anything before it is used."""
    from rollcage.environments.fleet import FleetEnvironments
    from rollcage.environments.mcp import McpEnvironments
    from rollcage.environments.openenv import OpenEnvEnvironments

    return {"fleet": FleetEnvironments(settings.fleet), "mcp": McpEnvironments(), "openenv": OpenEnvEnvironments()}


@asynccontextmanager
async def opened_backends(settings: Settings, *, warm: int = 0) -> AsyncIterator[Backends]:
    """Everything rollouts can be run with. Backends that nobody asks for cost nothing.

    `warm`: so many boxes of each kind are kept open ahead, with the agent's server started; local ones from now on.
    """
    from rollcage.agents.loop import Loop
    from rollcage.agents.shell import Shell
    from rollcage.gateway import Gateway
    from rollcage.runner import Backends

    # Every box and every model call takes descriptors; the usual soft limit of 1024 is for small programs.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with Gateway.open() as gateway, AsyncExitStack() as stack:
        boxes = {name: await stack.enter_async_context(make()) for name, make in providers(settings).items()}
        opencode = agent(settings)
        agents: list[Agent] = [opencode, Shell(), Loop()]
        if warm:
            boxes = await _pooled(stack, boxes, opencode, warm)
        yield Backends(
            providers=boxes,
            agents={known.name: known for known in agents},
            gateway=gateway,
            environments=environments(settings),
        )


async def _pooled(
    stack: AsyncExitStack, providers: Mapping[str, Provider], warmer: OpenCode, size: int
) -> dict[str, Provider]:
    from rollcage.sandboxes.pool import Pool
    from rollcage.types import SandboxSpec

    pools = {
        name: await stack.enter_async_context(Pool.over(boxes, size=size, warmer=warmer))
        for name, boxes in providers.items()
    }
    pools["local"].prepare(SandboxSpec(), warmer.layers())
    return dict(pools)


@asynccontextmanager
async def opened_runner(settings: Settings, store: Store, *, warm: int = 0) -> AsyncIterator[Runner]:
    """A runner on this log, with everything it needs. `warm`: see `opened_backends`."""
    from rollcage.runner import Runner

    async with opened_backends(settings, warm=warm) as backends, Runner.open(store, backends) as runner:
        yield runner


@asynccontextmanager
async def opened_log(settings: Settings) -> AsyncIterator[Store]:
    """The log, for those who read it; what dead processes left open is ended first, so that nobody waits for them."""
    from rollcage.runner import Owners, recover
    from rollcage.store import Store

    if not settings.log_path.exists():
        raise UnknownRollout(f"there are no rollouts yet in {settings.home}; rollcage run makes one")
    async with Store.open(settings.log_path) as store:
        await recover(store, Owners.beside(store))
        yield store
