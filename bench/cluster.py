"""Measures the head of a cluster: entries per second beside plain appends, and where it saturates with many nodes.

    python bench/cluster.py [--json] [--nodes 1000] [--places 64] [--seconds 20] [--live 4000]

`entries`: the same turns and events appended to a log by this process, and sent through a node's outbox (pickled, in
batches, acknowledged) into a log; processor time of this process, so Ray's own share (1 ms a batch) is not in it.
Rollouts have system prompt and tools in common; the rest is each one's own.
`simulation`: the real dispatcher, queue and log; nodes are stubs in this process, whose rollouts log what a short
agent's do, as fast as the head takes it. It says how many rollouts a second one head can take to their ends.
With `--live N` as many are under way all the time, each takes `--rollout-seconds` on the average, and no two log the
same content: how busy the head is then, and how long a turn waits until it is on the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import xor
from pathlib import Path
from typing import Any

import anyio

from rollcage.agents.nop import Nop
from rollcage.cluster.content import ContentStore
from rollcage.cluster.flow import Flow
from rollcage.cluster.head import Head
from rollcage.cluster.messages import GateState, Hello, Load, NodeNews, Order, Welcome
from rollcage.cluster.options import Cluster, NodeInfo
from rollcage.cluster.outbox import EventSender, Outbox
from rollcage.events import AgentEmitted, Ended, Event, Queued, StageEnded, StageStarted, TurnEnded
from rollcage.gateway import Gateway
from rollcage.rollout.run import RolloutDeps
from rollcage.runner import Registry, Runner, StartOptions
from rollcage.runner.executor import Execution
from rollcage.sandboxes.images import ImageStore
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.sandboxes.layers import LayerStore
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.store.packed import EventPacker, Packed
from rollcage.store.work import WorkStore
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome, SandboxSpec, Stage, Task
from store import conversation

JOB = Job(task=Task(instruction="bench"), model=NO_MODEL, agent=AgentSpec(name="nop"), sandbox=SandboxSpec(backend="x"))
STAGES = (Stage.PROVISION, Stage.SETUP, Stage.AGENT, Stage.VERIFY)


def short_rollout(turns: int, sample: int = 0) -> list[Event]:
    """What a rollout of so many turns logs."""
    said: list[Event] = []
    for turn in conversation(turns, tokens=100, sample=sample):
        said += [TurnEnded(turn=turn), AgentEmitted(raw={"type": "text", "text": "x" * 400}), AgentEmitted()]
    events: list[Event] = []
    for stage in STAGES:
        inside = said if stage is Stage.AGENT else []
        events += [StageStarted(stage=stage), *inside, StageEnded(stage=stage, seconds=1.0)]
    return [*events, Ended(outcome=Outcome.FINISHED)]


async def entries(folder: Path, turns: int, rollouts: int) -> dict[str, float]:
    """Processor time per entry: appended here, and through an outbox."""
    logged = {f"r{number}": short_rollout(turns, number) for number in range(1, rollouts + 1)}

    async def plain(store: Store, name: str) -> None:
        await store.append(name, Queued(job=JOB))
        for event in logged[name]:
            await store.append(name, event)

    async def sent(store: Store, outbox: Outbox, name: str) -> Flow:
        await store.append(name, Queued(job=JOB))

        async def log(event: Event | Packed) -> None:
            await store.append(name, event)

        deps = RolloutDeps(InProcessProvider(), Nop(), None)  # type: ignore[arg-type]
        flow = Flow(Execution(name, JOB, deps, log, ""), 1)
        flows[name] = flow
        sender = EventSender(outbox, name, 1)
        for event in logged[name]:
            await sender.send(event)
        await flow.over.wait()
        return flow

    async def follow(outbox: Outbox) -> None:
        while True:
            items = await outbox.news(10)
            by_name: dict[str, list[Any]] = {}
            for item in items:
                by_name.setdefault(item.name, []).append(item)
            await asyncio.gather(*(flows[name].commit(some) for name, some in by_name.items()))
            if items:
                outbox.acknowledge(items[-1].number)

    found: dict[str, float] = {}
    flows: dict[str, Flow] = {}
    for kind in ("plain", "sent", "plain", "sent"):
        async with Store.open(folder / f"{kind}{len(found)}{time.time()}.db") as store:
            began = time.process_time()
            async with anyio.create_task_group() as tasks:
                if kind == "sent":
                    outbox = Outbox()
                    follower = asyncio.create_task(follow(outbox))
                for name in logged:
                    tasks.start_soon(*((plain, store, name) if kind == "plain" else (sent, store, outbox, name)))
            spent = time.process_time() - began
            if kind == "sent":
                follower.cancel()
        found[kind] = min(spent, found.get(kind, spent))
    number = sum(len(events) + 1 for events in logged.values())
    return {
        "entries": number,
        "plain_per_cpu_second": number / found["plain"],
        "sent_per_cpu_second": number / found["sent"],
        "ratio": found["plain"] / found["sent"],
    }


@dataclass
class Pace:
    """How rollouts of stubs go, and what was seen of them."""

    events: Sequence[Event | Packed]
    """What each logs: turns as a node packs them."""
    seconds: float = 0.0
    """How long one takes on the average; 0: as fast as the head takes it."""
    anywhere: bool = True
    """Whether rollouts begin in the middle, as if they had been under way: the first ones do."""
    waits: list[float] = field(default_factory=list)
    """How long turns took to be on the head's disk."""
    exchanges: int = 0

    @classmethod
    def of(cls, turns: int, seconds: float) -> Pace:
        """Of so many turns."""
        packer = EventPacker()
        return cls([packer.pack(e) if isinstance(e, TurnEnded) else e for e in short_rollout(turns)], seconds)

    def own(self, event: Event | Packed, salt: bytes) -> Event | Packed:
        """The same with content that no other rollout has, but for what the first turn begins with."""
        if not isinstance(event, Packed) or event is next(e for e in self.events if isinstance(e, Packed)):
            return event
        blobs = {bytes(map(xor, digest, salt)): content for digest, content in event.blobs.items()}
        return event._replace(blobs=blobs)


