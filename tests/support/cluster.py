"""A cluster in one process: real heads, nodes, boxes and logs; the way between them can be cut."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from rollcage.agents.stored import StoredWork
from rollcage.cluster.content import ContentStore
from rollcage.cluster.head import Head
from rollcage.cluster.messages import GateState, Hello, NodeLost, NodeNews, Order, Welcome
from rollcage.cluster.node import NodeHost
from rollcage.cluster.options import Cluster, NodeInfo
from rollcage.gateway import Gateway
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import Provider, Sandbox
from rollcage.sandboxes.images import ImageStore
from rollcage.sandboxes.layers import Layer, LayerStore
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.store.work import WorkStore
from rollcage.types import SandboxSpec
from rollcage.wiring import replicas_of


class HeldProvider:
    """Opens boxes once it is let go."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self.go = anyio.Event()
        self.go.set()

    @property
    def name(self) -> str:
        return self._provider.name

    def check(self, spec: SandboxSpec) -> None:
        self._provider.check(spec)

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Sandbox]:
        await self.go.wait()
        async with self._provider.open(spec, layers) as box:
            yield box


@dataclass
class Machine:
    """One node."""

    info: NodeInfo
    provider: HeldProvider
    home: Path
    host: NodeHost | None = None
    up: bool = True
    cut: bool = False
    """Whether nothing gets through."""
    disowned: bool = False
    """Whether Ray says that it died, and it did not."""
    lifeline: bool = False
    streams: bool = True
    """Whether its news may be asked for beside Ray, where it has a lifeline."""
    port: int = 0
    """Where its lifeline and its news are."""
    hello: Hello | None = None
    orders: list[Order] = field(default_factory=list)
    received: list[str] = field(default_factory=list)
    """What it was sent."""

    def kill(self) -> None:
        """As a machine dies: it says nothing more."""
        self.up = False
        if self.host is not None:
            self.host.stop("killed")


class DirectLink:
    """Calls a node in this process."""

    def __init__(self, machine: Machine, registry: Registry, home: Path) -> None:
        self._machine, self._home = machine, home

        @asynccontextmanager
        async def opened(settings: Settings, hello: Hello) -> AsyncIterator[Registry]:
            async with Gateway.open() as gateway:
                providers = {"local": machine.provider}
                work, trees = WorkStore(settings.work_dir, 4 << 20), WorkStore(settings.trees_dir, 4 << 20)
                agents = {**registry.agents, "stored-work": StoredWork(work.get)}
                yield replace(registry, gateway=gateway, providers=providers, agents=agents, work=work, trees=trees)

        machine.host = self._host = NodeHost(open_registry=opened, streams=machine.streams)

    async def _reach(self) -> NodeHost:
        await asyncio.sleep(0)
        if not self._machine.up or self._machine.disowned:
            raise NodeLost("it was killed")
        if self._machine.cut:
            await asyncio.sleep(0.01)
            raise TimeoutError("cut off")
        return self._host

    async def open(self, hello: Hello) -> Welcome:
        if self._machine.home != self._home:
            hello = hello._replace(home=str(self._machine.home))
        self._machine.hello = hello
        welcome = await (await self._reach()).open(hello)
        self._machine.port = welcome.port
        # What is killed here is no process, and would leave its lifeline whole.
        return welcome if self._machine.lifeline else welcome._replace(port=0)

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        batch = await (await self._reach()).exchange(heard, acknowledged)
        await self._reach()
        return batch

    async def run(self, order: Order, key: str) -> None:
        self._machine.orders.append(order)
        await (await self._reach()).run(order, key)

    async def abort(self, name: str, attempt: int) -> None:
        (await self._reach()).abort(name, attempt)

    async def gate(self, state: GateState) -> None:
        await (await self._reach()).gate(state)

    async def watch(self, token: str, name: str) -> None:
        (await self._reach()).watch(token, name)

    async def missing(self, names: frozenset[str]) -> frozenset[str]:
        return (await self._reach()).missing(names)

    async def receive(self, name: str, pieces: object) -> None:
        assert isinstance(pieces, list)
        self._machine.received.append(name)
        await (await self._reach()).receive(name, pieces)

    def end(self) -> None:
        self._host.stop("the head ended it")


class Machines:
    """Where nodes come from: as many as a test adds."""

    def __init__(self, registry: Registry, provider: Provider, home: Path) -> None:
        self._registry, self._provider, self._home = registry, provider, home
        self.all: dict[str, Machine] = {}
        self.packed = 0
        """Archives that the head made."""
        self.asked: list[int] = []
        """For how many rollouts there was to be room."""
        self.servers: list[str] = []
        """Where Ray Serve's application answers."""

    def add(self, name: str, *, places: int = 4, home: Path | None = None, **labels: str) -> Machine:
        info = NodeInfo(id=name, address="127.0.0.1", resources={"CPU": places}, labels=labels, here=True)
        self.all[name] = Machine(info, HeldProvider(self._provider), home or self._home)
        return self.all[name]

    async def nodes(self) -> Sequence[NodeInfo]:
        return [machine.info for machine in self.all.values() if machine.up]

    async def ask_for(self, rollouts: int) -> None:
        if not self.asked or self.asked[-1] != rollouts:
            self.asked.append(rollouts)

    async def served(self, app: str) -> Sequence[str]:
        return self.servers

    def connect(self, node: NodeInfo, places: int) -> DirectLink:
        return DirectLink(self.all[node.id], self._registry, self._home)

    def stored(self, pieces: list[bytes]) -> object:
        self.packed += 1
        return pieces


@asynccontextmanager
async def opened_cluster(
    store: Store, registry: Registry, machines: Machines, home: Path, **options: object
) -> AsyncIterator[tuple[Runner, Head]]:
    """A runner whose rollouts run on these machines."""
    settings = Settings(home=home, replicas=options.pop("replicas", ()))
    registry.gateway.replicas = replicas_of(settings)
    layers = LayerStore(home / "layers")
    trees, work = (
        registry.trees or WorkStore(home / "trees", 4 << 20),
        registry.work or WorkStore(home / "work", 4 << 20),
    )
    content = ContentStore(ImageStore(home / "images", layers), trees, work)  # type: ignore[arg-type]
    cluster = Cluster.model_validate({"resources": {"CPU": 1}, "lease_s": 600, "node_home": str(home), **options})
    async with AsyncExitStack() as stack:
        head = await stack.enter_async_context(Head.open(settings, cluster, machines, registry, content))
        runner = await stack.enter_async_context(Runner.open(store, registry, at_once=1000, executor=head))
        yield runner, head
