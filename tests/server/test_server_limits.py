"""Requests that are made to be expensive: what they cost is bounded at every door, and the others go on."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from rollcage.schema.request import MOST_ITEMS, RolloutRequest
from rollcage.server.auth import new_key
from rollcage.server.openenv_sessions import EPISODES
from rollcage.server.parts import PartCounter
from support.served import Served, served

SLOWEST_S = 10.0
"""Of an answer to somebody else while an attack runs, on a loaded machine; the attacks took 15 to 92 s."""

Arguments = dict[str, Any]


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served(tmp_path_factory.mktemp("home")) as running:
        async with running.http() as http:
            await http.get("/schema")  # whose imports are slow
        yield running


def files(count: int) -> Arguments:
    return {"instruction": "x", "endpoint": "vllm", "upload_files": {f"file-{n}": "" for n in range(count)}}


def unknown(count: int) -> Arguments:
    return {"instruction": "x", **{f"argument-{n}": 1 for n in range(count)}}


def rollouts(arguments: Arguments) -> tuple[str, Arguments]:
    return "/rollouts", arguments


def mcp(arguments: Arguments) -> tuple[str, Arguments]:
    params = {"name": "start_rollout", "arguments": arguments}
    return "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


def step(arguments: Arguments) -> tuple[str, Arguments]:
    return "/step", {"action": {"type": "call_tool", "tool_name": "start_rollout", "arguments": arguments}}


async def attack(server: Served, path: str, body: Arguments) -> tuple[httpx.Response, float]:
    """The answer to a request, and how long somebody else waited at most meanwhile."""
    content, waited = json.dumps(body), 0.0
    accept = {"accept": "application/json, text/event-stream", "content-type": "application/json"}

    async def others(http: httpx.AsyncClient) -> None:
        nonlocal waited
        while True:
            began = time.monotonic()
            try:
                await http.get("/health")
            finally:
                waited = max(waited, time.monotonic() - began)

    async with server.http() as http, server.http() as other, anyio.create_task_group() as tasks:
        tasks.start_soon(others, other)
        answer = await http.post(path, content=content, headers=accept)
        tasks.cancel_scope.cancel()
    return answer, waited


@pytest.mark.parametrize("door", [rollouts, mcp, step], ids=["http", "mcp", "openenv"])
@pytest.mark.parametrize("body", [files(300_000), unknown(600_000)], ids=["files", "unknown"])
async def test_a_request_of_too_many_parts_is_refused_before_it_is_decoded(
    server: Served, door: Callable[[Arguments], tuple[str, Arguments]], body: Arguments
) -> None:
    answer, waited = await attack(server, *door(body))
    assert (answer.status_code, answer.json()["error_code"]) == (413, "too_large"), answer.text[:500]
    assert "more parts than" in answer.json()["error"]
    assert waited < SLOWEST_S


async def test_a_frame_of_too_many_parts_closes_its_socket(server: Served) -> None:
    _, body = step(files(300_000))
    async with connect(server.url.replace("http", "ws") + "/ws", open_timeout=120) as ws:
        with pytest.raises(ConnectionClosed) as closed:
            await ws.send(json.dumps({"type": "step", "data": body["action"]}))
            await ws.recv()
        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, "more parts than" in closed.value.rcvd.reason) == (1009, True)


@pytest.mark.parametrize("door", [rollouts, mcp, step], ids=["http", "mcp", "openenv"])
@pytest.mark.parametrize(
    ("body", "argument", "said"),
    [
        (files(MOST_ITEMS + 1), "upload_files", "at most 10000"),
        (unknown(20_000), None, "there are 20001 arguments"),
    ],
    ids=["files", "unknown"],
)
async def test_a_request_of_fewer_parts_is_told_what_is_too_much(
    server: Served, door: Callable[[Arguments], tuple[str, Arguments]], body: Arguments, argument: str | None, said: str
) -> None:
    answer, waited = await attack(server, *door(body))
    problem = answer.json()
    if door is mcp:
        problem = problem["result"]["structuredContent"]
    elif door is step:
        problem = problem["observation"]["metadata"]
    assert (problem["error_code"], problem["argument"] or None) == ("bad_argument", argument)
    assert said in problem["error"]
    assert waited < SLOWEST_S


def test_ten_thousand_files_are_no_attack() -> None:
    assert len(RolloutRequest.parsed(files(MOST_ITEMS)).upload_files) == MOST_ITEMS
    content = json.dumps(mcp(files(MOST_ITEMS))[1]).encode()
    assert PartCounter().takes(content)
    for name in ("setup", "setup_hosts", "verify", "keep", "enabled_tools", "disabled_tools", "solution"):
        with pytest.raises(ValidationError, match="at most 10000 items"):
            RolloutRequest.model_validate({"instruction": "x", name: [{} if name == "solution" else "x"] * 10_001})


VALUES = st.recursive(st.none() | st.booleans() | st.text('x,"\\[{é', max_size=8), st.lists, max_leaves=20)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text('y,"\\[{', max_size=4), VALUES, max_size=5), st.integers(1, 9))
def test_parts_are_counted_the_same_however_the_body_is_cut(value: Arguments, size: int) -> None:
    def parts(value: object) -> int:
        if isinstance(value, str):
            return 1
        if isinstance(value, dict):
            return 1 + max(0, len(value) - 1) + len(value) + sum(map(parts, value.values()))
        if isinstance(value, list):
            return 1 + max(0, len(value) - 1) + sum(map(parts, value))
        return 0

    def fits(most: int) -> bool:
        counter = PartCounter(most)
        return all(counter.takes(data[at : at + size]) for at in range(0, len(data), size))

    data = json.dumps(value, ensure_ascii=False).encode()
    assert fits(parts(value))
    assert not fits(parts(value) - 1)


async def test_many_resets_of_one_caller_forget_no_episode_of_another(tmp_path: Path) -> None:
    keys = {name: new_key(tmp_path / "keys.toml", name) for name in ("flood", "mine")}
    async with (
        served(tmp_path / "home", "--api-key-file", str(tmp_path / "keys.toml")) as server,
        server.http(keys["mine"]) as mine,
        server.http(keys["flood"]) as flood,
    ):
        assert (await mine.post("/reset", json={"episode_id": "kept"})).status_code == 200
        await mine.post("/step", json={"action": {"type": "list_tools"}, "episode_id": "kept"})
        await flood.post("/reset", json={"episode_id": "first"})
        await flood.post("/step", json={"action": {"type": "list_tools"}, "episode_id": "first"})
        for _ in range(EPISODES):
            assert (await flood.post("/reset", json={})).status_code == 200
        assert (await mine.get("/state", params={"episode_id": "kept"})).json()["step_count"] == 1
        assert (await flood.get("/state", params={"episode_id": "first"})).json()["step_count"] == 0
