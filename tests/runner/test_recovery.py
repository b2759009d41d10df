"""What a killed process leaves: a log that says so, and nothing alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from rollcage.errors import UsageError
from rollcage.events import AbortRequested, Queued, StageStarted
from rollcage.runner import Owners, Registry, Runner, recover
from rollcage.store import Store
from rollcage.types import AgentSpec, Endpoint, Job, Outcome, SandboxSpec, Task
from support.processes import alive

CHILD = """
import sys
from pathlib import Path
import anyio
from rollcage.agents.shell import Shell
from rollcage.gateway import Gateway
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.store import Store
from rollcage.simulators import ScriptedModel
from rollcage.types import AgentSpec, Job, Task

async def main(log: str, state: str, mark: str) -> None:
    async with (Store.open(Path(log)) as store, Gateway.open() as gateway, LocalProvider(Path(state)) as local,
                ScriptedModel() as model):
        backends = Registry(providers={"local": local}, agents={"shell": Shell()}, gateway=gateway)
        async with Runner.open(store, backends) as runner:
            for number in range(5):
                task = Task(instruction=f"exec -a {mark} sleep 1000")
                await runner.start(Job(task=task, model=model.endpoint(()), agent=AgentSpec(name="shell")))
            print("started", flush=True)
            await anyio.sleep_forever()

anyio.run(main, *sys.argv[1:])
"""


async def test_a_killed_process_leaves_nothing_alive_and_its_rollouts_end_as_crashed(
    tmp_path: Path, state_dir: Path, backends: Registry
) -> None:
    mark = f"rollcage-test-{os.getpid()}"
    log = tmp_path / "log.db"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(log), str(state_dir), mark], stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "started\n"
        async with Store.open(log) as store:
            ids = [summary.id for summary in await store.list()]
            for rollout_id in ids:
                async for entry in store.follow(rollout_id):
                    if isinstance(entry.event, StageStarted) and entry.event.stage == "agent":
                        break
            assert len(ids) == 5
            assert await recover(store, Owners.beside(store)) == [], "its process lives"
            while not alive(mark):
                await anyio.sleep(0.01)
            child.send_signal(signal.SIGKILL)
            child.wait()
            while alive(mark):
                await anyio.sleep(0.01)
            async with Runner.open(store, backends):
                for rollout_id in ids:
                    rollout = await store.rollout(rollout_id)
                    assert (rollout.outcome, rollout.error_code, rollout.reward) == (Outcome.CRASHED, "crashed", None)
    finally:
        child.kill()
        child.wait()
        if child.stdout:
            child.stdout.close()


async def test_a_start_that_is_cancelled_leaves_nothing_that_nobody_runs(store: Store, backends: Registry) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    async with Runner.open(store, backends) as runner:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await runner.start(Job(task=Task(instruction="x"), model=endpoint))
        with anyio.fail_after(120):
            for summary in await store.list():
                assert (await runner.wait(summary.id)).ended


async def test_aborting_what_has_ended_says_so(store: Store, backends: Registry) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    async with Runner.open(store, backends) as runner:
        rollout_id = await runner.start(Job(task=Task(instruction="x"), model=endpoint))
        await runner.wait(rollout_id)
        assert await runner.abort(rollout_id) is False


async def test_whoever_waits_for_a_rollout_is_told_when_its_process_dies(store: Store, backends: Registry) -> None:
    owners = Owners.beside(store)
    job = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
    async with Runner.open(store, backends) as runner:
        with owners.hold() as owner:
            await store.append("theirs", Queued(job=job, owner=owner))
        with anyio.fail_after(120):
            assert (await runner.wait("theirs")).outcome is Outcome.CRASHED


async def test_a_rollout_that_another_living_process_runs_is_left_alone(store: Store) -> None:
    owners = Owners.beside(store)
    job = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
    with owners.hold() as owner:
        await store.append("mine", Queued(job=job, owner=owner))
        assert await recover(store, owners) == []
    assert await recover(store, owners) == ["mine"]
    assert await recover(store, owners) == []


async def test_what_a_dead_process_left_is_ended_in_few_commits(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
    because = "its key is not stored"
    queued = [Queued(job=job, owner="gone", resumable=n % 3 == 0, not_resumable_because=because) for n in range(600)]
    await store.append_all([(f"r{n}", each) for n, each in enumerate(queued)])
    await store.append_all([(f"r{n}", AbortRequested(reason="stop")) for n in range(0, 600, 6)])
    commits: list[int] = []
    monkeypatch.setattr(store._writer, "_committed", commits.append)
    ended = set(await recover(store, Owners.beside(store)))
    assert ended == {f"r{n}" for n in range(600) if n % 3 or n % 6 == 0}
    assert len(commits) < 10
    crashed, stopped = await store.summary("r1"), await store.summary("r6")
    assert crashed.outcome is Outcome.CRASHED
    assert because in (crashed.error or "")
    assert stopped.outcome is Outcome.ABORTED


async def test_a_job_nobody_can_do_is_refused_before_anything_is_started(store: Store, backends: Registry) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    job = Job(task=Task(instruction="x"), model=endpoint)
    async with Runner.open(store, backends) as runner:
        for changed, message in (
            ({"agent": AgentSpec(name="nobody")}, "nobody"),
            ({"sandbox": SandboxSpec(backend="moon")}, "moon"),
            ({"sandbox": SandboxSpec(template="x")}, "template"),
            ({"agent": AgentSpec(disabled_tools=("fly",))}, "fly"),
            ({"agent": AgentSpec(name="shell", system_prompt="x")}, "shell"),
        ):
            with pytest.raises(UsageError, match=message):
                await runner.start(job.model_copy(update=changed))
    assert await store.list() == []


async def test_the_end_of_the_runners_block_aborts_what_still_runs(store: Store, backends: Registry) -> None:
    endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    async with Runner.open(store, backends, at_once=1) as runner:
        ids = [await runner.start(Job(task=Task(instruction="x"), model=endpoint)) for _ in range(3)]
    for rollout_id in ids:
        assert (await store.rollout(rollout_id)).ended
