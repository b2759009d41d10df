"""The nodes of a cluster: each is used as it comes, asked for news all the time, and lost when it is gone for good.

What a node answers is put into the log, and acknowledged with the next question. It is lost when its process ended (its
lifeline broke, or Ray says so), or when it could not be reached until its lease had run out. Then nothing more of it is
taken, so what it ran can begin anew elsewhere. One that idles is let go, where the cluster may shrink.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import SecretStr

from rollcage.cluster.flow import Flow
from rollcage.cluster.gate import ClusterGate
from rollcage.cluster.messages import Hello, Load, NodeLink, NodeLost, NodeNews, NodeSource, OutboxItem, Welcome
from rollcage.cluster.options import Cluster, NodeInfo
from rollcage.cluster.stream import NewsStream, proof
from rollcage.cluster.view import write_view
from rollcage.gateway import Gateway
from rollcage.gateway.live import Delta
from rollcage.schema.nodes import NodeView
from rollcage.settings import EndpointSettings, OtlpSettings, Settings
from rollcage.wiring import warn

LOOK_S = 1.0
"""How often Ray is asked which nodes there are."""
GRACE = 0.1
"""How much longer than its lease a node is waited for, of the lease: it has to stop what it ran."""
START_S = 300.0
"""How long a node may take to begin."""
STUCK_S = 5.0
"""How long rollouts wait without any node until somebody is told why."""


@dataclass
class Node:
    """A node that is used, or will be."""

    info: NodeInfo
    places: int
    link: NodeLink
    state: str = "starting"
    shared: bool = False
    holds: set[str] = field(default_factory=set)
    flows: dict[str, Flow] = field(default_factory=dict)
    taken: int = 0
    """Places that are taken."""
    load: Load = field(default_factory=Load)
    since: float = field(default_factory=time.monotonic)
    supplying: anyio.Lock = field(default_factory=anyio.Lock)

    @property
    def free(self) -> bool:
        """Whether one more rollout may begin there."""
        return self.state == "ready" and self.taken < self.places

    def strain(self, wanted: Sequence[str]) -> float:
        """How little it suits: the share of places that are taken; what it would have to be sent counts as half."""
        lacks = not self.shared and any(name not in self.holds for name in wanted)
        return self.taken / self.places + 0.5 * lacks


class ClusterNodes:
    """Who is there, and what they say. `open` it."""

    def __init__(self, settings: Settings, options: Cluster, source: NodeSource, gateway: Gateway) -> None:
        self._settings, self._options, self._source = settings, options, source
        self.all: dict[str, Node] = {}
        """Those that are attended to, by Ray's id."""
        self.wanted: Callable[[], int] = lambda: 0
        """How many rollouts run or wait."""
        self.on_change: Callable[[], None] = lambda: None
        """Told when there is another number of places."""
        self.watchers: dict[str, MemoryObjectSendStream[Delta]] = {}
        """Who hears what models say, by token."""
        self.tasks: TaskGroup
        self._problems: dict[str, tuple[int, float, str]] = {}
        """Nodes that could not be used: how often, until when they are left alone, and why."""
        self._resting: set[str] = set()
        """Those that were let go, and may leave."""
        self._unfit: dict[str, tuple[str, str]] = {}
        """Address, and what does not suit, of the nodes that no rollout can be given."""
        self._stuck_since = 0.0
        """Since when rollouts have waited without any node; 0: they do not."""
        self._known: frozenset[str] = frozenset()
        self._marker = f"cluster/{secrets.token_hex(8)}"
        self._replicas = gateway.replicas
        self.gate = gateway.gate = ClusterGate(self, gateway.replicas)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Used for as long as the block lasts; then they are told to end."""
        marker = self._settings.home / self._marker
        marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker.touch()
        try:
            async with anyio.create_task_group() as self.tasks:
                self.tasks.start_soon(self._look)
                try:
                    yield
                finally:
                    self.tasks.cancel_scope.cancel()
        finally:
            marker.unlink(missing_ok=True)
            if self._options.autoscale:
                with anyio.CancelScope(shield=True), suppress(TimeoutError):
                    await self._source.ask_for(0)

    def view(self) -> list[NodeView]:
        """As they are shown."""
        now = time.monotonic()
        found = [
            NodeView(
                id=node.info.id,
                address=node.info.address,
                state=node.state,
                places=node.places,
                running=len(node.flows),
                calls=node.load.calls,
                load=node.load.load,
                images=tuple(sorted(name[6:] for name in node.holds if name.startswith("image:"))),
                rollouts=tuple(node.flows),
                labels=node.info.labels,
                seconds=now - node.since,
            )
            for node in self.all.values()
        ]
        left = self._known - self.all.keys()
        resting = [NodeView(id=key, address="", state="resting", places=0) for key in left & self._resting]
        problems = {key: ("", why) for key, (_, _, why) in self._problems.items() if key in left - self._resting}
        if not found and not resting:
            problems |= self._unfit  # a Ray may have many nodes that are not for rollouts
        return [
            *found,
            *resting,
            *(
                NodeView(id=key, address=address, state="unusable", places=0, problem=why)
                for key, (address, why) in problems.items()
            ),
        ]

    async def _look(self) -> None:
        """Use every node that Ray has, as it comes."""
        while True:
            with suppress(TimeoutError):  # the nodes that are known go on
                found = {info.id: info for info in await self._source.nodes()}
                self._known = frozenset(found)
                self._resting &= self._known
                if self._options.autoscale:
                    await self._scale()
                self._unfit.clear()
                for key, info in found.items():
                    self._consider(key, info)
            self._tell_why()
            await self._find_replicas()
            write_view(self._settings.home, self.view())
            await anyio.sleep(LOOK_S)

    async def _scale(self) -> None:
        """Ask for as much room as is needed; use those that rest, if they are."""
        wanted = self.wanted()
        await self._source.ask_for(wanted)
        if wanted > sum(node.places for node in self.all.values()):
            self._resting.clear()

    async def _find_replicas(self) -> None:
        before = self._replicas.addresses
        self._replicas.refresh()
        if self._replicas.app:
            with suppress(TimeoutError):  # the last list holds
                self._replicas.use(await self._source.served(self._replicas.app))
        if before != self._replicas.addresses:
            self.gate.tell_all()

    def _consider(self, key: str, info: NodeInfo) -> None:
        if key in self.all:
            node = self.all[key]
            if node.state in ("ready", "draining"):
                self._set_state(node, "draining" if info.draining else "ready")
            return
        if key in self._resting:
            return
        if why := self._misfit(info):
            self._unfit[key] = info.address, why
        elif time.monotonic() >= self._problems.get(key, (0, 0.0, ""))[1]:
            places = self._places(info)
            try:
                link = self._source.connect(info, places)
            except ValueError as error:
                self._unfit[key] = info.address, str(error)
                return
            self.all[key] = node = Node(info, places, link)
            self.tasks.start_soon(self._attend, node)

    def _misfit(self, info: NodeInfo) -> str:
        """Why no rollout can be given to it; nothing where one can."""
        if lacking := self._options.labels.items() - info.labels.items():
            return f"it has no label {', '.join(sorted(f'{name}={value}' for name, value in lacking))}"
        if info.draining:
            return "it is draining"
        if not self._places(info):
            each = ", ".join(f"{need:g} {name}" for name, need in self._options.resources.items())
            free = ", ".join(f"{info.resources.get(name, 0.0):g} {name}" for name in self._options.resources)
            return f"a rollout takes {each}, and it has {free} free"
        return ""

    def _tell_why(self) -> None:
        """Say what is wrong with all nodes, where rollouts wait and none can run them."""
        if self.all or self._resting or not self.wanted():
            self._stuck_since = 0.0
            return
        self._stuck_since = self._stuck_since or time.monotonic()
        if time.monotonic() - self._stuck_since >= STUCK_S:
            reasons = Counter(view.problem for view in self.view())
            told = "; ".join(f"{number} x {why}" for why, number in reasons.most_common(3))
            warn(f"no node of the cluster can run rollouts: {told or 'Ray has none'}")

    def _places(self, info: NodeInfo) -> int:
        fits = [
            int(info.resources.get(name, 0.0) / need + 1e-6) for name, need in self._options.resources.items() if need
        ]
        return min([self._options.places, *fits])

    async def _attend(self, node: Node) -> None:
        """Use one node for as long as it lives."""
        key, why = node.info.id, "the head stops"
        try:
            with anyio.fail_after(START_S):
                welcome = await node.link.open(self._hello(node))
            if welcome.version != version("rollcage"):
                raise RuntimeError(f"it has rollcage {welcome.version}, and the head {version('rollcage')}")
            node.shared, node.holds = welcome.shared, set(welcome.holds)
            if self.gate.paused or self.gate.generation or self._replicas.addresses:
                await node.link.gate(self.gate.state)
            node.state = "ready"
            self._problems.pop(key, None)
            self.on_change()
            why = await self._until_lost(node, welcome)
        except TimeoutError:
            why = f"it did not begin within {START_S:g} s"
        except (NodeLost, RuntimeError) as error:
            why = str(error)
        finally:
            node.state = "lost"
            node.link.end()
            times = self._problems.get(key, (0, 0.0, ""))[0] + 1
            self._problems[key] = (times, time.monotonic() + min(60.0, 0.5 * 2**times), why)
            del self.all[key]
            for flow in list(node.flows.values()):
                flow.lose(f"{node.info.address}: {why}")
            self.on_change()

    def _hello(self, node: Node) -> Hello:
        bare = {"endpoints": dict[str, EndpointSettings](), "server_key": SecretStr(""), "otlp": OtlpSettings()}
        options = self._options
        home = options.node_home or (str(self._settings.home) if options.address == "local" else "")
        settings = self._settings.model_copy(update=bare)
        return Hello(node.places, options.lease_s, settings, home, self._marker, options.warm)

    async def _until_lost(self, node: Node, welcome: Welcome) -> str:
        """Take its news until it is lost; why it is."""
        why: list[str] = []
        given_up = anyio.Event()
        async with anyio.create_task_group() as tasks:

            async def end_with(work: Any) -> None:
                why.append(await work)
                tasks.cancel_scope.cancel()

            if welcome.port:
                tasks.start_soon(end_with, self._lifeline(node, welcome, given_up))
            tasks.start_soon(end_with, self._follow(node, welcome, given_up))
            if self._options.autoscale:
                tasks.start_soon(end_with, self._idle(node))
        return why[0]

    async def _idle(self, node: Node) -> str:
        """Return once it has had nothing to do for long enough: Ray takes no machine away that somebody holds."""
        since = time.monotonic()
        while time.monotonic() - since < self._options.idle_s:
            await anyio.sleep(min(LOOK_S, self._options.idle_s / 4))
            if node.taken or self.wanted() > sum(each.places for each in self.all.values()) - node.places:
                since = time.monotonic()
        node.state = "draining"
        self._resting.add(node.info.id)
        return "it had nothing to do"

    async def _lifeline(self, node: Node, welcome: Welcome, given_up: anyio.Event) -> str:
        """Hold a connection to its process: it breaks at once when that ends. What is given up is told to end by it."""
        try:
            reader, writer = await asyncio.open_connection(node.info.address, welcome.port)
        except OSError:
            await anyio.sleep_forever()  # a firewall, say: Ray's word is enough
        try:
            writer.write(proof(welcome.secret, "lifeline"))
            async with anyio.create_task_group() as tasks:

                async def end() -> None:
                    await given_up.wait()
                    writer.write_eof()

                tasks.start_soon(end)
                with suppress(OSError):
                    await reader.read(1)
                tasks.cancel_scope.cancel()
        finally:
            writer.close()
        return "its process ended"

    async def _follow(self, node: Node, welcome: Welcome, given_up: anyio.Event) -> str:
        stream = NewsStream(node.info.address, welcome, node.link, self._options.lease_s)
        with closing(stream):
            return await self._take_news(node, stream, given_up, lifeline=bool(welcome.port))

    async def _take_news(self, node: Node, stream: NewsStream, given_up: anyio.Event, *, lifeline: bool) -> str:
        number, acknowledged, heard, lease_s = 0, 0, time.monotonic(), self._options.lease_s
        while True:
            # What it ran it has stopped by then: its lease counts from when it told what was heard last.
            left = heard + lease_s * (1 + GRACE) + LOOK_S - time.monotonic()
            try:
                with anyio.fail_after(max(0.0, left)):
                    batch = await stream.exchange(number, acknowledged)
            except TimeoutError:
                if left <= 0:
                    return f"it could not be reached for {time.monotonic() - heard:.0f} s"
                self._set_state(node, "unreachable")
                await anyio.sleep(lease_s / 50)
                continue
            except NodeLost as error:
                if lifeline:
                    # A process that ended, or can still be told to, breaks its lifeline; else it runs until its lease.
                    self._set_state(node, "unreachable")
                    given_up.set()
                    await anyio.sleep(max(0.0, left))
                return str(error)
            number, heard = batch.number, time.monotonic()
            if node.state == "unreachable":
                self._set_state(node, "ready")
            with anyio.CancelScope(shield=True):
                acknowledged = await self._taken(node, batch, acknowledged)

    def _set_state(self, node: Node, state: str) -> None:
        if node.state != state:
            node.state = state
            self.on_change()

    async def _taken(self, node: Node, batch: NodeNews, acknowledged: int) -> int:
        """Put a node's news into the log; the number of the last."""
        node.load = batch.load
        for token, delta in batch.deltas:
            if token in self.watchers:
                if delta is None:
                    self.watchers[token].close()
                else:
                    with suppress(anyio.WouldBlock, anyio.BrokenResourceError):
                        self.watchers[token].send_nowait(delta)
        by_flow: dict[str, list[OutboxItem]] = {}
        for item in batch.items:
            flow = node.flows.get(item.name)
            if item.number > acknowledged and flow is not None and flow.attempt == item.attempt:
                by_flow.setdefault(item.name, []).append(item)
        flows = [(node.flows[name], items) for name, items in by_flow.items()]
        await asyncio.gather(*(flow.commit(items) for flow, items in flows))
        return batch.items[-1].number if batch.items else acknowledged
