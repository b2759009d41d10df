"""A server that is killed, restarted, or asked to stop: nothing is lost, nothing is left alive."""

from __future__ import annotations

import re
import secrets
import signal
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from rollcage.errors import StoreError
from rollcage.events import Queued, Requeued, StageStarted
from rollcage.store import Store
from rollcage.store.sqlite import closing, connect
from rollcage.types import Endpoint, Job, Outcome, Stage, Task
from support.commands import rollcage
from support.processes import alive, let_go
from support.served import Served, served, shell


async def start(http: httpx.AsyncClient, arguments: dict[str, Any]) -> str:
    answer = await http.post("/rollouts", json=arguments)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["rollout_id"])


async def until(http: httpx.AsyncClient, rollout_id: str, status: str) -> None:
    with anyio.fail_after(120):
        while (await http.get(f"/rollouts/{rollout_id}")).json()["status"] != status:
            await anyio.sleep(0.05)


async def result(http: httpx.AsyncClient, rollout_id: str) -> dict[str, Any]:
    return dict((await http.get(f"/rollouts/{rollout_id}/result", params={"wait_s": 100})).json())


async def gone(mark: str) -> None:
    with anyio.fail_after(120):
        while alive(mark):
            await anyio.sleep(0.05)


async def test_a_server_killed_amid_twenty_rollouts_comes_back_with_all_of_them(tmp_path: Path) -> None:
    mark = f"mark-{secrets.token_hex(6)}"
    async with served(tmp_path, "--at-once", "5") as server, server.http() as http:
        done = [await start(http, shell(f"echo {n} > a.txt", verify=["test -s a.txt"])) for n in range(4)]
        delivered = {each: await result(http, each) for each in done}
        running = [await start(http, shell(f"exec -a {mark} sleep 1000")) for _ in range(4)]
        for each in running:
            await until(http, each, "running")
        held = f"hold-{secrets.token_hex(6)}"
        hold = f"(exec -a {held} sleep 1000); true"
        in_setup = await start(http, shell("echo late", setup=[hold, "echo set"], verify=["true"]))
        keyed = {
            "instruction": "x",
            "agent": "shell",
            "base_url": "http://127.0.0.1:9",
            "api_key": "k" * 20,
            "model": "m",
        }
        with_key = await start(http, keyed)
        queued = [await start(http, shell(f"echo {n} > b.txt", verify=["test -s b.txt"])) for n in range(10)]
        with anyio.fail_after(120):
            while len(alive(mark)) < 4 or not alive(held):
                await anyio.sleep(0.05)
        states = {each: (await http.get(f"/rollouts/{each}")).json()["stage"] for each in (in_setup, *queued)}
        server.kill()
    assert states[in_setup] == "setup"
    assert {states[each] for each in queued} == {"queued"}
    await gone(mark)
    await gone(held)

    async with served(tmp_path, "--at-once", "5") as again, again.http() as http:
        listed = {row["rollout_id"] for row in (await http.get("/rollouts", params={"limit": 200})).json()["rollouts"]}
        assert listed == {*done, in_setup, *running, with_key, *queued}
        assert len(listed) == 20
        assert {each: await result(http, each) for each in done} == delivered
        for each in running:
            ended = await result(http, each)
            assert (ended["outcome"], ended["error_code"], ended["reward"]) == ("crashed", "crashed", None)
        lost = await result(http, with_key)
        assert lost["outcome"] == "crashed"
        assert "key came with the request and is never stored" in lost["error"]
        await let_go(held)
        for each in (in_setup, *queued):
            resumed = await result(http, each)
            assert (resumed["outcome"], resumed["reward"]) == ("finished", 1.0), resumed["error"]
        assert [each["cmd"] for each in (await result(http, in_setup))["setup_results"]] == [hold, "echo set"]
        counted = (await http.get("/metrics")).text
        assert "rollcage_rollouts_resumed_total 11.0" in counted
        assert 'rollcage_rollouts_ended_total{outcome="crashed"} 5.0' in counted


