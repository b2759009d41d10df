"""Runs a runner's rollouts on the nodes of a cluster: queue, log, groups and batches stay at the head."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import anyio
from pydantic import SecretStr

from rollcage.cluster.content import ContentStore
from rollcage.cluster.flow import Flow
from rollcage.cluster.messages import NodeLost, NodeSource, Order
from rollcage.cluster.nodes import ClusterNodes, Node
from rollcage.cluster.options import Cluster
from rollcage.errors import StoreError
from rollcage.events import Ended, Requeued
from rollcage.gateway import Gateway
from rollcage.gateway.live import Delta
from rollcage.rollout.ending import ended_by
from rollcage.runner import Registry
from rollcage.runner.executor import Execution, InThisProcess
from rollcage.runner.queue import FairQueue
from rollcage.schema.nodes import NodeView
from rollcage.settings import Settings
from rollcage.types import Job, Outcome

MOST_ATTEMPTS = 5
"""So often a rollout is begun whose node is lost: one that brings its nodes down must not bring all of them down."""
RECENT = 8
"""Packed layers that are kept for the next node."""


class Head:
    """The nodes, and who runs where. An `Executor` for a `Runner`; use `Cluster.open`."""

    def __init__(self, source: NodeSource, nodes: ClusterNodes, gateway: Gateway, content: ContentStore) -> None:
        self._source, self._content, self._members = source, content, nodes
        self._here = InThisProcess(gateway)
        self.nodes = nodes.all
        """Those that are attended to, by Ray's id."""
        self._queue: FairQueue | None = None
        self._cap = 0
        self._changed = anyio.Event()
        self._packed: dict[str, object] = {}
        self._packing = anyio.Lock()
        nodes.wanted, nodes.on_change = self._wanted, self._tell

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings, options: Cluster, source: NodeSource, registry: Registry, content: ContentStore
    ) -> AsyncIterator[Head]:
        """A cluster for as long as the block lasts; then its nodes are told to end."""
        nodes = ClusterNodes(settings, options, source, registry.gateway)
        head = cls(source, nodes, registry.gateway, content)
        async with nodes.open():
            yield head

    # What the runner asks for.

    def attach(self, queue: FairQueue) -> None:
        """As many at once as the nodes have places, but never more than the queue was made for."""
        self._queue, self._cap = queue, queue.at_once
        self._tell()

    async def run(self, rollout: Execution) -> None:
        """Run it on a node, on another one where that is lost before the agent began; at last log its end."""
        if near(rollout.job) and not self._near():
            await self._here.run(rollout)
            return
        flow: Flow | None = None
        try:
            wanted = await self._content.wanted(rollout.job, rollout.deps)
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
        self._members.watchers[token], received = anyio.create_memory_object_stream[Delta](1000)
        try:
            with suppress(NodeLost, TimeoutError):
                await node.link.watch(token, name)
                async with received:
                    async for delta in received:
                        yield delta
        finally:
            self._members.watchers.pop(token).close()

    def nodes_view(self) -> list[NodeView]:
        """The nodes, as they are shown."""
        return self._members.view()

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
            self._members.tasks.start_soon(self._order, node, flow)
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
                self._packed[name] = self._source.stored(await self._content.packed(name))
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

    # Small things.

    def _wanted(self) -> int:
        return self._queue.running + self._queue.waiting if self._queue is not None else 0

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
