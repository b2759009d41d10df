"""Ray's side of a cluster: which nodes there are, and one actor on each.

An actor is never restarted by Ray: a new process must not be taken for the one that was lost. The head makes a new one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import anyio
from anyio import to_thread

from rollcage.cluster.messages import GateState, Hello, NodeLost, NodeNews, Order, Welcome
from rollcage.cluster.node import NodeHost
from rollcage.cluster.options import NodeInfo
from rollcage.settings import ray_is_encrypted

MOST_ASKED = 10_000
"""Rollouts that an autoscaler is asked to make room for: it looks at each of them."""
RAYLET_S = 0.5
"""How often a node looks whether its raylet is there."""
SMALL_CALL_S = 30.0
"""How long a node may take to answer what is answered at once."""


class NodeActor:
    """What runs on a node: a `NodeHost` in a process of Ray's."""

    def __init__(self) -> None:
        import ray

        self._host = NodeHost(ray.util.get_node_ip_address(), streams=not ray_is_encrypted())
        self._raylet = os.getppid()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self, hello: Hello) -> Welcome:
        """Begin; once everything has ended there, this process does."""
        welcome = await self._host.open(hello)
        self._tasks = [asyncio.create_task(self._end()), asyncio.create_task(self._end_with_raylet())]
        return welcome

    async def _end(self) -> None:
        await self._host.ended()
        os._exit(0)

    async def _end_with_raylet(self) -> None:
        """Stop once the raylet is gone that started this process. Ray ends an orphan only where init adopts it."""
        while os.getppid() == self._raylet:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(RAYLET_S)
        self._host.stop("its raylet ended")

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        """See `NodeHost`."""
        return await self._host.exchange(heard, acknowledged)

    async def run(self, order: Order, key: str) -> None:
        """See `NodeHost`."""
        await self._host.run(order, key)

    async def abort(self, name: str, attempt: int) -> None:
        """See `NodeHost`."""
        self._host.abort(name, attempt)

    async def gate(self, state: GateState) -> None:
        """See `NodeHost`."""
        await self._host.gate(state)

    async def watch(self, token: str, name: str) -> None:
        """See `NodeHost`."""
        self._host.watch(token, name)

    async def missing(self, names: frozenset[str]) -> frozenset[str]:
        """See `NodeHost`."""
        return self._host.missing(names)

    async def receive(self, name: str, pieces: Sequence[Any]) -> None:
        """Fetch what Ray's object store has."""
        await self._host.receive(name, list(await asyncio.gather(*pieces)))


class RayLink:
    """The head's way to one actor."""

    def __init__(self, actor: Any, lease_s: float) -> None:
        self._actor, self._lease_s = actor, lease_s
        # Asked several times a second, for ever: Ray's dashboard is to show rollouts.
        self._exchange = actor.exchange.options(enable_task_events=False)

    async def open(self, hello: Hello) -> Welcome:
        """Begin."""
        found: Welcome = await _answer(self._actor.open.remote(hello), None)
        return found

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        """News."""
        found: NodeNews = await _answer(self._exchange.remote(heard, acknowledged), self._lease_s / 2)
        return found

    async def run(self, order: Order, key: str) -> None:
        """Run a rollout; Ray's own tools show it by its id."""
        named = self._actor.run.options(name=f"rollout {order.name}")
        await _answer(named.remote(order, key), None)

    async def abort(self, name: str, attempt: int) -> None:
        """Stop it."""
        await _answer(self._actor.abort.remote(name, attempt), SMALL_CALL_S)

    async def gate(self, state: GateState) -> None:
        """Pause or resume."""
        await _answer(self._actor.gate.remote(state), None)

    async def watch(self, token: str, name: str) -> None:
        """Tell what models say."""
        await _answer(self._actor.watch.remote(token, name), SMALL_CALL_S)

    async def missing(self, names: frozenset[str]) -> frozenset[str]:
        """What it does not have."""
        found: frozenset[str] = await _answer(self._actor.missing.remote(names), SMALL_CALL_S)
        return found

    async def receive(self, name: str, pieces: object) -> None:
        """Have it fetch this."""
        await _answer(self._actor.receive.remote(name, pieces), None)

    def end(self) -> None:
        """End its process; boxes die with it."""
        import ray

        with suppress(Exception):
            ray.kill(self._actor)


