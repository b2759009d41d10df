"""Endpoints and services that nobody vouches for: whatever they say, we stay up, in time, and keep our keys."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import anyio
import httpx
import pytest

from rollcage.environments import fleet as fleets
from rollcage.environments.fleet import (
    EndpointDown,
    FleetError,
    FleetMCPTools,
    KeyRefused,
    Options,
    ToolFailed,
    ToolNotFound,
    VerifierFailed,
)
from rollcage.errors import UsageError
from rollcage.json_safe import DEEPEST
from rollcage.mcp import guarded
from rollcage.mcp.bridge import serve_tools
from rollcage.mcp.endpoint import MOST
from rollcage.simulators import FleetRuntime
from rollcage.simulators.fleet.listener import LoopbackListener
from rollcage.sse import EventReader
from support.fleet_stand import opened
from support.hostile_endpoint import Hostile, Write, hostile, schema

pytestmark = pytest.mark.anyio
KEY = "sk-very-secret-key-of-mine"


@pytest.fixture
async def endpoint() -> AsyncIterator[Hostile]:
    async with hostile() as serving:
        yield serving


@pytest.fixture
async def tools(endpoint: Hostile) -> AsyncIterator[FleetMCPTools]:
    async with FleetMCPTools(KEY, {"it": endpoint.url}) as opened_tools:
        yield opened_tools


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


async def pouring(write: Write, asked: dict[str, Any]) -> None:
    """One line, longer than anybody reads."""
    await write(b"data: ")
    for _ in range(guarded.LARGEST // 65536 + 100):
        await write(b"x" * 65536)


@pytest.mark.parametrize("kind", ["text/event-stream", "application/json"])
async def test_an_answer_without_end_is_given_up_and_told_as_too_large(
    endpoint: Hostile, tools: FleetMCPTools, kind: str
) -> None:
    endpoint.stream("tools/call", pouring, {"content-type": kind})
    with anyio.fail_after(300), pytest.raises(ToolFailed, match="larger than 64 MiB and was not read; ask for less"):
        await tools.call_tool("look", timeout_s=240)
    assert tools.report().status == "whole", "the endpoint itself is well"


def test_a_long_line_in_many_pieces_is_read_in_one_pass() -> None:
    """Each byte is copied a few times, not once for every piece that comes."""
    reader = EventReader()
    for _ in range(100):
        assert not list(reader.feed(b"x" * 64))
    assert max(len(piece) for piece in reader._rest) == 64
    (event,) = reader.feed(b"\ndata: y\n\n")
    assert event.data == b"y"


async def test_packed_answers_are_not_unpacked(endpoint: Hostile, tools: FleetMCPTools) -> None:
    bomb = gzip.compress(gzip.compress(b"0" * 10_000_000))
    endpoint.answer("tools/call", bomb, headers={"content-type": "application/json", "content-encoding": "gzip, gzip"})
    with pytest.raises(EndpointDown, match=r"packed \(gzip, gzip\), which was not asked for"):
        await tools.call_tool("look")


@pytest.mark.parametrize("where", ["http", "rpc", "tool", "events"])
async def test_a_key_that_is_echoed_reaches_nobody(endpoint: Hostile, tools: FleetMCPTools, where: str) -> None:
    await tools.list_tools()
    echo = f"your header was Bearer {KEY}, was it not?"
    if where == "http":
        endpoint.answer("tools/call", echo, status=401)
    elif where == "events":

        async def slowly(write: Write, asked: dict[str, Any]) -> None:
            answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"content": [{"type": "text", "text": echo}]}}
            for character in f"data: {json.dumps(answer)}\n\n":
                await write(character.encode())

        endpoint.stream("tools/call", slowly)
    else:
        endpoint.answer("tools/call", {"content": [{"type": "text", "text": echo}], "isError": where == "rpc"})
    said = ""
    try:
        said = (await tools.call_tool("look")).text
    except (EndpointDown, ToolFailed) as error:
        said = f"{error} {error.__cause__}"
    assert "your header was Bearer [key], was it not?" in said
    assert endpoint.authorization[-1] == f"Bearer {KEY}", "it did get it"
    assert KEY not in said + repr(tools.report())


@pytest.mark.parametrize("location", ["http://127.0.0.1:{port}/inner", "http://localhost:{own}/mcp", "//[bad", "/\x7f"])
async def test_a_redirect_leads_nowhere_else(endpoint: Hostile, tools: FleetMCPTools, location: str) -> None:
    async with hostile() as inner:
        to = location.format(port=inner.port, own=endpoint.port)
        endpoint.answer("initialize", "", status=307, headers={"location": to})
        with pytest.raises(EndpointDown):
            await tools.list_tools()
        assert inner.asked == []


@pytest.mark.parametrize(
    "said",
    [
        "[" * 100_000,
        '{"jsonrpc": "2.0", "id": 1',
        "[]",
        "\x00",
        '{"jsonrpc": "2.0", "id": %d, "result": 3}',
        '{"jsonrpc": "2.0", "id": %d, "error": 3}',
        '{"jsonrpc": "2.0", "id": %d, "error": {"message": ["no"]}}',
        '{"jsonrpc": "2.0", "id": %d, "result": {"content": 3, "isError": true}}',
    ],
)
async def test_nonsense_for_an_answer_is_an_error_that_names_the_endpoint(
    endpoint: Hostile, tools: FleetMCPTools, said: str
) -> None:
    await tools.list_tools()

    async def write(send: Write, asked: dict[str, Any]) -> None:
        await send((said % asked["id"] if "%d" in said else said).encode())

    endpoint.stream("tools/call", write, {"content-type": "application/json"})
    with pytest.raises((EndpointDown, ToolFailed)) as caught:
        await tools.call_tool("look")
    assert caught.value.endpoint == "it"
    endpoint.says.clear()
    assert (await tools.call_tool("look")).text == "fine"


@pytest.mark.parametrize("head", ["id: ☃\nretry: ²\n", "id: " + "9" * 5000 + "\nretry: " + "9" * 5000 + "\n"])
async def test_odd_fields_of_events_do_no_harm(endpoint: Hostile, tools: FleetMCPTools, head: str) -> None:
    async def write(send: Write, asked: dict[str, Any]) -> None:
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"content": [{"type": "text", "text": "here"}]}}
        await send(f"{head}data: {json.dumps(answer)}\n\n".encode())

    endpoint.stream("tools/call", write)
    assert (await tools.call_tool("look")).text == "here"


async def test_session_ids_and_versions_that_no_header_takes_are_not_sent_back(
    endpoint: Hostile, tools: FleetMCPTools
) -> None:
    result = {"protocolVersion": "☃\r\nx: y", "capabilities": {}, "serverInfo": {"name": "n" * 10_000}}
    endpoint.answer("initialize", result, headers={"content-type": "application/json", "mcp-session-id": "é"})
    assert (await tools.call_tool("look")).text == "fine"
    report = tools.report().endpoints[0]
    assert report.protocol == ""
    assert len(report.server) == 200


async def test_questions_without_number_are_not_all_answered(endpoint: Hostile, tools: FleetMCPTools) -> None:
    async def write(send: Write, asked: dict[str, Any]) -> None:
        ping = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "ping"})
        await send(f"data: {ping}\n\n".encode() * 2000)
        answer = {"jsonrpc": "2.0", "id": asked["id"], "result": {"content": []}}
        await send(f"data: {json.dumps(answer)}\n\n".encode())

    endpoint.stream("tools/call", write)
    await tools.call_tool("look")
    session = tools._endpoints["it"]._session
    assert session
    assert len(session._background) <= 16


async def test_tools_with_odd_names_and_schemas_are_made_harmless(endpoint: Hostile, tools: FleetMCPTools) -> None:
    bomb = json.loads(deep(900))
    endpoint.tools = [
        {"name": "\x1b[31mred\x07", "inputSchema": schema()},
        {"name": "a.b", "inputSchema": schema()},
        {"name": "a_b", "inputSchema": schema()},
        {"name": "", "inputSchema": schema()},
        {"name": None},
        {"name": 3},
        {"name": "bomb", "inputSchema": bomb},
        {"name": "half \ud800", "description": "\ud83d", "inputSchema": True},
        "no tool",
        {"name": "reset"},
    ]
    listed = await tools.list_tools()
    assert listed.names == ["__31mred_", "a_b", "bomb", "half__"]
    json.dumps(listed.tools).encode()
    listed.model_dump_json()
    assert tools.report().withheld == [*["it: a tool without a name"] * 3, "it: reset"]
    await tools.call_tool("a.b")
    assert endpoint.asked[-1]["params"]["name"] == "a.b"
    await tools.call_tool("\x1b[31mred\x07")
    assert endpoint.asked[-1]["params"]["name"] == "\x1b[31mred\x07"
    endpoint.tools = [{"name": "a_b", "inputSchema": schema()}, {"name": "a.b", "inputSchema": schema()}]
    await tools.list_tools(refresh=True)
    with pytest.raises(ToolNotFound):
        await tools.call_tool("a.b")  # it is not the one that is offered as a_b


async def test_a_great_many_tools_are_listed_and_too_many_are_refused(endpoint: Hostile, tools: FleetMCPTools) -> None:
    endpoint.tools = [{"name": f"tool-{n}"} for n in range(MOST)]
    assert len((await tools.list_tools()).tools) == MOST
    with pytest.raises(ToolNotFound) as caught:
        await tools.call_tool("none of them")
    assert len(str(caught.value)) < 2000
    endpoint.tools.append({"name": "one more"})
    with pytest.raises(EndpointDown, match=f"cannot list its tools: there are more than {MOST}"):
        await tools.list_tools(refresh=True)


async def test_pages_without_end_are_given_up(endpoint: Hostile, tools: FleetMCPTools) -> None:
    numbers = count()

    async def write(send: Write, asked: dict[str, Any]) -> None:
        result = {"tools": [{"name": f"t{next(numbers)}"}], "nextCursor": str(next(numbers))}
        await send(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode())

    endpoint.stream("tools/list", write, {"content-type": "application/json"})
    with anyio.fail_after(120):
        assert len((await tools.list_tools()).tools) == 250


async def test_an_endpoint_that_never_lists_its_tools_holds_up_nobody(endpoint: Hostile) -> None:
    async def never(send: Write, asked: dict[str, Any]) -> None:
        await send(b": wait\n\n")
        await anyio.sleep(600)

    async with hostile() as good:
        good.tools = [{"name": "see"}]
        endpoint.stream("tools/list", never)
        options = Options(endpoints={}, connect_timeout_s=3)
        async with FleetMCPTools(KEY, {"bad": endpoint.url, "good": good.url}, options) as tools:
            with anyio.fail_after(120):
                assert (await tools.list_tools()).names == ["see"]
            report = tools.report()
            assert (report.status, report.endpoints[0].status) == ("partial", "down")
            assert "not listed within 3 s" in report.endpoints[0].error


async def test_whatever_a_tool_answers_can_be_passed_on_to_an_agent(endpoint: Hostile, tools: FleetMCPTools) -> None:
    text = '{"id": %d, "result": {"content": [{"type": "text", "text": "\\ud83d NaN"}], "structuredContent": '

    async def write(send: Write, asked: dict[str, Any]) -> None:
        odd = f'[NaN, -Infinity, "\\ud83d", {deep(800)}, {"9" * 400}]'
        await send((text % asked["id"] + odd + "}}").encode())

    endpoint.stream("tools/call", write, {"content-type": "application/json"})
    result = await tools.call_tool("look")
    assert result.text == "? NaN"
    result.model_dump_json()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
        body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "look"}}
        async with serve_tools(tools, sock), httpx.AsyncClient(timeout=60) as http:
            relayed = json.loads((await http.post(address, json=body)).content, parse_constant=pytest.fail)
    assert relayed["result"]["structuredContent"][:3] == ["NaN", "-Infinity", "?"]
    assert DEEPEST < 800


@pytest.mark.parametrize("arguments", [{"when": object()}, {"x": float("nan")}, {"x": {1, 2}}])
async def test_arguments_that_are_no_json_are_refused_before_anything_is_sent(
    endpoint: Hostile, tools: FleetMCPTools, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="arguments: they cannot be written as JSON"):
        await tools.call_tool("look", arguments)
    assert endpoint.asked == []


@pytest.mark.parametrize("url", ["http://[::1/mcp", "http://host:99999/mcp", "http://ho\x07st/mcp"])
def test_addresses_that_cannot_be_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="endpoints: "):
        FleetMCPTools(KEY, [url])


class Service:
    """A control plane that answers everything in one way."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sent = dict(scope["headers"]).get(b"authorization", b"").replace(b"Bearer ", b"")
        await send(
            {"type": "http.response.start", "status": self.status, "headers": [(b"content-type", b"text/plain")]}
        )
        await send({"type": "http.response.body", "body": self.body.replace(b"KEY", sent)})


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (401, b'{"detail": "KEY is not a key we know"}'),
        (403, b'{"detail": [{"loc": ["KEY"], "msg": "odd"}]}'),
        (400, b'{"detail": 3}'),
        (500, b"[" * 100_000),
        (200, b"[" * 100_000),
        (200, b"null"),
        (200, b"KEY"),
        (302, b""),
    ],
)
async def test_a_service_that_talks_nonsense_is_told_and_the_key_is_not(status: int, body: bytes) -> None:
    listener = LoopbackListener(Service(status, body))
    await listener.start()
    try:
        with pytest.raises(FleetError, match="cannot provision desk") as caught:
            async with fleets.open("desk", api_key=KEY, base_url=f"http://127.0.0.1:{listener.port}"):
                pass
    finally:
        await listener.stop()
    notes = " ".join(getattr(caught.value, "__notes__", []))
    assert KEY not in f"{caught.value} {caught.value.__cause__} {notes}"
    assert isinstance(caught.value, KeyRefused) == (status == 401)


