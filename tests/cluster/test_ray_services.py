"""What other parts of a real Ray do for rollouts: its autoscaler brings nodes, Ray Serve's replicas answer them."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollcage
from rollcage.cluster import Cluster
from rollcage.runner import Runner
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.types import NO_MODEL, AgentSpec, Endpoint, Job, Outcome, Task
from support.raylets import patiently, raylets

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]


@asynccontextmanager
async def opened(tmp_path: Path, state_dir: Path, cluster: Cluster, *replicas: str) -> AsyncIterator[Runner]:
    settings = Settings.from_environ(home=str(state_dir)).with_replicas(replicas)
    async with (
        Store.open(tmp_path / "rollouts.db") as store,
        rollcage.open_runner(settings=settings, store=store, cluster=cluster) as runner,
    ):
        yield runner


async def until(check: Callable[[], object]) -> None:
    with anyio.fail_after(120):
        while not await anyio.to_thread.run_sync(check):
            await anyio.sleep(0.2)


async def test_rollouts_that_wait_are_room_that_ray_is_asked_for(tmp_path: Path, state_dir: Path) -> None:
    import ray
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get

    task = Task(instruction="touch done", verify=("test -f done",))
    with raylets(0) as found:
        cluster = Cluster(
            address=found.address, resources={"place": 1}, node_home=str(state_dir), autoscale=True, idle_s=2
        )
        async with opened(tmp_path, state_dir, cluster) as runner:

            def asked() -> int:
                """What an autoscaler reads: how many bundles of one place are to fit."""
                bundles = json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or "[]")
                assert all(bundle == {"place": 1.0} for bundle in bundles)
                return len(bundles)

            job = Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"))
            ids = [await runner.start(job) for _ in range(3)]
            await until(lambda: asked() == 3)
            assert all(node.state == "unusable" for node in runner.nodes)
            # As an autoscaler would; Ray starts nodes in the main thread only.
            patiently(lambda: found.add_node(num_cpus=1, resources={"place": 2}))
            for each in ids:
                assert (await runner.wait(each)).reward == 1.0
            await until(lambda: asked() == 0)
            await until(lambda: [node.state for node in runner.nodes] == ["resting"])
            # Nobody holds anything there: an autoscaler may take it away.
            await until(lambda: ray.available_resources().get("place") == 2.0)


def start_serve(replicas: int) -> Any:
    """An application of Ray Serve whose answers say which replica gave them."""
    import os

    import fastapi
    from ray import serve

    app = fastapi.FastAPI()

    @serve.deployment(num_replicas=replicas, ray_actor_options={"num_cpus": 0.1})
    @serve.ingress(app)
    class Model:
        @app.get("/v1/models")
        def models(self) -> dict[str, Any]:
            return {"object": "list", "data": [{"id": "policy", "object": "model"}]}

        @app.post("/v1/chat/completions")
        def complete(self) -> dict[str, Any]:
            message = {"role": "assistant", "content": str(os.getpid())}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return {"id": "x", "object": "chat.completion", "model": "policy", "choices": [choice], "usage": usage}

    return serve.run(Model.bind(), name="llm", route_prefix="/llm")  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore")  # Ray Serve warns of itself
async def test_replicas_of_ray_serve_are_found_and_each_rollout_stays_with_one(
    tmp_path: Path, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray import serve

    monkeypatch.setenv("RAY_SERVE_ENABLE_DIRECT_INGRESS", "1")  # replicas take requests themselves
    body = '{"model":"policy","messages":[{"role":"user","content":"hi"}]}'
    ask = (
        'curl -s -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" '
        f"-d '{body}' $OPENAI_BASE_URL/chat/completions"
    )
    task = Task(instruction=f"for i in 1 2 3; do {ask}; done; touch done", verify=("test -f done",))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with raylets(2, cpus=2) as found:
        ray.init(address=found.address, log_to_driver=False, logging_level="ERROR")
        try:
            serve.start(http_options={"host": "0.0.0.0", "port": port})
            start_serve(2)
            own = f"http://{ray.util.get_node_ip_address()}:{port}/llm/v1"
            job = Job(task=task, model=Endpoint(base_url=own, model="policy"), agent=AgentSpec(name="shell"))
            cluster = Cluster(resources={"place": 1}, node_home=str(state_dir))
            async with opened(tmp_path, state_dir, cluster, own, "serve:llm") as runner:
                gateway = runner.gateway
                for number in (2, 3):
                    if number == 3:
                        await anyio.to_thread.run_sync(start_serve, 3)
                    await until(partial(lambda n: len(gateway.replicas.addresses) == n, number))
                    assert own not in gateway.replicas.addresses
                    await anyio.sleep(2)  # nodes are told
                    ids = [await runner.start(job) for _ in range(12)]
                    used = []
                    for each in ids:
                        rollout = await runner.wait(each)
                        assert rollout.outcome is Outcome.FINISHED, rollout.error
                        said = [turn.message["content"] for turn in rollout.turns]
                        assert len(said) == 3 and len(set(said)) == 1, json.dumps(said)
                        used.append(said[0])
                    assert len(set(used)) == number
        finally:
            serve.shutdown()
            ray.shutdown()