async def _answer(ref: Any, seconds: float | None) -> Any:
    """What a call came to: TimeoutError where the node cannot be reached now, NodeLost where it never can."""
    from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError, WorkerCrashedError

    try:
        with anyio.fail_after(seconds):
            return await asyncio.wrap_future(ref.future())
    except (ActorUnavailableError, GetTimeoutError) as error:
        raise TimeoutError("the node cannot be reached") from error
    except RayTaskError as error:
        raise RuntimeError(str(error.cause)) from error
    except (RayActorError, WorkerCrashedError) as error:
        raise NodeLost("Ray says that its process died") from error


class RayNodes:
    """The nodes of the Ray that this process is connected to."""

    def __init__(self, resources: dict[str, float], lease_s: float, labels: dict[str, str]) -> None:
        """`resources`: what one rollout takes; `labels`: of the nodes that are used."""
        import ray

        self._ray, self._each, self._lease_s, self._labels = ray, resources, lease_s, labels
        self._asked_for = 0
        self._own = ray.util.get_node_ip_address()
        self._class = ray.remote(NodeActor)

    async def nodes(self) -> Sequence[NodeInfo]:
        """Those that are alive."""
        found: Sequence[NodeInfo] = await self._told(self._nodes)
        return found

    def _nodes(self) -> list[NodeInfo]:
        from ray._private import state

        free: dict[str, dict[str, float]] = state.available_resources_per_node()
        draining = state.state.get_draining_nodes()
        return [
            NodeInfo(
                id=node["NodeID"],
                address=node["NodeManagerAddress"],
                resources=free.get(node["NodeID"], {}),
                labels=node.get("Labels") or {},
                here=node["NodeManagerAddress"] == self._own,
                draining=node["NodeID"] in draining,
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    async def ask_for(self, rollouts: int) -> None:
        """Tell the autoscaler, if there is one: a standing request for the whole cluster, whatever runs there now."""
        rollouts = min(rollouts, MOST_ASKED)
        if rollouts != self._asked_for:
            await self._told(self._request, rollouts)
            self._asked_for = rollouts

    def _request(self, rollouts: int) -> None:
        from ray.autoscaler.sdk import request_resources

        more = {"bundle_label_selectors": [self._labels] * rollouts} if self._labels else {}
        request_resources(bundles=[self._each] * rollouts, **more)

    async def served(self, app: str) -> Sequence[str]:
        """By the controller of Ray Serve: replicas where they take requests themselves, else the proxies."""
        found: Sequence[str] = await self._told(self._targets, app)
        return found

    def _targets(self, app: str) -> list[str]:
        controller = self._ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        groups = self._ray.get(controller.get_target_groups.remote(app), timeout=SMALL_CALL_S)
        of_app = [each for each in groups if each.protocol == "HTTP" and each.app_name in ("", app)]
        return [f"http://{target.ip}:{target.port}" for each in of_app for target in each.targets]

    async def _told(self, ask: Callable[..., Any], *about: Any) -> Any:
        try:
            return await to_thread.run_sync(ask, *about)
        except Exception as error:
            # Ray has no one word for a head of its own that does not answer.
            raise TimeoutError(f"Ray does not tell: {error}") from error

    def connect(self, node: NodeInfo, places: int) -> RayLink:
        """An actor on that node, which holds what so many places take."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        held = {name: need * places for name, need in self._each.items()}
        actor = self._class.options(
            num_cpus=held.pop("CPU", 0),
            num_gpus=held.pop("GPU", 0),
            memory=held.pop("memory", None),
            resources=held,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            max_concurrency=2 * places + 64,
            max_restarts=0,
            max_task_retries=0,
        ).remote()
        return RayLink(actor, self._lease_s)

    def stored(self, pieces: list[bytes]) -> object:
        """In Ray's object store, from which nodes fetch it from each other."""
        return [self._ray.put(piece) for piece in pieces]