class StubNode:
    """A node whose rollouts log what they have."""

    def __init__(self, pace: Pace) -> None:
        self._pace, self._outbox, self._running = pace, Outbox(), 0

    async def open(self, hello: Hello) -> Welcome:
        from importlib.metadata import version

        return Welcome(version("rollcage"), 0, b"", True, frozenset())

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        self._pace.exchanges += 1
        self._outbox.acknowledge(acknowledged)
        return NodeNews(heard + 1, await self._outbox.news(15 if self._pace.seconds else 3), Load(self._running), [])

    async def run(self, order: Order, key: str) -> None:
        self._running += 1
        pace = self._pace
        salt = random.randbytes(16)
        turns = sum(isinstance(event, Packed) for event in pace.events)
        left_out = int((random.random() if pace.seconds and pace.anywhere else 0) * turns)
        for event in pace.events:
            turn = isinstance(event, Packed)
            left_out -= turn
            if left_out >= 0 and isinstance(event, Packed | AgentEmitted):
                continue
            if turn and pace.seconds:
                await asyncio.sleep(random.expovariate(turns / pace.seconds))
            began = time.monotonic()
            number = await self._outbox.put(order.name, order.attempt, pickle.dumps(pace.own(event, salt), 5))
            if turn and pace.seconds:
                await self._outbox.delivered(number)
                pace.waits.append(time.monotonic() - began)
        self._running -= 1

    async def abort(self, name: str, attempt: int) -> None:
        await self._outbox.put(name, attempt, pickle.dumps(Ended(outcome=Outcome.ABORTED, error="aborted"), 5))

    async def gate(self, state: GateState) -> None: ...
    async def watch(self, token: str, name: str) -> None: ...
    async def receive(self, name: str, pieces: object) -> None: ...
    async def missing(self, names: frozenset[str]) -> frozenset[str]:
        return frozenset()

    def end(self) -> None: ...


