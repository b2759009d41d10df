"""What is seen of a real Ray's nodes while they work, what is sent to them through it, and what never rests there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import rollcage
from rollcage.cluster import Cluster
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.tasks import load_task
from rollcage.types import AgentSpec, Job, Outcome, ScriptedTurn
from support.commands import rollcage as command
from support.raylets import patiently, processes_of, raylets
from support.served import served

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(900)]
ASK = (
    'curl -sN -H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json" '
    '-d \'{"model":"model","stream":true,"messages":[{"role":"user","content":"hi"}]}\' '
    "$OPENAI_BASE_URL/chat/completions"
)
SAID = "one two three four five six seven eight nine ten "
SLOW = {"text": SAID, "token_delay_s": 0.4}


@pytest.fixture(scope="module")
def three() -> Iterator[Any]:
    """Three nodes; two of them have the label `pool=agents`, and two places each."""
    with raylets(1, places=2) as found:
        for _ in range(2):
            patiently(lambda: found.add_node(num_cpus=1, resources={"place": 2}, labels={"pool": "agents"}))
        yield found


async def until(check: Callable[[], Any]) -> None:
    with anyio.fail_after(180):
        while not await anyio.to_thread.run_sync(check):
            await anyio.sleep(0.2)


def at_rest(found: Any, *folders: Path) -> Iterator[tuple[str, bytes]]:
    """All that a node keeps: files of Ray's and ours, its object store, command lines, environments."""
    for folder in (Path(found.head_node.get_session_dir_path()), *folders):
        for path in folder.rglob("*"):
            try:
                if path.is_file() and not path.is_symlink():
                    yield str(path), path.read_bytes()
            except OSError:
                continue  # it was just removed
    for node in found.list_all_nodes():
        raylet, *_ = pids = processes_of(node)
        for pid in pids:
            try:
                for name in ("environ", "cmdline"):
                    yield f"/proc/{pid}/{name}", Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
        for descriptor in Path(f"/proc/{raylet}/fd").iterdir():
            if "plasma" in os.readlink(descriptor):
                yield str(descriptor), written(descriptor)


def written(path: Path) -> bytes:
    """What was ever written of a large file that is mostly holes."""
    parts, end = [], 0
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while end < size:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            parts.append(os.pread(file.fileno(), end - start, start))
    return b"".join(parts)


async def test_files_of_a_task_come_through_ray_and_the_models_key_rests_nowhere(
    three: Any, tmp_path: Path, model: ScriptedModel
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "random").write_bytes(os.urandom(20 << 20))
    marker = f"in-the-order-{os.urandom(8).hex()}"
    (tmp_path / "task.toml").write_text(
        f"instruction = '''cat ~/workdir/data/random | wc -c > size; {ASK} > first; {ASK} > done'''\n"
        "verify = ['grep -x 20971520 size', 'test -s done']\n"
        f"[files]\ndata = {{from = 'data'}}\nbig = '''{marker} {'x' * 300_000}'''\n"
    )
    endpoint = model.endpoint((ScriptedTurn(text="first"), ScriptedTurn(text=3 * SAID, token_delay_s=1)))
    key = endpoint.key.get_secret_value().encode()
    home, far = tmp_path / "head", tmp_path / "far"
    far.mkdir()
    settings = Settings.from_environ(home=str(home))
    cluster = Cluster(address=three.address, resources={"place": 1}, labels={"pool": "agents"}, node_home=str(far))
    job = Job(task=load_task(tmp_path / "task.toml"), model=endpoint, agent=AgentSpec(name="shell"))
    async with (
        Store.open(tmp_path / "rollouts.db") as store,
        rollcage.open_runner(settings=settings, store=store, cluster=cluster) as runner,
    ):
        rollout_id = await runner.start(job)
        with anyio.fail_after(300):
            while not (await store.rollout(rollout_id)).turns:
                await anyio.sleep(0.1)
        during = list(await anyio.to_thread.run_sync(lambda: list(at_rest(three, far, home))))
        assert (await store.rollout(rollout_id)).outcome is None, "its key is held while this is looked at"
        rollout = await runner.wait(rollout_id)
        after = list(at_rest(three, far, home, tmp_path))
    assert (rollout.outcome, rollout.reward) == (Outcome.FINISHED, 1.0), rollout.error
    assert list((far / "trees").rglob(f"{job.task.all_trees[0].digest}*"))
    for seen in (during, after):
        assert len(key) > 30 and not [name for name, content in seen if key in content]
    # It would have been seen: what travels in the order itself lies in Ray's object store.
    assert [name for name, content in during if marker.encode() in content and "/fd/" in name]