async def killed_with_queued(home: Path, count: int) -> tuple[list[str], str]:
    """A server that dies with one rollout at work and others in its queue."""
    mark = f"mark-{secrets.token_hex(6)}"
    async with served(home, "--at-once", "1") as server, server.http() as http:
        first = await start(http, shell(f"exec -a {mark} sleep 1000"))
        await until(http, first, "running")
        queued = [await start(http, shell("true", task_id=f"q{n}")) for n in range(count)]
        server.kill()
    await gone(mark)
    return queued, first


@pytest.mark.slow
async def test_two_servers_that_start_at_once_resume_each_rollout_once(tmp_path: Path) -> None:
    queued, _ = await killed_with_queued(tmp_path, 6)
    servers: list[Served] = []
    over = anyio.Event()

    async def run() -> None:
        async with served(tmp_path) as server:
            servers.append(server)
            await over.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        tasks.start_soon(run)
        with anyio.fail_after(120):
            while len(servers) < 2:
                await anyio.sleep(0.05)
        async with servers[0].http() as http:
            for each in queued:
                assert (await result(http, each))["outcome"] == "finished"
        over.set()
    async with Store.open(tmp_path / "rollouts.db") as store:
        for each in queued:
            kinds = [entry.event.kind for entry in await store.read(each)]
            assert kinds.count("requeued") == 1
            assert kinds.count("agent_started") == 1