class StubNodes:
    """Many of them."""

    def __init__(self, nodes: int, places: int, pace: Pace) -> None:
        self._infos = [NodeInfo(id=f"n{n}", address=f"10.0.0.{n}", resources={"CPU": places}) for n in range(nodes)]
        self._pace = pace

    async def nodes(self) -> Sequence[NodeInfo]:
        return self._infos

    async def ask_for(self, rollouts: int) -> None: ...
    async def served(self, app: str) -> Sequence[str]:
        return ()

    def connect(self, node: NodeInfo, places: int) -> StubNode:
        return StubNode(self._pace)

    def stored(self, pieces: list[bytes]) -> object:
        return pieces


async def simulation(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Rollouts that one head takes to their ends, with so many nodes and places."""
    nodes, places, live = options.nodes, options.places, options.live
    pace = Pace.of(options.turns, options.rollout_seconds if live else 0.0)
    settings = Settings(home=folder)
    trees, work = WorkStore(folder / "trees", 1), WorkStore(folder / "work", 1)
    content = ContentStore(ImageStore(folder / "images", LayerStore(folder / "layers")), trees, work)
    cluster = Cluster(resources={"CPU": 1}, places=places, lease_s=600)
    async with (
        Gateway.open() as gateway,
        Store.open(folder / "simulation.db") as store,
        Head.open(
            settings,
            cluster,
            StubNodes(nodes, places, pace),
            registry := Registry({"x": InProcessProvider()}, {"nop": Nop()}, gateway),
            content,
        ) as head,
        Runner.open(store, registry, at_once=nodes * places, executor=head) as runner,
    ):
        while sum(node.state == "ready" for node in head.nodes.values()) < nodes:
            await anyio.sleep(0.1)
        ended = 0

        async def keep_busy(together: int) -> None:
            nonlocal ended
            while True:
                for rollout_id in await runner.start_all([(JOB, StartOptions())] * together):
                    await runner.over(str(rollout_id))
                    ended += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(live or min(8, nodes)):
                tasks.start_soon(keep_busy, 1 if live else 16)
            while live and sum(len(node.flows) for node in head.nodes.values()) < 0.98 * live:
                await anyio.sleep(0.2)
            await anyio.sleep(5)  # what they all logged at their beginning
            pace.anywhere, ended, pace.exchanges = False, 0, 0
            pace.waits.clear()
            began, cpu = time.monotonic(), time.process_time()
            await anyio.sleep(options.seconds)
            wall, spent = time.monotonic() - began, time.process_time() - cpu
            tasks.cancel_scope.cancel()
        found = {
            "nodes": nodes,
            "places": places,
            "entries_per_rollout": len(pace.events) + 1,
            "rollouts": ended,
            "cpu_ms_per_rollout": 1000 * spent / max(1, ended),
            "exchanges_per_rollout": pace.exchanges / max(1, ended),
            "wall_s": wall,
            "rollouts_of_five_minutes_that_keep_one_core_busy": 300 * ended / spent,
        }
        if live:
            waits = statistics.quantiles(pace.waits, n=100)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            under_way = sum(len(node.flows) for node in head.nodes.values())
            found |= {"live": under_way, "cores_busy": spent / wall, "turns_per_second": len(pace.waits) / wall}
            found |= {"turn_wait_p50_s": waits[49], "turn_wait_p99_s": waits[98], "memory_mb": peak}
    return found


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sim").mkdir()
        return {
            "entries": await entries(Path(folder), options.turns, 8),
            "simulation": await simulation(Path(folder) / "sim", options),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--live", type=int, default=0)
    parser.add_argument("--rollout-seconds", type=float, default=300.0)
    options = parser.parse_args()
    found = anyio.run(measure, options, backend_options={"use_uvloop": True})
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for part, numbers in found.items():
        print(part, *(f"  {name}: {value:,.2f}" for name, value in numbers.items()), sep="\n")


if __name__ == "__main__":
    main()
