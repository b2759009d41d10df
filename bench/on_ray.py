"""Measures rollouts on a real Ray of three nodes on this machine: their cost, and how soon a lost node's begin anew.

    python bench/on_ray.py [--json] [--pairs 10] [--losses 10] [--entries 6]

`pairs`: the same rollout of OpenCode with a scripted model, by the plain runner and through Ray, in turns; the ratio is
that within pairs. CPU is that of this process, of all of Ray and of the boxes; what Ray uses while nothing runs is
measured apart, and left out. `losses`: a node's raylet and its workers are killed -9 while rollouts are in SETUP.
`entries`: what 32 rollouts of 20 turns log, appended here and sent by a process of Ray's into a log here, in turns; the
ratio within pairs of entries per second of processor time (of both processes, and of this one) and of wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio

import rollcage
from cluster import JOB, short_rollout
from rollcage.agents.nop import Nop
from rollcage.cluster import Cluster
from rollcage.cluster.flow import Flow
from rollcage.cluster.messages import Load, NodeNews, OutboxItem
from rollcage.cluster.outbox import EventSender, Outbox
from rollcage.cluster.ray_nodes import RayLink
from rollcage.events import Event, Queued, Requeued, StageStarted
from rollcage.rollout.run import RolloutDeps
from rollcage.runner import Runner
from rollcage.runner.executor import Execution
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.types import NO_MODEL, AgentSpec, Endpoint, Job, Outcome, Stage, Task
from rollout import SCRIPT, TASK, Cost, counted, scripted_model

PLACES = 4


@contextmanager
def raylets() -> Iterator[Any]:
    """Three nodes."""
    os.environ |= {"RAY_raylet_start_wait_time_s": "120", "RAY_USAGE_STATS_ENABLED": "0"}
    warnings.simplefilter("ignore")
    import ray
    from ray.cluster_utils import Cluster as Raylets

    head = {"num_cpus": 1, "include_dashboard": False, "resources": {"place": PLACES}}
    found = Raylets(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            found.add_node(num_cpus=1, resources={"place": PLACES})
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


async def ready(runner: Runner, nodes: int) -> None:
    """Wait for so many."""
    while sum(node.state == "ready" for node in runner.nodes) < nodes:
        await anyio.sleep(0.1)


async def pairs(plain: Runner, through: Runner, endpoint: Endpoint, cost: Cost, number: int) -> dict[str, float]:
    """What one rollout costs both ways."""
    job = Job(task=TASK, model=endpoint)

    async def one(runner: Runner) -> tuple[float, float]:
        async def work() -> None:
            rollout = await runner.wait(await runner.start(job))
            assert rollout.outcome is Outcome.FINISHED and len(rollout.turns) >= len(SCRIPT), rollout.error

        return await cost.caged(work)

    for runner in (plain, *[through] * 6):  # every node has been used once
        await one(runner)
    used, began = cost.used(), time.perf_counter()
    await anyio.sleep(10)
    idle = (cost.used() - used) / (time.perf_counter() - began)
    costs: dict[str, list[tuple[float, float]]] = {"plain": [], "ray": []}
    for turn in range(number):
        for name, runner in (("plain", plain), ("ray", through))[:: 1 if turn % 2 else -1]:
            wall, cpu = await one(runner)
            costs[name].append((wall, cpu - idle * wall))
    both = list(zip(costs["plain"], costs["ray"], strict=True))
    ratios = statistics.quantiles([ray[1] / alone[1] for alone, ray in both], n=4)
    return {
        "pairs": number,
        "cpu_plain_s": statistics.median(cpu for _, cpu in costs["plain"]),
        "cpu_ratio": ratios[1],
        "cpu_ratio_q1": ratios[0],
        "cpu_ratio_q3": ratios[2],
        "wall_plain_s": statistics.median(wall for wall, _ in costs["plain"]),
        "wall_added_ms": 1000 * statistics.median(ray[0] - alone[0] for alone, ray in both),
        "idle_ray_cores": idle,
    }


def kill(found: Any, node: Any) -> None:
    """End a node's processes all at once, as a machine dies."""
    raylet = node.all_processes["raylet"][0].process
    children = Path(f"/proc/{raylet.pid}/task/{raylet.pid}/children").read_text().split()
    for pid in (raylet.pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    found.remove_node(node, allow_graceful=False)


async def losses(found: Any, runner: Runner, store: Store, number: int) -> dict[str, float]:
    """From a node's end until its rollouts are in the queue again, and until they begin elsewhere."""
    task = Task(instruction="true", setup=("sleep 250",))
    job = Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"))
    requeued: list[float] = []
    again: list[float] = []

    async def until(rollout_id: str, seen: Callable[[Any], bool], since: int = 0) -> int:
        async for entry in store.follow(rollout_id):
            if entry.seq > since and seen(entry.event):
                return entry.seq
        raise RuntimeError(f"{rollout_id} ended")

    def stage(which: Stage) -> Callable[[Any], bool]:
        return lambda event: isinstance(event, StageStarted) and event.stage is which

    for _ in range(number):
        await ready(runner, 3)
        ids = [await runner.start(job) for _ in range(6)]
        for each in ids:
            await until(each, stage(Stage.SETUP))
        victim = random.choice(list(found.worker_nodes))
        lost = next(node.rollouts for node in runner.nodes if node.id == victim.node_id)
        began = time.time()

        async def watch(rollout_id: str, began: float) -> None:
            seen = await until(rollout_id, lambda event: isinstance(event, Requeued))
            requeued.append(time.time() - began)
            await until(rollout_id, stage(Stage.PROVISION), seen)
            again.append(time.time() - began)

        async with anyio.create_task_group() as tasks:
            for each in lost:
                tasks.start_soon(watch, each, began)
            await anyio.to_thread.run_sync(kill, found, victim)
        for each in ids:
            await runner.abort(each)
            await runner.over(each)
        found.add_node(num_cpus=1, resources={"place": PLACES})  # Ray starts nodes in the main thread only
    return {
        "nodes_killed": number,
        "rollouts": len(requeued),
        "requeued_median_s": statistics.median(requeued),
        "requeued_most_s": max(requeued),
        "begun_elsewhere_median_s": statistics.median(again),
        "begun_elsewhere_most_s": max(again),
    }


class Sender:
    """A node that has an outbox, and nothing else."""

    def __init__(self) -> None:
        self._outbox, self._number = Outbox(), 0
        self._logged: dict[str, list[Event]] = {}

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        self._outbox.acknowledge(acknowledged)
        self._number += 1
        return NodeNews(self._number, await self._outbox.news(10), Load(), [])

    async def prepare(self, names: Sequence[str], turns: int) -> None:
        """Make what rollouts of these names log."""
        self._logged = logged(names, turns)

    async def send(self) -> float:
        """Log it all; the processor time that it took."""
        began = time.process_time()

        async def one(name: str) -> None:
            sender = EventSender(self._outbox, name, 1)
            for event in self._logged[name]:
                await sender.send(event)

        await asyncio.gather(*map(one, self._logged))
        return time.process_time() - began


def logged(names: Sequence[str], turns: int) -> dict[str, list[Event]]:
    """What each says: they have system prompt and tools in common."""
    return {name: short_rollout(turns, sample) for sample, name in enumerate(names, 1)}


async def sent(store: Store, names: Sequence[str], turns: int) -> tuple[float, float, float]:
    """Processor time here and there, and wall time, from the first entry that another process sends to the last."""
    import ray

    actor = ray.remote(Sender).options(num_cpus=0, max_concurrency=8).remote()
    link = RayLink(actor, 600)
    await actor.prepare.remote(names, turns)
    flows = {}
    for name in names:
        await store.append(name, Queued(job=JOB))
        deps = RolloutDeps(InProcessProvider(), Nop(), None)  # type: ignore[arg-type]
        flows[name] = Flow(Execution(name, JOB, deps, partial(store.append, name), ""), 1)

    async def follow() -> None:
        heard = acknowledged = 0
        while True:
            news = await link.exchange(heard, acknowledged)
            by_name: dict[str, list[OutboxItem]] = {}
            for item in news.items:
                by_name.setdefault(item.name, []).append(item)
            await asyncio.gather(*(flows[name].commit(some) for name, some in by_name.items()))
            heard, acknowledged = news.number, news.items[-1].number if news.items else acknowledged

    cpu, wall = time.process_time(), time.perf_counter()
    follower = asyncio.create_task(follow())
    there = await actor.send.remote()
    found = time.process_time() - cpu, there, time.perf_counter() - wall
    follower.cancel()
    ray.kill(actor)
    return found


async def entries(folder: Path, number: int, turns: int = 20, rollouts: int = 32) -> dict[str, float]:
    """The log here beside the log through Ray."""
    names = [f"r{rollout}" for rollout in range(rollouts)]
    said: dict[str, list[Event]] = {}

    async def appended(store: Store, name: str) -> None:
        await store.append(name, Queued(job=JOB))
        for event in said[name]:
            await store.append(name, event)

    ratios: list[tuple[float, float, float]] = []
    for turn in range(number):
        said |= logged(names, turns)  # made anew: an event is packed faster the second time
        async with Store.open(folder / f"sent{turn}.db") as store:
            here, there, through = await sent(store, names, turns)
        async with Store.open(folder / f"appended{turn}.db") as store:
            cpu, wall = time.process_time(), time.perf_counter()
            await asyncio.gather(*(appended(store, name) for name in names))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        ratios.append((cpu / (here + there), cpu / here, wall / through))
    both, head, wall = (statistics.median(column) for column in zip(*ratios, strict=True))
    return {
        "entries": sum(len(events) + 1 for events in said.values()),
        "per_cpu_second_ratio": both,
        "per_cpu_second_of_the_head_ratio": head,
        "per_wall_second_ratio": wall,
    }


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    settings = Settings.from_environ()
    cluster = Cluster(resources={"place": 1}, lease_s=120, node_home=str(settings.home))
    with tempfile.TemporaryDirectory() as folder:
        async with scripted_model() as endpoint, counted() as cost:
            with raylets() as found:
                async with (
                    Store.open(Path(folder) / "plain.db") as plain_store,
                    Store.open(Path(folder) / "ray.db") as store,
                    rollcage.open_runner(settings=settings, store=plain_store) as plain,
                    rollcage.open_runner(settings=settings, store=store, cluster=cluster) as through,
                ):
                    await ready(through, 3)
                    result: dict[str, Any] = {}
                    if options.pairs:
                        result["pairs"] = await pairs(plain, through, endpoint, cost, options.pairs)
                        print(json.dumps(result), file=sys.stderr)
                    if options.entries:  # before nodes are killed: Ray would still place actors there
                        result["entries"] = await entries(Path(folder), options.entries)
                    if options.losses:
                        result["losses"] = await losses(found, through, store, options.losses)
                    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--losses", type=int, default=10)
    parser.add_argument("--entries", type=int, default=6)
    options = parser.parse_args()
    found = anyio.run(measure, options)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for part, numbers in found.items():
        print(part, *(f"  {name}: {value:,.2f}" for name, value in numbers.items()), sep="\n")


if __name__ == "__main__":
    main()
