"""Builds the parts from the settings: the one place that says what rollouts are made of. Used by edges only."""

from __future__ import annotations

import functools
import resource
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollcage.errors import UnknownRollout, UsageError, needs_extra
from rollcage.settings import Settings
from rollcage.types import BASE, SandboxSpec, System

if TYPE_CHECKING:
    from rollcage.agents.base import Agent
    from rollcage.agents.catalog import AgentCatalog
    from rollcage.agents.opencode.agent import OpenCode
    from rollcage.environments.base import Environments
    from rollcage.events import Event
    from rollcage.gateway.replicas import Replicas
    from rollcage.runner import Registry, Runner
    from rollcage.runner.executor import Executor
    from rollcage.runner.recovery import EventListener
    from rollcage.sandboxes.base import Provider
    from rollcage.sandboxes.container.provider import ContainerProvider
    from rollcage.sandboxes.e2b.provider import E2BProvider
    from rollcage.sandboxes.images import ImageStore
    from rollcage.sandboxes.local.provider import LocalProvider
    from rollcage.store import Store


AT_ONCE = 8
"""Rollouts that run at once in one process, unless somebody says otherwise."""
MANY = 100_000
"""The same on other machines: as many as have a place there."""
SERVE = "serve:"
"""How an application of Ray Serve is named among addresses of a model."""
MOST_TREE_BYTES = 2 << 30
"""What an archive of a task's files may come to; a task is held to less when it is read."""


def provider(settings: Settings) -> LocalProvider:
    """Opens boxes on this machine."""
    from rollcage.sandboxes.local.provider import LocalProvider

    return LocalProvider(settings.home)


def say(line: str) -> None:
    """Tell whoever started this process of what takes a while and is done once."""
    print(f"rollcage: {line}", file=sys.stderr, flush=True)


@functools.cache
def warn(line: str) -> None:
    """Say it once, however many parts of this process come upon it."""
    say(line)


def system_of(settings: Settings, images: ImageStore) -> System:
    """What boxes show that name no system: what is set, else the base system once it was made."""
    return settings.system or ("base" if images.has(BASE) else "host")


def container_provider(settings: Settings) -> ContainerProvider:
    """Opens boxes in docker or podman."""
    from rollcage.sandboxes.container.provider import ContainerProvider

    async def make_base() -> None:
        from rollcage.sandboxes.images.base import ensure_base
        from rollcage.sandboxes.progress import tell

        async with provider(settings) as boxes:
            await ensure_base(boxes, lambda line: tell(f"base system: {line}"))

    return ContainerProvider(settings.home, settings.engines, make_base=make_base)


def e2b_provider(settings: Settings) -> E2BProvider:
    """Opens boxes in E2B's cloud."""
    from rollcage.sandboxes.e2b.provider import E2BProvider

    return E2BProvider(settings.e2b, settings.home)


def providers(settings: Settings) -> Mapping[str, Callable[[], AbstractAsyncContextManager[Provider]]]:
    """Every kind of box by its name, each ready to be made. Making one costs nothing until its first box is opened."""
    return {
        "local": lambda: provider(settings),
        "container": lambda: container_provider(settings),
        "e2b": lambda: e2b_provider(settings),
    }


def agent(settings: Settings) -> OpenCode:
    """The agent that is used where none is named."""
    from rollcage.agents.cli_agent import Downloads
    from rollcage.agents.opencode.agent import OpenCode

    return OpenCode(Downloads(settings.cache_dir, settings.npm_registry))


def agents(settings: Settings, *, more: Sequence[Agent] = (), local: bool = True) -> AgentCatalog:
    """Every agent by name. `local`: whoever names one may also name a file, or a version that nobody has pinned."""
    from rollcage.agents.catalog import AgentCatalog, shipped
    from rollcage.agents.cli_agent import Downloads
    from rollcage.agents.loop import Loop
    from rollcage.agents.mini import Mini
    from rollcage.agents.nop import Nop
    from rollcage.agents.oracle import Oracle
    from rollcage.agents.shell import Shell

    downloads = Downloads(settings.cache_dir, settings.npm_registry)
    known: list[Agent] = [*shipped(downloads), Mini(), Shell(), Loop(), Nop(), Oracle(), *more]
    return AgentCatalog(known, downloads, local=local, say=warn)


def environments(settings: Settings) -> dict[str, Environments]:
    """Remote environments, by the word their addresses begin with. None is asked for anything before it is used."""
    from rollcage.environments.fleet.provider import FleetEnvironments
    from rollcage.environments.mcp import McpEnvironments
    from rollcage.environments.openenv import OpenEnvEnvironments

    fleet = FleetEnvironments(settings.fleet.api_key, settings.fleet.base_url)
    return {"fleet": fleet, "mcp": McpEnvironments(), "openenv": OpenEnvEnvironments()}


