"""Batches over HTTP, of a real server beside the command that runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage import Client, SyncClient
from rollcage.errors import UnknownBatch
from support.commands import rollcage
from support.served import Served, served


async def test_a_batch_is_listed_looked_at_followed_and_compared(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('instruction = "touch a.txt"\nverify = ["test -e a.txt"]\n')
    arguments = ("eval", "good.toml", "-m", "scripted", "--agent", "shell", "-n", "2", "--name")
    async with served(tmp_path / "state") as server, server.http() as http:
        for name in ("one", "two"):
            ended = await anyio.to_thread.run_sync(rollcage, tmp_path, *arguments, name)
            assert ended.returncode == 0, ended.stdout + ended.stderr
        listed = (await http.get("/batches")).json()["batches"]
        assert [(each["name"], each["status"]) for each in listed] == [("two", "done"), ("one", "done")]
        report = (await http.get("/batches/one")).json()
        assert report["overall"]["mean"] == 1.0 and report["tasks"][0]["rewards"] == [1.0, 1.0]
        rows = (await http.get("/batches/one/results")).json()
        assert rows["total"] == 2 and {row["sample"] for row in rows["rollouts"]} == {1, 2}
        cursor, kinds = 0, []
        while page := (await http.get("/batches/one/events", params={"after": cursor, "limit": 3})).json()["events"]:
            cursor = page[-1]["cursor"]
            kinds += [each["entry"]["event"]["kind"] for each in page]
        assert kinds.count("queued") == kinds.count("scored") == kinds.count("ended") == 2
        found = (await http.get("/batches/one/compare/two")).json()
        assert (found["tasks"], found["difference"]) == (1, 0.0)
        missing = await http.get("/batches/none")
        assert missing.status_code == 404 and missing.json()["error_code"] == "unknown_batch"


WRITES = [{"tool_calls": [{"name": "bash", "arguments": {"command": "touch a.txt"}}]}, {"text": "done"}]
GOOD = {
    "task_id": "good",
    "instruction": "Touch a.txt.",
    "verify": ["test -e a.txt"],
    "agent": "mini",
    "solution": WRITES,
}
BAD = {**GOOD, "task_id": "bad", "verify": ["test -e b.txt"]}
SILENT = {**GOOD, "task_id": "silent", "solution": [{"text": "late", "delay_s": 1000}]}


async def test_a_batch_is_started_joined_and_looked_at_over_http_mcp_and_both_clients(tmp_path: Path) -> None:
    async with served(tmp_path / "state") as server, server.http() as http, server.client() as client:
        begun = await client.start_batch([GOOD, BAD], ["scripted"], n=2, name="first")
        assert (begun.size, begun.status) == (4, "running")
        report = await client.wait_batch("first")
        assert (report.status, report.overall.mean, report.overall.scored) == ("done", 0.5, 4)
        rows = await client.batch_rollouts("first")
        assert sorted((row["task"], row["reward"]) for row in rows) == [("bad", 0.0)] * 2 + [("good", 1.0)] * 2

        again = await http.post(
            "/batches", json={"tasks": [GOOD, BAD], "models": ["scripted"], "n": 2, "name": "first"}
        )
        assert again.status_code == 200 and again.json()["overall"]["done"] == 4
        assert await client.batch_rollouts("first") == rows, "nothing is run twice"
        other = await http.post("/batches", json={"tasks": [GOOD], "models": ["scripted"], "name": "first"})
        assert (other.status_code, other.json()["error_code"], other.json()["argument"]) == (409, "conflict", "name")

        def in_a_thread() -> None:
            with SyncClient(server.url) as blocking:
                name = blocking.start_batch([GOOD], ["scripted"]).name
                assert blocking.wait_batch(name).overall.mean == 1.0
                with pytest.raises(UnknownBatch):
                    blocking.batch("none")

        await anyio.to_thread.run_sync(in_a_thread)
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
        headers = {"Accept": "application/json, text/event-stream"}

        async def called(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
            body = {**call, "params": {"name": tool, "arguments": arguments}}
            result: dict[str, Any] = (await http.post("/mcp", json=body, headers=headers)).json()["result"]
            return result

        started = await called("start_batch", {"tasks": [BAD], "models": ["scripted"], "name": "by-mcp"})
        assert started["structuredContent"]["size"] == 1
        await client.wait_batch("by-mcp")
        looked = await called("get_batch", {"name": "by-mcp"})
        assert looked["structuredContent"]["overall"]["mean"] == 0.0
        assert (await called("get_batch", {"name": "none"}))["isError"]


async def test_a_batch_is_cancelled_and_goes_on_when_it_is_asked_for_again(tmp_path: Path) -> None:
    async with served(tmp_path / "state", "--at-once", "1") as server, server.client() as client:
        await client.start_batch([SILENT, GOOD], ["scripted"], name="long")
        async for entry in client.follow((await rows_of(client, "long"))[0]["rollout_id"]):
            if entry.event.kind == "agent_started":
                break
        report = await client.cancel_batch("long")
        assert (report.status, report.overall.scored) == ("cancelled", 0)
        assert [row["outcome"] for row in await client.batch_rollouts("long")] == ["aborted"]
        assert (await client.cancel_batch("long")).status == "cancelled"
        await client.start_batch([SILENT, GOOD], ["scripted"], name="long")
        again = (await rows_of(client, "long", attempt=2))[0]
        assert again["task"] == "silent"
    async with served(tmp_path / "state") as server, server.client() as client:
        assert (await client.batch("long")).status in ("stopped", "interrupted"), "the server took it along"


async def rows_of(client: Client, name: str, attempt: int = 1) -> list[dict[str, Any]]:
    """Its rollouts, once there is one."""
    while not (rows := [row for row in await client.batch_rollouts(name) if row["attempt"] == attempt]):
        await anyio.sleep(0.05)
    return rows


@pytest.mark.parametrize(
    ("more", "argument"),
    [
        ({"tasks": []}, "tasks"),
        ({"tasks": [GOOD, GOOD]}, "tasks"),
        ({"tasks": [{**GOOD, "endpoint": "vllm"}]}, "tasks"),
        ({"tasks": [{**GOOD, "setup_hosts": ["10.0.0.1"]}]}, "setup_hosts"),
        ({"tasks": [{**GOOD, "agent": "nobody"}]}, "agent"),
        ({"models": ["http://10.1.1.1/v1#m"]}, "base_url"),
        ({"models": ["nobody/nothing"]}, "model"),
        ({"models": []}, "models"),
        ({"name": "../x"}, "name"),
        ({"n": 0}, "n"),
        ({"sources": ["/etc"]}, "sources"),
    ],
)
async def test_what_cannot_be_is_refused_before_anything_is_started(
    more: dict[str, Any], argument: str, careful: Served
) -> None:
    async with careful.http() as http:
        refused = await http.post("/batches", json={"tasks": [GOOD], "models": ["scripted"], **more})
        assert refused.status_code == 422, refused.text
        assert refused.json()["argument"] == argument, refused.text
        assert (await http.get("/batches")).json()["batches"] == []
        assert (await http.get("/rollouts")).json()["rollouts"] == []


@pytest.fixture(scope="module")
async def careful(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(tmp_path_factory.mktemp("home"), "--allow-endpoint", "https://models.example") as running:
        yield running
