"""One gate for the gateways of all nodes: a pause holds them all, a resume names the weights to all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from rollcage.cluster.messages import GateState, NodeLost
from rollcage.gateway.pause import WAIT_S, CallGate, Running

if TYPE_CHECKING:
    from rollcage.cluster.nodes import ClusterNodes, Node
    from rollcage.gateway.replicas import Replicas

RETRY_S = 0.5


class ClusterGate(CallGate):
    """The head's own gate, which tells every node's."""

    def __init__(self, nodes: ClusterNodes, replicas: Replicas) -> None:
        super().__init__()
        self._nodes, self._replicas = nodes, replicas
        self._how: Running = "finish"

    @property
    def running(self) -> int:
        """Calls that run, on all nodes, as they last told."""
        return super().running + sum(node.load.calls for node in self._nodes.all.values())

    @property
    def waiting(self) -> int:
        """Calls that wait for the end of a pause, on all nodes, as they last told."""
        return super().waiting + sum(node.load.waiting for node in self._nodes.all.values())

    @property
    def state(self) -> GateState:
        """As nodes are told."""
        where, named = self._replicas.addresses, self._replicas.named
        return GateState(self.paused, self._how, self._wait_s, self.policy_version, self.generation, where, named)

    async def pause(self, running: Running = "finish", *, wait_s: float = WAIT_S) -> None:
        """Let no call begin on any node; returns when none runs any more."""
        self._how, self._wait_s = running, wait_s
        self._open.clear()
        async with anyio.create_task_group() as tasks:
            for node in list(self._nodes.all.values()):
                tasks.start_soon(self._tell, node)
            await super().pause(running, wait_s=wait_s)

    def resume(self, policy_version: str = "") -> None:
        """Let calls begin again, everywhere."""
        super().resume(policy_version)
        self.tell_all()

    def tell_all(self) -> None:
        """Let every node know how things are."""
        for node in list(self._nodes.all.values()):
            self._nodes.tasks.start_soon(self._tell, node)

    async def _tell(self, node: Node) -> None:
        """A node that begins or is lost meanwhile needs no word: it is told when it joins."""
        while node.state in ("ready", "draining"):
            try:
                await node.link.gate(self.state)
            except TimeoutError:
                await anyio.sleep(RETRY_S)
            except NodeLost:
                return
            else:
                return