async def test_a_verifiers_reward_is_a_finite_number_or_none(fleet: FleetRuntime) -> None:
    async with opened(fleet) as env:
        for result in ("float('nan')", "10 ** 400", "'1.0'", "{'reward': 1.0}"):
            with pytest.raises(VerifierFailed, match="which is no reward"):
                await env.verify(f"def verify(before, after, answer=None):\n    return {result}\n")
        assert await env.verify("def verify(before, after, answer=None):\n    return True\n") == 1.0


async def test_a_manager_that_sends_a_byte_now_and_then_is_late_all_the_same(fleet: FleetRuntime) -> None:
    fleet.faults.dripping = {"/api/v1/env/reset"}
    async with opened(fleet, request_timeout_s=2) as env:
        with anyio.fail_after(120), pytest.raises(FleetError, match="no answer to /reset within 2 s"):
            await env.reset(1)


@pytest.mark.parametrize(
    ("state", "episode", "steps"),
    [({"episode_id": 7, "step_count": "many"}, "7", 0), ({"episode_id": ["x"], "step_count": None}, "['x']", 0)],
)
async def test_a_state_of_any_shape_is_read(
    fleet: FleetRuntime, state: dict[str, Any], episode: str, steps: int
) -> None:
    fleet.faults.offers_step = True
    fleet.faults.state = state
    async with opened(fleet) as env:
        told = await env.state()
        assert (told.episode_id, told.step_count) == (episode, steps)


async def test_this_machine_is_reached_without_a_proxy(fleet: FleetRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with opened(fleet) as env:
        assert (await env.tools.list_tools()).names


def test_only_whole_secrets_are_held_back() -> None:
    stream = guarded._GuardedBody(httpx.ByteStream(b""), (b"abcdefgh",))
    assert stream._split(b"xxabcdefghyy") == (b"xx[key]yy", b"")
    assert stream._split(b"xxabc") == (b"xx", b"abc")
    assert stream._split(b"abcabcd") == (b"abc", b"abcd")
    assert stream._split(b"} \n\n") == (b"} \n\n", b"")


async def test_calls_of_tools_that_are_not_there_do_not_list_them_each_time(
    endpoint: Hostile, tools: FleetMCPTools
) -> None:
    await tools.list_tools()
    for n in range(40):
        with pytest.raises(ToolNotFound):
            await tools.call_tool(f"none-{n}")
    assert len([asked for asked in endpoint.asked if asked.get("method") == "tools/list"]) < 40