async def test_nodes_are_seen_at_work_held_by_a_pause_and_drained(three: Any, tmp_path: Path) -> None:
    home = tmp_path / "state"
    more = ("--ray-resource", "place=1", "--ray-places", "1", "--ray-label", "pool=agents", "--node-home")
    options = ("--ray", three.address, *more, str(tmp_path / "far"))
    async with served(home, *options) as server, server.client() as client, server.http() as http:

        async def nodes(ready: int = 2) -> list[dict[str, Any]]:
            with anyio.fail_after(180):
                while True:
                    found: list[dict[str, Any]] = (await http.get("/nodes")).json()["nodes"]
                    if sum(node["state"] == "ready" for node in found) == ready:
                        return found
                    await anyio.sleep(0.2)

        async def start(script: str, **arguments: Any) -> str:
            return (await client.start(script, agent="shell", endpoint="scripted", **arguments)).rollout_id

        workers = {node.node_id for node in three.worker_nodes}
        assert {node["id"] for node in await nodes()} == workers, "the third has no such label"

        # Live, by everything that shows it.
        rollout_id = await start(f"{ASK} > done", solution=[SLOW], verify=["test -s done"])
        deltas: list[str] = []
        seen: dict[str, dict[str, Any]] = {}
        async with http.stream("GET", f"/rollouts/{rollout_id}/events?live=1") as stream:
            async for line in stream.aiter_lines():
                if '"content"' in line and line.startswith("data: ") and '"seq"' not in line:
                    deltas.append(json.loads(line[6:])["content"])
                if len(deltas) == 3 and not seen:
                    with anyio.fail_after(60):
                        while not (seen := {n["id"]: n for n in await nodes() if n["running"] and n["calls"]}):
                            await anyio.sleep(0.1)
                    told = (await http.get("/metrics")).text
                    page = (await http.get("/page/nodes")).json()
                    listed = json.loads(
                        (await anyio.to_thread.run_sync(lambda: command(tmp_path, "nodes", "--json"))).stdout
                    )
        assert "".join(deltas) == SAID and (await client.wait(rollout_id)).reward == 1.0
        (busy,) = seen.values()
        assert busy["rollouts"] == [rollout_id] and busy["labels"]["pool"] == "agents" and busy["load"] > 0
        for name, wanted in (("places", 1.0), ("rollouts", 1.0), ("calls", 1.0), ("ready", 1.0)):
            values = dict(re.findall(rf'^rollcage_node_{name}{{.*node="(\w+)"}} (\S+)$', told, re.MULTILINE))
            assert values.keys() == workers and float(values[busy["id"]]) == wanted, told
        assert page["cluster"] and {node["id"] for node in page["nodes"]} == workers
        assert {node["id"] for node in listed} == workers

        # A pause holds the calls of both nodes, each of which has one place.
        await client.pause()
        held = [await start(f"{ASK} > done", solution=[{"text": "x"}], verify=["test -s done"]) for _ in range(2)]
        with anyio.fail_after(120):
            while (await client.pause()).waiting < 2:
                await anyio.sleep(0.1)
        assert not any([(await client.state(each)).proxy_turns_so_far for each in held])
        assert (await client.resume("step-7")).policy_version == "step-7"
        for each in held:
            assert (await client.wait(each)).reward == 1.0
            assert (await client.turns(each)).turns[0].policy_version == "step-7"

        # A node that Ray drains finishes what it runs, and gets nothing new.
        last = await start("touch done", setup=["sleep 20"], verify=["test -f done"])
        with anyio.fail_after(120):
            while not (runs := [node["id"] for node in await nodes() if last in node["rollouts"]]):
                await anyio.sleep(0.1)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", three.address]
        why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        subprocess.run([*ray, "--node-id", runs[0], *why], check=True, capture_output=True, timeout=120)
        states = {node["id"]: node["state"] for node in await nodes(ready=1)}
        assert states[runs[0]] == "draining"
        # Two more than the other node's one place: they wait for it, not for the one that drains.
        others = [await start("touch done", verify=["test -f done"]) for _ in range(2)]
        for each in (*others, last):
            assert (await client.wait(each)).reward == 1.0
        elsewhere = {node["id"]: node["running"] for node in await nodes(ready=1)}
        assert runs[0] not in elsewhere or elsewhere[runs[0]] == 0
