"""Groups, capacity and the pause of the gateway over HTTP, MCP and both clients."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from rollcage import SyncClient
from rollcage.client import ServerError
from rollcage.errors import UnknownGroup
from rollcage.trajectory import Sequence
from support.served import Served, served

WRITES: list[dict[str, Any]] = [
    {"tool_calls": [{"name": "bash", "arguments": {"command": "echo hi > hi.txt"}}]},
    {"text": "done"},
]
HI: dict[str, Any] = {"agent": "mini", "endpoint": "scripted", "verify": ["test -f hi.txt"]}
SILENT: list[dict[str, Any]] = [{"text": "late", "delay_s": 1000}]


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(tmp_path_factory.mktemp("home"), "--at-once", "4") as running:
        yield running


async def test_a_group_is_started_waited_for_and_handed_over_in_three_requests(server: Served) -> None:
    async with server.client() as client, server.http() as http:
        group = await client.start_group(
            "Write hi.txt.", 3, min_usable=2, solution=WRITES, seed=1, group_id="step-1/hi", policy_version="1", **HI
        )
        assert (group.n, group.min_usable, len(group.rollouts)) == (3, 2, 3)
        page = await client.wait_groups([group.group_id])
        assert page.done and page.groups[0].usable >= 2 and page.cursor
        for each in group.rollouts:  # the third may still end well, or be stopped: what is compared must not change
            await client.wait(each.rollout_id)
        rows = await client.group_sequences(group.group_id, usable_only=True)
        assert (
            len(rows) >= 2 and {row.reward for row in rows} == {1.0} and {row.group_id for row in rows} == {"step-1/hi"}
        )
        assert all(isinstance(row, Sequence) and row.trained_tokens for row in rows)
        same = await client.group("step-1/hi")
        assert same.done and same.task_id == ""
        # The same in JSON and in Arrow.
        address = "/groups/step-1%2Fhi/sequences?usable_only=true"
        plain = (await http.get(address)).json()
        assert plain["group_id"] == "step-1/hi" and plain["rollouts"][0]["usable"] in (True, False)
        assert [tuple(row["input_ids"]) for row in plain["sequences"]] == [row.input_ids for row in rows]
        arrow = await http.get(address, headers={"Accept": "application/vnd.apache.arrow.stream"})
        import pyarrow as pa

        table = pa.ipc.open_stream(arrow.content).read_all()
        assert json.loads(table.schema.metadata[b"rollcage_group"])["n"] == 3
        assert [tuple(ids) for ids in table["input_ids"].to_pylist()] == [row.input_ids for row in rows]
        packed = await http.get(address, headers={"Accept": "text/html, application/x-msgpack;q=0.5"})
        assert msgspec.msgpack.decode(packed.content)["sequences"] == msgspec.json.decode(
            msgspec.json.encode(plain["sequences"])
        )
        refused = await http.get(address, headers={"Accept": "text/csv"})
        assert (refused.status_code, refused.json()["error_code"]) == (406, "not_acceptable")


async def test_a_repeated_start_joins_and_another_one_is_refused(server: Served) -> None:
    async with server.http() as http:
        body = {"instruction": "Write hi.txt.", "n": 2, "idempotency_key": "k", "solution": WRITES, **HI}
        first = await http.post("/groups", json=body)
        again = await http.post("/groups", json=body)
        assert (first.status_code, again.status_code) == (201, 200)
        assert [each["rollout_id"] for each in first.json()["rollouts"]] == [
            each["rollout_id"] for each in again.json()["rollouts"]
        ]
        other = await http.post("/groups", json={**body, "n": 3})
        assert (other.status_code, other.json()["argument"]) == (409, "n")
        named = first.json()["group_id"]
        taken = await http.post("/groups", json={**body, "idempotency_key": "", "group_id": named})
        assert (taken.status_code, taken.json()["argument"]) == (409, "group_id")
        for wrong in ({"n": 0}, {"n": 2, "min_usable": 3}, {"n": 2, "min_usable": 1, "mode": "black_box"}):
            answer = await http.post("/groups", json={**body, "idempotency_key": "", **wrong})
            assert answer.status_code == 422, wrong
        assert (await http.get("/groups/nobody")).json()["error_code"] == "unknown_group"


async def test_capacity_falls_with_what_runs_and_older_weights_are_stopped(server: Served) -> None:
    async with server.client() as client:
        # What other tests began may still run.
        group = await client.start_group("Wait.", 2, solution=SILENT, policy_version="v9", group_id="old", **HI)
        capacity = await client.capacity()
        assert capacity.at_once == 4 and capacity.mine >= 2 and capacity.free <= 2 and not capacity.paused
        stopped = await client.abort_older("v10")
        assert set(stopped.rollout_ids) == {each.rollout_id for each in group.rollouts}
        page = await client.wait_groups(["old"])
        assert {each.outcome for each in page.ended} == {"aborted"} and {each.reward for each in page.ended} == {None}
        assert (await client.abort_group("old")).rollout_ids == ()
        with pytest.raises(UnknownGroup):
            await client.group("none")


def test_the_sync_client_has_it_too(server: Served) -> None:
    with SyncClient(server.url) as client:
        group = client.start_group("Write hi.txt.", 1, solution=WRITES, **HI)
        assert client.wait_groups([group.group_id]).groups[0].usable == 1
        assert len(client.group_sequences(group.group_id)) == 1 and client.group(group.group_id).done
        assert client.pause(wait_s=1).paused and client.capacity().paused
        assert client.resume("v11").policy_version == "v11"
        assert client.abort_older("v1").rollout_ids == () and client.abort_group(group.group_id).rollout_ids == ()


async def test_rollouts_go_on_after_a_pause_with_the_new_weights(server: Served) -> None:
    async with server.client() as client:
        assert (await client.pause()).paused
        group = await client.start_group("Write hi.txt.", 1, solution=WRITES, policy_version="old", **HI)
        while not (await client.pause()).waiting:
            await anyio.sleep(0.05)
        state = await client.resume("new")
        assert not state.paused and state.policy_version == "new"
        await client.wait_groups([group.group_id])
        (row,) = await client.group_sequences(group.group_id)
        assert row.reward == 1.0 and set(row.policy_versions) == {"new"}


async def test_the_tools_of_mcp_do_the_same(server: Served) -> None:
    async with server.http() as http:

        async def call(name: str, **arguments: Any) -> Any:
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
            headers = {"Accept": "application/json, text/event-stream"}
            answer = await http.post("/mcp", json=body, headers=headers)
            return json.loads(answer.text.strip().removeprefix("event: message").strip().removeprefix("data: "))[
                "result"
            ]

        group = (await call("start_group", instruction="Write hi.txt.", n=2, solution=WRITES, **HI))[
            "structuredContent"
        ]
        name = group["group_id"]
        page = (await call("wait_groups", group_ids=[name], until="all"))["structuredContent"]
        assert page["done"] and page["groups"][0]["usable"] == 2
        rows = (await call("get_group_sequences", group_id=name))["structuredContent"]["sequences"]
        assert [row["reward"] for row in rows] == [1.0, 1.0]
        assert (await call("abort_group", group_id=name))["structuredContent"] == {"rollout_ids": []}
        assert (await call("pause_gateway"))["structuredContent"]["paused"]
        assert not (await call("resume_gateway", policy_version="9"))["structuredContent"]["paused"]
        assert (await call("abort_group", group_id="none"))["isError"]


async def test_a_group_belongs_to_its_key_and_only_admins_pause(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    from rollcage.server.auth import new_key

    one, two, admin = new_key(keys, "one"), new_key(keys, "two"), new_key(keys, "boss", admin=True)
    async with (
        served(tmp_path / "home", "--api-key-file", str(keys), key=admin) as server,
        server.client(one) as mine,
        server.client(two) as theirs,
        server.client(admin) as boss,
    ):
        group = await mine.start_group("Write hi.txt.", 1, solution=WRITES, group_id="g", **HI)
        with pytest.raises(UnknownGroup):
            await theirs.group("g")
        other = await theirs.start_group("Write hi.txt.", 1, solution=SILENT, group_id="g", **HI)
        assert other.rollouts[0].rollout_id != group.rollouts[0].rollout_id
        assert (await mine.wait_groups(["g"])).groups[0].usable == 1
        assert len((await boss.group("g")).rollouts) == 2
        with pytest.raises(ServerError, match="only an admin") as refused:
            await mine.pause()
        assert refused.value.status == 403
        await boss.pause("cut")
        await boss.resume()
