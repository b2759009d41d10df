"""Measures rollouts on a real Ray of three nodes on this machine: their cost, and how soon a lost node's begin anew.

    python bench/on_ray.py [--json] [--pairs 10] [--losses 10] [--entries 6]

`pairs`: the same rollout of OpenCode with a scripted model, by the plain runner and through Ray, in turns; the ratio is
that within pairs. CPU is that of this process, of all of Ray and of the boxes; what Ray uses while nothing runs is
measured apart, and left out. `losses`: a node's raylet and its workers are killed -9 while rollouts are in SETUP.
`entries`: what a node logs, on its way to the head (sending.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from sending import entries

import rollcage
from rollcage.cluster import Cluster
from rollcage.events import Requeued, StageStarted
from rollcage.runner import Runner
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