@asynccontextmanager
async def opened_registry(settings: Settings, *, warm: int = 0, local: bool = True) -> AsyncIterator[Registry]:
    """Everything rollouts can be run with. Registry that nobody asks for cost nothing.

    `warm`: so many boxes of each kind are kept open ahead, with the agent's server started; local ones from now on.
    `local`: see `agents`.
    """
    from rollcage.agents.opencode.agent import OpenCode
    from rollcage.agents.oracle import Oracle
    from rollcage.agents.stored import StoredWork
    from rollcage.gateway import Gateway
    from rollcage.runner import Registry
    from rollcage.store.work import WorkStore

    # Every box and every model call takes descriptors; the usual soft limit of 1024 is for small programs.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with (
        Gateway.open(
            answer_limit=settings.answer_limit_mb << 20, proxies=settings.proxies, replicas=replicas_of(settings)
        ) as gateway,
        AsyncExitStack() as stack,
    ):
        boxes = {name: await stack.enter_async_context(make()) for name, make in providers(settings).items()}
        images = provider(settings).images
        work = WorkStore(settings.work_dir, settings.keep_work_mb << 20)
        trees = WorkStore(settings.trees_dir, MOST_TREE_BYTES)
        known = agents(settings, more=[Oracle(files=trees.get), StoredWork(work.get)], local=local)
        opencode = known["opencode"]
        if warm and isinstance(opencode, OpenCode):
            spec = SandboxSpec(system=system_of(settings, images))
            boxes = await _pooled(stack, boxes, opencode, warm, spec)
        yield Registry(
            providers=boxes,
            agents=known,
            gateway=gateway,
            environments=environments(settings),
            work=work,
            trees=trees,
            system=lambda: system_of(settings, images),
        )


def replicas_of(settings: Settings) -> Replicas:
    """Addresses that answer alike: UsageError where one is no address."""
    from rollcage.gateway.replicas import Replicas

    own = settings.replicas
    files, apps = ([each.removeprefix(kind) for each in own if each.startswith(kind)] for kind in ("@", SERVE))
    addresses = [each for each in own if not each.startswith(("@", SERVE))]
    for address in addresses:
        if not address.startswith(("http://", "https://")):
            raise UsageError(f"{address!r} must start with http:// or https://", argument="endpoint_replicas")
    if files and len(own) > 1:
        raise UsageError("is a list of addresses or one file", argument="endpoint_replicas")
    if apps and (len(apps), len(addresses)) != (1, 1):
        remedy = "give the application's own address too, http://host:8000/NAME/v1: rollouts name that"
        raise UsageError("is one application of Ray Serve and one address", argument="endpoint_replicas", remedy=remedy)
    return Replicas(addresses, Path(files[0]) if files else None, apps[0] if apps else "")


async def _pooled(
    stack: AsyncExitStack, providers: Mapping[str, Provider], warmer: OpenCode, size: int, usual: SandboxSpec
) -> dict[str, Provider]:
    from rollcage.sandboxes.pool import Pool

    pools = {
        name: await stack.enter_async_context(Pool.over(boxes, size=size, warmer=warmer))
        for name, boxes in providers.items()
    }
    pools["local"].prepare(usual, warmer.layers())
    return dict(pools)


@asynccontextmanager
async def opened_runner(
    settings: Settings,
    store: Store,
    *,
    warm: int = 0,
    at_once: int | None = None,
    narrated: bool = False,
    cluster: ClusterLink | None = None,
) -> AsyncIterator[Runner]:
    """A runner on this log, with everything it needs.

    `warm`: see `opened_registry`; `narrated`: `opened_listener`. `cluster`: other machines that run the rollouts.
    """
    from rollcage.runner import Runner

    async with (
        opened_registry(settings, warm=0 if cluster else warm) as backends,
        opened_listener(settings, store, narrated=narrated) as on_event,
        opened_executor(settings, backends, cluster) as executor,
        Runner.open(
            store,
            backends,
            at_once=at_once or (MANY if cluster else AT_ONCE),
            recovers=False,
            executor=executor,
        ) as runner,
    ):
        runner.on_event = on_event
        await runner.recover()
        yield runner


class ClusterLink(Protocol):
    """Other machines that can run rollouts: `rollcage.cluster`."""

    def open(self, settings: Settings, registry: Registry) -> AbstractAsyncContextManager[Executor]:
        """What runs them there, for as long as the block lasts."""


@asynccontextmanager
async def opened_executor(
    settings: Settings, registry: Registry, cluster: ClusterLink | None
) -> AsyncIterator[Executor | None]:
    """What runs the rollouts; None: this process."""
    if cluster is None:
        if app := registry.gateway.replicas.app:
            raise UsageError(f"{SERVE}{app} goes with --ray", argument="endpoint_replicas")
        yield None
        return
    async with cluster.open(settings, registry) as executor:
        yield executor


@asynccontextmanager
async def opened_listener(settings: Settings, store: Store, *, narrated: bool = False) -> AsyncIterator[EventListener]:
    """What is told of every event: it says what takes a while, and sends traces where somebody wants them.

    `narrated`: whoever started this process is shown every event already.
    """
    said = ""

    def on_progress(event: Event) -> None:
        nonlocal said
        # Many may wait for the same: one line is enough.
        if event.kind == "progress" and not narrated and event.message != said:
            said = event.message
            say(said)

    if not settings.otlp.url:
        yield lambda _, event: on_progress(event)
        return
    with needs_extra("sending traces", "otel"):
        from rollcage.otel.sender import sending
    async with sending(store, settings.otlp, say) as on_event:

        def on_any(rollout_id: str, event: Event) -> None:
            on_progress(event)
            on_event(rollout_id, event)

        yield on_any


@asynccontextmanager
async def opened_log(settings: Settings) -> AsyncIterator[Store]:
    """The log, for those who read it; what dead processes left open is ended first, so that nobody waits for them."""
    from rollcage.runner import Owners, recover
    from rollcage.store import Store

    if not settings.log_path.exists():
        raise UnknownRollout(f"there are no rollouts yet in {settings.home}", remedy="rollcage run makes one")
    async with Store.open(settings.log_path, read_only=not settings.log_writable) as store:
        if not store.read_only:
            await recover(store, Owners.beside(store))
        yield store


@contextmanager
def ungrouped() -> Iterator[None]:
    """The one error of a group is raised as itself: callers catch `UsageError`, not a group with one in it."""
    try:
        yield
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        if error is group:
            raise
        raise error from error.__cause__
