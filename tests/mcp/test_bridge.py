"""The tools of an environment, served to an agent on a socket: a stock MCP client sees them and nothing else."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import httpx
import pytest

from rollcage.environments.fleet import RemoteEnvironment
from rollcage.mcp.bridge import LARGEST, ToolCall, serve_tools
from rollcage.simulators import FleetRuntime
from support.fleet_stand import opened

pytestmark = pytest.mark.anyio


@pytest.fixture
async def env(fleet: FleetRuntime) -> AsyncIterator[RemoteEnvironment]:
    async with opened(fleet) as environment:
        yield environment


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def address(sock: socket.socket) -> str:
    return f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"


@pytest.fixture
async def calls(env: RemoteEnvironment, sock: socket.socket) -> AsyncIterator[list[ToolCall]]:
    """What the bridge recorded; it serves while the test runs."""
    made: list[ToolCall] = []

    async def record(call: ToolCall) -> None:
        made.append(call)

    async with serve_tools(env.tools, sock, record=record):
        yield made


async def test_a_stock_client_sees_exactly_the_tools_and_calls_them(
    env: RemoteEnvironment, sock: socket.socket, calls: list[ToolCall]
) -> None:
    from fastmcp import Client

    async with Client(address(sock)) as client:
        listed = {tool.name: tool for tool in await client.list_tools()}
        union = await env.tools.list_tools()
        assert list(listed) == union.names
        raw = listed["search_tickets"].model_dump(by_alias=True, exclude_none=True, mode="json")
        assert raw["inputSchema"] == next(one for one in union.offered if one.name == "search_tickets").input_schema
        result = await client.call_tool("read_ticket", {"ticket_id": 101})
        assert result.structured_content
        assert result.structured_content["id"] == 101
        screen = await client.call_tool("computer", {"action": "screenshot"})
        assert screen.content[0].type == "image"
    assert [(call.name, call.error) for call in calls] == [("read_ticket", ""), ("computer", "")]
    assert calls[0].arguments == {"ticket_id": 101}


async def test_failures_reach_the_agent_without_addresses_or_keys(
    fleet: FleetRuntime, sock: socket.socket, calls: list[ToolCall]
) -> None:
    from fastmcp import Client

    async with Client(address(sock)) as client:
        await client.list_tools()
        broken = await client.call_tool("read_ticket", {"ticket_id": 1}, raise_on_error=False)
        assert broken.is_error
        assert "there is no ticket 1" in broken.content[0].text
        unknown = await client.call_tool("reset", {}, raise_on_error=False)
        assert (unknown.is_error, unknown.content[0].text) == (True, "there is no such tool")
        await fleet.instance().lose()
        down = await client.call_tool("read_ticket", {"ticket_id": 101}, raise_on_error=False)
        assert (down.is_error, down.content[0].text) == (True, "the environment does not answer")
    assert "endpoint 'mcp' (http://" in calls[-1].error


async def test_a_call_that_the_agent_gives_up_is_stopped_in_the_environment(
    fleet: FleetRuntime, sock: socket.socket, calls: list[ToolCall]
) -> None:
    fleet.faults.hanging = {"list_tickets"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "list_tickets"}}
    tools = fleet.instance().tools
    assert tools
    async with httpx.AsyncClient(timeout=None) as http, anyio.create_task_group() as tasks:

        async def ask() -> None:
            await http.post(address(sock), json=body)

        tasks.start_soon(ask)
        while not tools.begun:
            await fleet.faults.wait()
        tasks.cancel_scope.cancel()
    with anyio.fail_after(120):
        while tools.stopped != ["list_tickets"]:
            await fleet.faults.wait()
    assert calls[0].error == "the call was cancelled; it may have run"


async def test_the_end_of_the_block_cuts_calls_in_flight(
    fleet: FleetRuntime, env: RemoteEnvironment, sock: socket.socket
) -> None:
    fleet.faults.hanging = {"list_tickets"}
    url = address(sock)
    outcome: list[Any] = []
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "list_tickets"}}

    async def hang(http: httpx.AsyncClient) -> None:
        try:
            outcome.append((await http.post(url, json=body, timeout=None)).status_code)
        except httpx.HTTPError as error:
            outcome.append(type(error))

    async with httpx.AsyncClient(timeout=120) as http, anyio.create_task_group() as tasks:
        async with serve_tools(env.tools, sock):
            tasks.start_soon(hang, http)
            tools = fleet.instance().tools
            assert tools
            while not tools.begun:
                await fleet.faults.wait()
        with anyio.fail_after(120):
            while not outcome:
                await anyio.sleep(0.01)
        with pytest.raises(httpx.ConnectError):
            await http.post(url, json=body)


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/mcp", b"{", 400),
        ("POST", "/mcp", b"[]", 400),
        ("POST", "/mcp", b"[" * 100_000, 400),
        ("GET", "/mcp", b"", 405),
        ("POST", "/reset", b"{}", 404),
        ("POST", "/mcp/../reset", b"{}", 404),
        ("POST", "/mcp", b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":[]}}', 202),
    ],
)
async def test_nonsense_is_refused(
    sock: socket.socket, calls: list[ToolCall], method: str, path: str, body: bytes, status: int
) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        base = address(sock).removesuffix("/mcp")
        assert (await http.request(method, f"{base}{path}", content=body)).status_code == status


@pytest.mark.parametrize(
    "method", ["env/reset", "resources/list", "prompts/list", "openenv/session/create", "x" * 9999]
)
async def test_there_is_no_other_method(sock: socket.socket, calls: list[ToolCall], method: str) -> None:
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(address(sock), json={"jsonrpc": "2.0", "id": "a", "method": method})
    assert answer.json()["error"]["code"] == -32601


async def test_requests_that_would_fill_the_memory_are_refused_and_the_others_are_served(
    sock: socket.socket, calls: list[ToolCall]
) -> None:
    """Bodies that are held back before their last byte take up the room; once they are gone there is room again."""
    host, port = sock.getsockname()
    head = f"POST /mcp HTTP/1.1\r\nhost: here\r\ncontent-length: {LARGEST}\r\n\r\n".encode()
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    large = {**ping, "params": {"x": "y" * (LARGEST - 1000)}}
    async with httpx.AsyncClient(timeout=120) as http:
        async with AsyncExitStack() as stack:
            with anyio.fail_after(120):
                while (await http.post(address(sock), json=large)).status_code == 200:
                    # One more each time: where room ends while two are read, the held one may be the one refused.
                    held = await stack.enter_async_context(await anyio.connect_tcp(host, port))
                    with suppress(anyio.BrokenResourceError):
                        await held.send(head + b" " * (LARGEST - 1))
            assert (await http.post(address(sock), json=ping)).status_code == 200
        with anyio.fail_after(120):
            while (await http.post(address(sock), json=large)).status_code != 200:
                await anyio.sleep(0.05)


async def test_a_very_long_name_is_no_work(fleet: FleetRuntime, sock: socket.socket, calls: list[ToolCall]) -> None:
    params = {"name": "n" * 1_000_000, "arguments": {}}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with httpx.AsyncClient(timeout=120) as http:
        answer = (await http.post(address(sock), json=body)).json()
    assert answer["result"]["isError"]
    assert len(calls[0].error) < 1000


@pytest.mark.parametrize("version", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
async def test_every_version_with_a_handshake_is_spoken(
    sock: socket.socket, calls: list[ToolCall], version: str
) -> None:
    params = {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
    async with httpx.AsyncClient(timeout=120) as http:
        body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params}
        answer = await http.post(address(sock), json=body)
        assert answer.json()["result"]["protocolVersion"] == version
        headers = {"mcp-session-id": answer.headers["mcp-session-id"], "mcp-protocol-version": version}
        listed = await http.post(
            address(sock), json={"jsonrpc": "2.0", "id": 2, "method": "tools/list"}, headers=headers
        )
        assert "read_ticket" in [tool["name"] for tool in listed.json()["result"]["tools"]]


async def test_requests_that_stand_for_themselves_are_answered_too(sock: socket.socket, calls: list[ToolCall]) -> None:
    version = "2026-07-28"
    params = {"_meta": {"io.modelcontextprotocol/protocolVersion": version}, "name": "read_ticket"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {**params, "arguments": {"ticket_id": 101}}}
    async with httpx.AsyncClient(timeout=120) as http:
        answer = await http.post(address(sock), json=body, headers={"mcp-protocol-version": version})
        result = answer.json()["result"]
        assert (result["structuredContent"]["id"], result["resultType"]) == (101, "complete")
        unknown = await http.post(address(sock), json=body, headers={"mcp-protocol-version": "1999-01-01"})
    assert unknown.status_code == 400
    assert unknown.json()["error"]["data"]["requested"] == "1999-01-01"


async def test_a_call_is_cancelled_by_its_own_session_and_by_no_other(
    fleet: FleetRuntime, sock: socket.socket, calls: list[ToolCall]
) -> None:
    fleet.faults.hanging = {"list_tickets"}
    tools = fleet.instance().tools
    assert tools
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "list_tickets"}}
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
    answered: list[httpx.Response] = []
    async with httpx.AsyncClient(timeout=None) as http, anyio.create_task_group() as tasks:

        async def ask() -> None:
            answered.append(await http.post(address(sock), json=call, headers={"mcp-session-id": "mine"}))

        tasks.start_soon(ask)
        while not tools.begun:
            await fleet.faults.wait()
        await http.post(address(sock), json=cancel, headers={"mcp-session-id": "another"})
        assert not calls
        await http.post(address(sock), json=cancel, headers={"mcp-session-id": "mine"})
    assert answered[0].json()["error"]["code"] == -32800
    assert calls[0].error == "the call was cancelled; it may have run"
