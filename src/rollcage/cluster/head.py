"""Runs a runner's rollouts on the nodes of a cluster: queue, log, groups and batches stay at the head.

Each node is asked for news all the time; what it answers is put into the log, and acknowledged with the next question.
A node is lost when its process ended (its lifeline broke, or Ray says so), or when it could not be reached until its
lease had run out. Then nothing more of it is taken, so what it ran can begin anew elsewhere.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import SecretStr

from rollcage.cluster.flow import Flow
from rollcage.cluster.gate import ClusterGate
from rollcage.cluster.goods import Goods
from rollcage.cluster.messages import Hello, Load, NodeLink, NodeLost, NodeNews, NodeSource, Order, Parcel, Welcome
from rollcage.cluster.options import Cluster, NodeInfo
from rollcage.cluster.view import write_view
from rollcage.errors import StoreError
from rollcage.events import Ended, Requeued
from rollcage.gateway.live import Delta
from rollcage.rollout.ending import ended_by
from rollcage.runner import Registry
from rollcage.runner.executor import Execution, InThisProcess
from rollcage.runner.queue import FairQueue
from rollcage.schema.nodes import NodeView
from rollcage.settings import EndpointSettings, OtlpSettings, Settings
from rollcage.types import Job, Outcome

LOOK_S = 1.0
"""How often Ray is asked which nodes there are."""
START_S = 300.0
"""How long a node may take to begin."""
MOST_ATTEMPTS = 5
"""So often a rollout is begun whose node is lost: one that brings its nodes down must not bring all of them down."""
RECENT = 8
"""Packed layers that are kept for the next node."""


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


class Head:
    """The nodes, and who runs where. An `Executor` for a `Runner`; use `Cluster.open`."""

    def __init__(
        self, settings: Settings, options: Cluster, source: NodeSource, registry: Registry, goods: Goods
    ) -> None:
        self._settings, self._options, self._source = settings, options, source
        self._registry, self._goods = registry, goods
        self._here = InThisProcess(registry.gateway)
        self.nodes: dict[str, Node] = {}
        """Those that are attended to, by Ray's id."""
        self._problems: dict[str, tuple[int, float, str]] = {}
        """Nodes that could not be used: how often, until when they are left alone, and why."""
        self._queue: FairQueue | None = None
        self._cap = 0
        self._changed = anyio.Event()
        self._watchers: dict[str, MemoryObjectSendStream[Delta]] = {}
        self._packed: dict[str, object] = {}
        self._packing = anyio.Lock()
        self._marker = f"cluster/{secrets.token_hex(8)}"
        self.tasks: TaskGroup
        self._known: frozenset[str] = frozenset()
        self.replicas = registry.gateway.replicas
        self.gate = registry.gateway.gate = ClusterGate(self)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings, options: Cluster, source: NodeSource, registry: Registry, goods: Goods
    ) -> AsyncIterator[Head]:
        """A cluster for as long as the block lasts; then its nodes are told to end."""
        head = cls(settings, options, source, registry, goods)
        marker = settings.home / head._marker
        marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        marker.touch()
        try:
            async with anyio.create_task_group() as tasks:
                head.tasks = tasks
                tasks.start_soon(head._look)
                try:
                    yield head
                finally:
                    tasks.cancel_scope.cancel()
        finally:
            marker.unlink(missing_ok=True)

    # What the runner asks for.

    def attach(self, queue: FairQueue) -> None:
        """As many at once as the nodes have places, but never more than the queue was made for."""
        self._queue, self._cap = queue, queue.at_once
        self._tell()

    async def run(self, rollout: Execution) -> None:
        """Run it on a node, on another one where that is lost before the agent began; at last log its end."""
        if getattr(rollout.deps.agent, "internal", False) or (near(rollout.job) and not self._near()):
            await self._here.run(rollout)
            return
        flow: Flow | None = None
        try:
            wanted = await self._goods.wanted(rollout.job, rollout.deps)
            while flow is None or flow.lost:
                if flow is not None:
                    await rollout.log(Requeued(owner=rollout.owner, previous=rollout.owner))
                flow = await self._attempt(rollout, wanted, 1 if flow is None else flow.attempt + 1)
                if flow.lost and (flow.agent_began or flow.attempt >= MOST_ATTEMPTS):
                    error = f"crashed: its node was lost: {flow.lost}"
                    await rollout.log(Ended(outcome=Outcome.CRASHED, error=error, error_code="crashed"))
                    return
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                error = "aborted: stopped on request"
                with suppress(StoreError):  # its end is in the log already
                    await rollout.log(Ended(outcome=Outcome.ABORTED, error=error, error_code="aborted"))
            raise
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - as a rollout in this process ends
            await rollout.log(ended_by(error))
            return
        if flow.error is not None:
            raise flow.error

    async def watch(self, name: str) -> AsyncIterator[Delta]:
        """What models say to a rollout, on whichever node."""
        node = next((node for node in self.nodes.values() if name in node.flows), None)
        if node is None:
            async for delta in self._here.watch(name):
                yield delta
            return
        token = secrets.token_hex(8)
        self._watchers[token], received = anyio.create_memory_object_stream[Delta](1000)
        try:
            with suppress(NodeLost, TimeoutError):
                await node.link.watch(token, name)
                async with received:
                    async for delta in received:
                        yield delta
        finally:
            self._watchers.pop(token).close()

    def nodes_view(self) -> list[NodeView]:
        """The nodes, as they are shown."""
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
            for node in self.nodes.values()
        ]
        left = {key: why for key, (_, _, why) in self._problems.items() if key in self._known - self.nodes.keys()}
        return found + [
            NodeView(id=key, address="", state="unusable", places=0, problem=why) for key, why in left.items()
        ]

    # One rollout on one node.

    async def _attempt(self, rollout: Execution, wanted: Sequence[str], attempt: int) -> Flow:
        """Run it on one node to its end, or to the node's."""
        node = await self._take(rollout.job, wanted)
        flow = Flow(rollout, attempt)
        try:
            try:
                await self._supply(node, wanted)
            except (NodeLost, TimeoutError) as error:
                flow.lose(f"it could not be sent what the rollout needs: {error}")
                return flow
            if node.state == "lost":
                flow.lose("it ended")
                return flow
            node.flows[rollout.name] = flow
            self.tasks.start_soon(self._order, node, flow)
            try:
                await flow.over.wait()
            except anyio.get_cancelled_exc_class():
                with anyio.CancelScope(shield=True):
                    await self._stop(node, flow)
                    await flow.over.wait()
                raise
            if flow.error is not None:
                await self._stop(node, flow)
            return flow
        finally:
            node.flows.pop(rollout.name, None)
            node.taken -= 1
            self._tell()

    async def _take(self, job: Job, wanted: Sequence[str]) -> Node:
        """A place on the node that suits best, as soon as there is one."""
        only_near = near(job)
        while True:
            free = [node for node in self.nodes.values() if node.free and (node.info.here or not only_near)]
            if free:
                node = min(free, key=lambda node: node.strain(wanted))
                node.taken += 1
                return node
            await self._changed.wait()

    async def _supply(self, node: Node, wanted: Sequence[str]) -> None:
        """See to it that the node has what it needs; each thing is sent to it once."""
        if node.shared or node.holds.issuperset(wanted):
            return
        async with node.supplying:
            lacking = await node.link.missing(frozenset(wanted) - node.holds)
            for name in wanted:
                if name in lacking:
                    await node.link.receive(name, await self._archive(name))
            node.holds.update(wanted)

    async def _archive(self, name: str) -> object:
        async with self._packing:  # nodes that begin together want the same
            if name not in self._packed:
                self._packed[name] = self._source.stored(await self._goods.packed(name))
                while len(self._packed) > RECENT:
                    del self._packed[next(iter(self._packed))]
            return self._packed[name]

    async def _order(self, node: Node, flow: Flow) -> None:
        """Have the node run it; what comes of it comes with the news."""
        rollout, key = flow.rollout, flow.rollout.job.model.key.get_secret_value()
        model = rollout.job.model.model_copy(update={"key": SecretStr("")})
        job = rollout.job.model_copy(update={"model": model})
        try:
            await node.link.run(Order(rollout.name, flow.attempt, job, rollout.deps.generation or 0), key)
        except (NodeLost, TimeoutError):
            return  # whoever asks for news finds out what is to be done
        except RuntimeError as error:
            flow.lose(f"the node could not run it: {error}")

    async def _stop(self, node: Node, flow: Flow) -> None:
        with suppress(NodeLost, TimeoutError):
            await node.link.abort(flow.rollout.name, flow.attempt)

    # The nodes.

    async def _look(self) -> None:
        """Use every node that Ray has, as it comes."""
        while True:
            with suppress(TimeoutError):  # the nodes that are known go on
                found = {info.id: info for info in await self._source.nodes()}
                self._known = frozenset(found)
                for key, info in found.items():
                    self._consider(key, info)
            before = self.replicas.addresses
            self.replicas.refresh()
            if before != self.replicas.addresses:
                self.gate.tell_all()
            write_view(self._settings.home, self.nodes_view())
            await anyio.sleep(LOOK_S)

    def _consider(self, key: str, info: NodeInfo) -> None:
        if key in self.nodes:
            node = self.nodes[key]
            if node.state in ("ready", "draining") and (node.state == "draining") is not info.draining:
                node.state = "draining" if info.draining else "ready"
                self._tell()
            return
        suits = self._options.labels.items() <= info.labels.items() and not info.draining
        places = self._places(info) if suits else 0
        if places and time.monotonic() >= self._problems.get(key, (0, 0.0, ""))[1]:
            self.nodes[key] = node = Node(info, places, self._source.connect(info, places))
            self.tasks.start_soon(self._attend, node)

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
            if self.gate.paused or self.gate.generation or self.replicas.addresses:
                await node.link.gate(self.gate.state)
            node.state = "ready"
            self._problems.pop(key, None)
            self._tell()
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
            del self.nodes[key]
            for flow in list(node.flows.values()):
                flow.lose(f"{node.info.address}: {why}")
            self._tell()

    def _hello(self, node: Node) -> Hello:
        bare = {"endpoints": dict[str, EndpointSettings](), "server_key": SecretStr(""), "otlp": OtlpSettings()}
        options = self._options
        home = options.node_home or (str(self._settings.home) if options.address == "local" else "")
        settings = self._settings.model_copy(update=bare)
        return Hello(node.places, options.lease_s, settings, home, self._marker, options.warm)

    async def _until_lost(self, node: Node, welcome: Welcome) -> str:
        """Take its news until it is lost; why it is."""
        why: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def end_with(work: Any) -> None:
                why.append(await work)
                tasks.cancel_scope.cancel()

            if welcome.port:
                tasks.start_soon(end_with, self._lifeline(node, welcome))
            tasks.start_soon(end_with, self._follow(node, lifeline=bool(welcome.port)))
        return why[0]

    async def _lifeline(self, node: Node, welcome: Welcome) -> str:
        """Hold a connection to its process: it breaks at once when that ends."""
        try:
            reader, writer = await asyncio.open_connection(node.info.address, welcome.port)
        except OSError:
            await anyio.sleep_forever()  # a firewall, say: Ray's word is enough
        try:
            writer.write(welcome.secret)
            await reader.read(1)
        except OSError:
            pass
        finally:
            writer.close()
        return "its process ended"

    async def _follow(self, node: Node, *, lifeline: bool) -> str:
        acknowledged, heard, lease_s = 0, time.monotonic(), self._options.lease_s
        while True:
            try:
                batch = await node.link.exchange(acknowledged)
            except TimeoutError:
                if time.monotonic() - heard > lease_s / 2:
                    # It may have heard the last question: it is asked no more, and stops when its lease is over.
                    node.state = "unreachable"
                    self._tell()
                    await anyio.sleep(lease_s + LOOK_S)
                    return f"it could not be reached for {time.monotonic() - heard:.0f} s"
                await anyio.sleep(lease_s / 50)
                continue
            except NodeLost as error:
                if lifeline:
                    # A process that ended breaks its lifeline at once; one that is out of reach runs until its lease.
                    await anyio.sleep(max(0.0, heard + lease_s + LOOK_S - time.monotonic()))
                return str(error)
            heard = time.monotonic()
            with anyio.CancelScope(shield=True):
                acknowledged = await self._taken(node, batch, acknowledged)

    async def _taken(self, node: Node, batch: NodeNews, acknowledged: int) -> int:
        """Put a node's news into the log; the number of the last."""
        node.load = batch.load
        for token, delta in batch.deltas:
            if token in self._watchers:
                if delta is None:
                    self._watchers[token].close()
                else:
                    with suppress(anyio.WouldBlock, anyio.BrokenResourceError):
                        self._watchers[token].send_nowait(delta)
        by_flow: dict[str, list[Parcel]] = {}
        for parcel in batch.parcels:
            flow = node.flows.get(parcel.name)
            if parcel.number > acknowledged and flow is not None and flow.attempt == parcel.attempt:
                by_flow.setdefault(parcel.name, []).append(parcel)
        flows = [(node.flows[name], parcels) for name, parcels in by_flow.items()]
        await asyncio.gather(*(flow.commit(parcels) for flow, parcels in flows))
        return batch.parcels[-1].number if batch.parcels else acknowledged

    # Small things.

    def _tell(self) -> None:
        """Something changed: let those who wait for a place look again."""
        if self._queue is not None:
            places = sum(node.places for node in self.nodes.values() if node.state == "ready")
            busy = sum(node.taken for node in self.nodes.values() if node.state != "ready")
            self._queue.resize(min(self._cap, places + busy))
        self._changed.set()
        self._changed = anyio.Event()

    def _near(self) -> bool:
        return any(node.info.here for node in self.nodes.values())


def near(job: Job) -> bool:
    """Whether its model answers on this machine alone."""
    host = urlsplit(job.model.base_url).hostname or ""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