async def test_other_commands_leave_a_dead_server_s_queue_to_the_next_one_but_can_stop_it(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    queued, first = await killed_with_queued(tmp_path / "state", 2)
    listed = rollcage(tmp_path, "ls", "--json")
    rows = {row["id"]: row for row in httpx.Response(200, text=listed.stdout).json()}
    assert rows[first]["outcome"] == "crashed"
    assert {(rows[each]["stage"], rows[each]["outcome"]) for each in queued} == {("queued", None)}
    stopped = rollcage(tmp_path, "abort", queued[0], "--wait", "30")
    assert stopped.returncode == 0, stopped.stderr
    async with served(tmp_path / "state") as server, server.http() as http:
        assert (await result(http, queued[0]))["outcome"] == "aborted"
        assert (await result(http, queued[1]))["outcome"] == "finished"


@pytest.mark.slow
async def test_a_rollout_whose_endpoint_is_no_longer_set_up_ends_and_says_so(tmp_path: Path) -> None:
    mark = f"mark-{secrets.token_hex(6)}"
    settings = {"VLLM_URL": "http://127.0.0.1:9/v1"}
    async with served(tmp_path, "--at-once", "1", environment=settings) as server, server.http() as http:
        first = await start(http, shell(f"exec -a {mark} sleep 1000"))
        await until(http, first, "running")
        queued = await start(http, {"instruction": "x", "agent": "shell", "endpoint": "vllm"})
        server.kill()
    await gone(mark)
    async with served(tmp_path) as again, again.http() as http:
        ended = await result(http, queued)
        assert (ended["outcome"], ended["error_code"]) == ("crashed", "crashed")
        assert "VLLM_URL" in ended["error"]


async def test_a_takeover_is_refused_once_the_owner_changed_or_the_agent_began(tmp_path: Path) -> None:
    job = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://x/v1", model="m"))
    async with Store.open(tmp_path / "log.db") as store:
        await store.append("r", Queued(job=job, owner="a", resumable=True))
        await store.append("r", Requeued(owner="b", previous="a"))
        with pytest.raises(StoreError, match="taken over"):
            await store.append("r", Requeued(owner="c", previous="a"))
        assert (await store.summary("r")).owner == (await store.rollout("r")).owner == "b"
        await store.append("r", StageStarted(stage=Stage.AGENT))
        with pytest.raises(StoreError, match="agent has begun"):
            await store.append("r", Requeued(owner="c", previous="b"))


async def test_a_server_asked_to_stop_finishes_what_runs_where_it_was_told_to(tmp_path: Path) -> None:
    async with served(tmp_path, "--on-stop", "finish") as server, server.http() as http:
        mark = f"mark-{secrets.token_hex(6)}"
        work = f"(exec -a {mark} sleep 1000); echo late > a.txt"
        rollout_id = await start(http, shell(work, verify=["test -s a.txt"]))
        await until(http, rollout_id, "running")
        server.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(120):
            while (refused := await http.post("/rollouts", json=shell("true"))).status_code != 503:
                await anyio.sleep(0.05)
        assert refused.json()["error_code"] == "stopping"
        assert (await http.get(f"/rollouts/{rollout_id}")).status_code == 200
        await let_go(mark)
        assert await server.ended() == 0
    async with Store.open(tmp_path / "rollouts.db") as store:
        assert (await store.summary(rollout_id)).reward == 1.0


async def test_a_server_asked_to_stop_aborts_what_runs_and_its_followers_see_the_end(tmp_path: Path) -> None:
    mark = f"mark-{secrets.token_hex(6)}"
    async with served(tmp_path, "--grace", "0") as server, server.http() as http:
        rollout_id = await start(http, shell(f"exec -a {mark} sleep 1000"))
        await until(http, rollout_id, "running")
        streams: list[str] = []

        async def follow() -> None:
            async with server.http() as mine:
                streams.append((await mine.get(f"/rollouts/{rollout_id}/events")).text)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            server.process.send_signal(signal.SIGINT)
            assert await server.ended() == 0
    assert '"outcome": "aborted"' in streams[0]
    await gone(mark)


async def test_a_server_asked_to_stop_begins_nothing_that_waits_and_ends_all_of_it(tmp_path: Path) -> None:
    mark = f"mark-{secrets.token_hex(6)}"
    async with served(tmp_path, "--at-once", "2", "--grace", "0") as server, server.http() as http:
        running = [await start(http, shell(f"exec -a {mark} sleep 1000")) for _ in range(2)]
        for each in running:
            await until(http, each, "running")
        queued = [await start(http, shell("true")) for _ in range(40)]
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == 0
    await gone(mark)
    async with Store.open(tmp_path / "rollouts.db") as store:
        assert {(await store.summary(each)).outcome for each in (*running, *queued)} == {Outcome.ABORTED}
        for each in queued:
            assert [entry.event.kind for entry in await store.read(each)] == ["queued", "abort_requested", "ended"]


async def test_a_server_answers_before_it_has_ended_what_a_dead_one_left(tmp_path: Path) -> None:
    job = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
    async with Store.open(tmp_path / "rollouts.db") as store:
        await store.append_all([(f"dead{n}", Queued(job=job, owner="gone")) for n in range(3)])
    with closing(connect(tmp_path / "rollouts.db")) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody else can write now: recovery has to wait
        async with served(tmp_path) as server, server.http() as http:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/rollouts/dead0")).json()["status"] == "queued"
            other.execute("ROLLBACK")
            for n in range(3):
                assert (await result(http, f"dead{n}"))["outcome"] == "crashed"


async def test_a_second_signal_leaves_at_once_and_nothing_alive(tmp_path: Path) -> None:
    mark = f"mark-{secrets.token_hex(6)}"
    async with served(tmp_path, "--on-stop", "finish") as server, server.http() as http:
        rollout_id = await start(http, shell(f"exec -a {mark} sleep 1000"))
        await until(http, rollout_id, "running")
        server.process.send_signal(signal.SIGTERM)
        with anyio.fail_after(120):
            while b"once more leaves" not in server.log.read_bytes():
                await anyio.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert await server.ended() == 128 + signal.SIGTERM
    await gone(mark)


async def test_a_log_that_cannot_be_written_is_told_by_health_and_ready(tmp_path: Path) -> None:
    async with served(tmp_path) as server, server.http() as http:
        assert (await http.get("/health")).json()["status"] == "healthy"
        assert (await http.get("/ready")).json() == {"ready": True, "problem": ""}
        counted = (await http.get("/metrics")).text
        assert "rollcage_log_writable 1.0" in counted
        assert "rollcage_work_bytes 0.0" in counted
        (size,) = re.findall(r"^rollcage_log_bytes (\S+)", counted, re.MULTILINE)
        assert float(size) > 4096
        with closing(connect(tmp_path / "rollouts.db")) as other:
            other.execute("BEGIN IMMEDIATE")
            with anyio.fail_after(120):
                while (health := (await http.get("/health")).json())["status"] != "degraded":
                    await anyio.sleep(0.05)
            assert "locked" in health["problem"]
            ready = await http.get("/ready")
            assert (ready.status_code, ready.json()["ready"]) == (503, False)
            other.execute("ROLLBACK")
        with anyio.fail_after(120):
            while (await http.get("/ready")).status_code != 200:
                await anyio.sleep(0.05)
