"""Builds the parts from the settings: the one place that says what rollouts are made of. Used by edges only."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollcage.errors import UnknownRollout
from rollcage.settings import Settings

if TYPE_CHECKING:
    from rollcage.agents.base import Agent
    from rollcage.agents.opencode import OpenCode
    from rollcage.runner import Backends, Runner
    from rollcage.sandboxes.local import LocalProvider
    from rollcage.store import Store


def provider(settings: Settings) -> LocalProvider:
    """Opens boxes on this machine."""
    from rollcage.sandboxes.local import LocalProvider

    return LocalProvider(settings.home)


def agent(settings: Settings) -> OpenCode:
    """The agent that comes with rollcage."""
    from rollcage.agents.opencode import OpenCode

    return OpenCode(settings.cache_dir)


@asynccontextmanager
async def opened_backends(settings: Settings) -> AsyncIterator[Backends]:
    """Everything rollouts can be run with. Backends that nobody asks for cost nothing."""
    from rollcage.agents.shell import Shell
    from rollcage.gateway import Gateway
    from rollcage.runner import Backends

    # Every box and every model call takes descriptors; the usual soft limit of 1024 is for small programs.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with Gateway.open() as gateway, provider(settings) as boxes:
        agents: list[Agent] = [agent(settings), Shell()]
        yield Backends(providers={boxes.name: boxes}, agents={known.name: known for known in agents}, gateway=gateway)


@asynccontextmanager
async def opened_runner(settings: Settings, store: Store) -> AsyncIterator[Runner]:
    """A runner on this log, with everything it needs."""
    from rollcage.runner import Runner

    async with opened_backends(settings) as backends, Runner.open(store, backends) as runner:
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
