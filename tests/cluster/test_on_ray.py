"""Three real Ray nodes on this machine: rollouts spread, nodes come and are killed, nothing is lost or doubled."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollcage
from rollcage.cluster import Cluster
from rollcage.cluster.head import MOST_ATTEMPTS
from rollcage.events import Requeued, StageStarted
from rollcage.runner import Runner
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.types import NO_MODEL, AgentSpec, Blame, Job, Outcome, Stage, Task
from support.processes import alive
from support.raylets import actors_of, kill, patiently, processes_of, raylets

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(1500)]
MARK = "rollcage-on-ray-sleep"
"""What stray processes of a box would be called."""


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    import ray

    with raylets(3) as found:
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        try:
            yield found
        finally:
            ray.shutdown()


@asynccontextmanager
async def opened(tmp_path: Path, state_dir: Path, **options: Any) -> AsyncIterator[tuple[Runner, Store]]:
    settings = Settings.from_environ(home=str(state_dir))
    cluster = Cluster(resources={"place": 1}, lease_s=120, node_home=str(state_dir), **options)
    async with (
        Store.open(tmp_path / "rollouts.db") as store,
        rollcage.open_runner(settings=settings, store=store, cluster=cluster) as runner,
    ):
        yield runner, store


def job(command: str) -> Job:
    task = Task.model_validate({"instruction": f"{command}; touch done", "verify": ["test -f done"]})
    return Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"))


async def ready(runner: Runner, nodes: int) -> None:
    with anyio.fail_after(400):
        while sum(node.state == "ready" for node in runner.nodes) < nodes:
            await anyio.sleep(0.1)


async def test_a_hundred_rollouts_outlive_ten_nodes(ray_cluster: Any, tmp_path: Path, state_dir: Path) -> None:
    async with opened(tmp_path, state_dir) as (runner, store):
        await ready(runner, 3)
        sleep = f"exec -a {MARK} sleep"
        ids = [await runner.start(job(f"bash -c '{sleep} {random.random():.2f}'")) for _ in range(100)]
        killed = 0
        while killed < 10:
            await anyio.sleep(random.uniform(0.2, 2))
            victims = list(ray_cluster.worker_nodes)
            patiently(lambda: ray_cluster.add_node(num_cpus=1, resources={"place": 4}))
            await ready(runner, 2)
            kill(ray_cluster, random.choice(victims))
            killed += 1
        for each in ids:
            await runner.over(each)
        outcomes: Counter[str] = Counter()
        again = 0
        for each in ids:
            log = await store.read(each)
            assert [entry.seq for entry in log] == list(range(1, len(log) + 1))
            assert [entry.event.kind for entry in log].count("ended") == 1 and log[-1].event.kind == "ended"
            attempts = 1 + sum(isinstance(entry.event, Requeued) for entry in log)
            again += attempts - 1
            provisions = [e for e in log if e.event.kind == "stage_started" and e.event.stage.value == "provision"]
            assert len(provisions) <= attempts
            rollout = await store.rollout(each)
            assert rollout.outcome is Outcome.CRASHED or rollout.reward == 1.0, rollout.error
            if rollout.outcome is Outcome.CRASHED:
                began = [entry.event.stage for entry in log if isinstance(entry.event, StageStarted)]
                assert rollout.blame is Blame.INFRASTRUCTURE and (Stage.AGENT in began or attempts == MOST_ATTEMPTS)
            outcomes[str(rollout.outcome)] += 1
        assert outcomes[Outcome.FINISHED] >= 50 and outcomes.total() == 100
        assert not [node for node in runner.nodes if node.running]
    with anyio.fail_after(60):
        while alive(MARK):
            await anyio.sleep(0.1)


async def test_rays_own_tools_show_actors_by_the_ids_of_their_rollouts(
    ray_cluster: Any, tmp_path: Path, state_dir: Path
) -> None:
    from ray._private.state import state
    from ray.core.generated.gcs_pb2 import TaskEvents

    async with opened(tmp_path, state_dir) as (runner, _):
        await ready(runner, 2)
        ids = [await runner.start(job("true")) for _ in range(2)]
        for each in ids:
            await runner.over(each)
        expected = {f"rollout {each}" for each in ids}
        names: set[str] = set()
        with anyio.fail_after(120):
            while not names >= expected:
                await anyio.sleep(0.5)
                told = await anyio.to_thread.run_sync(state._connect_and_get_accessor().get_task_events)
                names = {event.task_info.name for event in map(TaskEvents.FromString, told)}
        assert not [name for name in names if "exchange" in name], "what nodes are asked all the time hides the rest"


async def test_a_killed_actor_is_seen_at_once_and_replaced(ray_cluster: Any, tmp_path: Path, state_dir: Path) -> None:
    async with opened(tmp_path, state_dir) as (runner, store):
        await ready(runner, 1)
        rollout_id = await runner.start(job("sleep 1000"))
        async for entry in store.follow(rollout_id):
            if entry.event.kind == "agent_started":
                break
        for pid in actors_of(ray_cluster):
            os.kill(pid, signal.SIGKILL)
        rollout = await runner.wait(rollout_id)
        assert rollout.outcome is Outcome.CRASHED and "process" in (rollout.error or "")
        assert (await runner.wait(await runner.start(job("true")))).reward == 1.0


async def test_a_killed_raylet_alone_takes_its_rollouts_along_at_once(
    ray_cluster: Any, tmp_path: Path, state_dir: Path
) -> None:
    patiently(lambda: ray_cluster.add_node(num_cpus=1, resources={"place": 4}))
    async with opened(tmp_path, state_dir) as (runner, store):
        await ready(runner, 2)
        early = Task(instruction="touch done", setup=(f"bash -c 'exec -a {MARK} sleep 5'",), verify=("test -f done",))
        ids = [await runner.start(job("true").model_copy(update={"task": early})) for _ in range(12)]
        with anyio.fail_after(300):
            while len(alive(MARK)) < 5:  # on both nodes, at least
                await anyio.sleep(0.05)
        at_work = {node.id: node.rollouts for node in runner.nodes}
        victim = next(node for node in ray_cluster.worker_nodes if at_work.get(node.node_id))
        began = time.time()
        os.kill(processes_of(victim)[0], signal.SIGKILL)
        logs = {}
        for each in ids:
            await runner.over(each)
            logs[each] = await store.read(each)
            rollout = await store.rollout(each)
            assert rollout.reward == 1.0 or rollout.outcome is Outcome.CRASHED, rollout.error
            assert [entry.event.kind for entry in logs[each]].count("ended") == 1
        again = [e.time - began for log in logs.values() for e in log if isinstance(e.event, Requeued)]
        assert again and max(again) < 20, again
        ray_cluster.remove_node(victim, allow_graceful=False)
    with anyio.fail_after(60):
        while alive(MARK):
            await anyio.sleep(0.1)
