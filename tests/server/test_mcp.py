"""The MCP endpoint, as stock clients and raw HTTP see it."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import httpx
import jsonschema
import pytest

from support.environment_server import HOLD, served, shell
from support.served import steady_port

pytestmark = pytest.mark.anyio

TOOLS = [
    "run_rollout",
    "start_rollout",
    "get_state",
    "get_messages",
    "subscribe_events",
    "abort_rollout",
    "finalize_rollout",
]
GROUP_TOOLS = [
    "start_group",
    "wait_groups",
    "abort_group",
    "get_group_sequences",
    "pause_gateway",
    "resume_gateway",
    "start_batch",
    "get_batch",
]
BOTH = {"Accept": "application/json, text/event-stream"}
Call = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("home")) as url:
        yield url


@pytest.fixture
async def http(server: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server, headers=BOTH, timeout=120) as client:
        yield client


@pytest.fixture
def call(http: httpx.AsyncClient) -> Call:
    """Calls a tool over raw HTTP; the result as MCP has it."""

    async def call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
        answer = await http.post("/mcp", json=request("tools/call", {"name": tool, "arguments": arguments}))
        result: dict[str, Any] = answer.json()["result"]
        return result

    return call


def request(method: str, params: dict[str, Any] | None = None, number: int = 1) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "method": method, "params": params or {}}


async def official(stack: AsyncExitStack, server: str) -> Any:
    from mcp.client.streamable_http import streamable_http_client

    from mcp import ClientSession

    read, write, _ = await stack.enter_async_context(streamable_http_client(f"{server}/mcp"))
    session = await stack.enter_async_context(ClientSession(read, write))
    await session.initialize()
    return session


async def test_the_official_client_lists_and_calls_every_tool(server: str) -> None:
    async with AsyncExitStack() as stack:
        client = await official(stack, server)
        assert [tool.name for tool in (await client.list_tools()).tools] == TOOLS + GROUP_TOOLS
        # The keep-alives of a silent call come before its answer.
        result = await client.call_tool("run_rollout", shell("sleep 1; echo hi > out", verify=["test -s out"]))
        assert not result.isError
        assert result.structuredContent["reward"] == 1.0
        assert json.loads(result.content[0].text) == result.structuredContent
        assert len(result.content) == 1
        rollout = {"rollout_id": result.structuredContent["rollout_id"]}
        for tool in TOOLS[2:]:
            # This client checks each answer against the tool's output schema.
            assert not (await client.call_tool(tool, rollout)).isError, tool


async def test_a_stock_fastmcp_client_hears_of_progress(server: str) -> None:
    from fastmcp import Client

    heard: list[tuple[float, str]] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append((progress, message or ""))

    async with Client(f"{server}/mcp") as client:
        assert [tool.name for tool in await client.list_tools()] == TOOLS + GROUP_TOOLS
        result = await client.call_tool("run_rollout", shell("sleep 1"), progress_handler=hear)
    assert result.structured_content is not None
    assert result.structured_content["outcome"] == "finished"
    assert result.structured_content["reward"] is None
    assert result.data.outcome == "finished"
    stages = [message.split(",")[0] for _, message in heard]
    assert stages.index("setup") < stages.index("agent") < stages.index("verify")
    # Between two events the time goes on: the agent was silent for longer than the keep-alive.
    assert stages.count("agent") > 1
    assert [at for at, _ in heard] == sorted({at for at, _ in heard})


async def test_results_of_many_megabytes_arrive_at_every_client(server: str) -> None:
    from fastmcp import Client

    script = shell("for i in $(seq 40); do head -c 60000 /dev/zero | tr '\\0' x > $i; done")
    async with Client(f"{server}/mcp") as client:
        result = await client.call_tool("run_rollout", script)
    assert result.structured_content is not None
    assert len(json.dumps(result.structured_content)) > 4_000_000


async def test_an_event_is_one_line_whatever_the_agent_wrote(http: httpx.AsyncClient) -> None:
    arguments = shell("printf 'a\\xc2\\x85b\\xe2\\x80\\xa8c\\n' > z")
    params = {"name": "run_rollout", "arguments": arguments, "_meta": {"progressToken": 1}}
    answer = await http.post("/mcp", json=request("tools/call", params))
    assert answer.headers["content-type"] == "text/event-stream"
    # Python's own notion of lines, which some clients share, has more ends than the protocol's.
    last = [line for line in answer.content.decode().splitlines() if line][-1]
    files = json.loads(last.removeprefix("data: "))["result"]["structuredContent"]["files"]
    assert files == {"/home/user/workdir/z": "a\x85b\u2028c\n"}


async def test_every_argument_of_both_published_shapes_is_offered_and_described(http: httpx.AsyncClient) -> None:
    tools = {
        tool["name"]: tool for tool in (await http.post("/mcp", json=request("tools/list"))).json()["result"]["tools"]
    }
    run = tools["run_rollout"]["inputSchema"]
    newer = (
        "instruction endpoint base_url api_key model setup upload_files verify task_id mode disable_thinking".split()
    )
    newer += "max_tokens_cap top_logprobs agent_timeout_s template".split()
    older = "model_key vllm_url hf_token thinking setup_shell test_script".split()
    ours = "agent sandbox timeout_s idempotency_key seed temperature environment on_disconnect".split()
    assert {*newer, *older, *ours} <= run["properties"].keys()
    assert run["required"] == ["instruction"]
    assert tools["start_rollout"]["inputSchema"] == run
    for tool in tools.values():
        assert tool["description"]
        jsonschema.Draft202012Validator.check_schema(tool["outputSchema"])
        for name, argument in tool["inputSchema"]["properties"].items():
            assert argument["description"], (tool["name"], name)


async def test_the_older_shape_runs_a_test_script(call: Call) -> None:
    older = {"setup_shell": "echo 1 > given", "test_script": 'cat given > "$REWARD_FILE"', "task_id": "old-1"}
    result = (await call("run_rollout", shell("true", **older)))["structuredContent"]
    assert result["reward"] == 1.0
    assert result["test_exit_code"] == 0
    assert result["task_id"] == "old-1"
    assert result["workdir_files"] == result["files"]
    assert result["exit_code"] == result["agent_exit_code"] == 0


async def test_a_started_rollout_is_followed_by_its_id(call: Call) -> None:
    started = (await call("start_rollout", shell("echo done", task_id="mine")))["structuredContent"]
    assert started["status"] == "starting"
    assert started["task_id"] == "mine"
    rollout = {"rollout_id": started["rollout_id"]}
    result = (await call("finalize_rollout", rollout))["structuredContent"]
    assert result["outcome"] == "finished"
    assert (await call("finalize_rollout", rollout))["structuredContent"] == result
    state = (await call("get_state", rollout))["structuredContent"]
    assert (state["status"], state["proxy_turns_so_far"]) == ("done", 0)
    page = (await call("subscribe_events", {**rollout, "after": 2}))["structuredContent"]
    assert page["events"][0]["seq"] == 3
    assert page["ended"]
    assert page["sse"].endswith(f"/rollouts/{started['rollout_id']}/events")


async def test_an_aborted_rollout_ends(call: Call) -> None:
    rollout = {"rollout_id": (await call("start_rollout", shell(HOLD)))["structuredContent"]["rollout_id"]}
    assert (await call("finalize_rollout", {**rollout, "wait_s": 0}))["structuredContent"]["outcome"] is None
    assert (await call("abort_rollout", rollout))["structuredContent"]["aborted"]
    assert (await call("finalize_rollout", rollout))["structuredContent"]["outcome"] == "aborted"


async def test_an_idempotency_key_joins_the_first_rollout(call: Call) -> None:
    first = (await call("start_rollout", shell("sleep 1", idempotency_key="same")))["structuredContent"]
    second = (await call("run_rollout", shell("sleep 1", idempotency_key="same")))["structuredContent"]
    assert second["rollout_id"] == first["rollout_id"]
    other = await call("start_rollout", shell("sleep 1", idempotency_key="same", task_id="other"))
    assert other["isError"]
    assert (other["structuredContent"]["error_code"], other["structuredContent"]["argument"]) == ("conflict", "task_id")


async def test_white_space_keeps_a_silent_call_alive(http: httpx.AsyncClient) -> None:
    body = request("tools/call", {"name": "run_rollout", "arguments": shell("sleep 1")})
    async with http.stream("POST", "/mcp", json=body) as answer:
        assert answer.headers["content-type"] == "application/json"
        chunks = [chunk async for chunk in answer.aiter_raw()]
    assert chunks[0] == b"\n"
    assert json.loads(b"".join(chunks))["result"]["structuredContent"]["outcome"] == "finished"


@pytest.mark.parametrize(("choice", "outcome"), [("continue", None), ("abort", "aborted")])
async def test_a_vanished_client_has_the_effect_it_chose(
    server: str, call: Call, choice: str, outcome: str | None
) -> None:
    arguments = shell(HOLD, idempotency_key=f"vanish-{choice}", on_disconnect=choice)
    async with httpx.AsyncClient(base_url=server, headers=BOTH, timeout=120) as client:
        body = request("tools/call", {"name": "run_rollout", "arguments": arguments})
        async with client.stream("POST", "/mcp", json=body) as answer:
            async for _ in answer.aiter_raw():
                break  # the rollout runs: a keep-alive came
    joined = (await call("start_rollout", arguments))["structuredContent"]
    rollout = {"rollout_id": joined["rollout_id"]}
    assert joined["joined"]
    wait_s = 1 if outcome is None else 60
    assert (await call("finalize_rollout", {**rollout, "wait_s": wait_s}))["structuredContent"]["outcome"] == outcome
    await call("abort_rollout", rollout)


async def test_a_cancelled_call_is_answered_and_has_the_effect_it_chose(http: httpx.AsyncClient, call: Call) -> None:
    hello = request("initialize", {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {}})
    session = {"Mcp-Session-Id": (await http.post("/mcp", json=hello)).headers["mcp-session-id"]}
    arguments = shell(HOLD, idempotency_key="cancel", on_disconnect="abort")
    answers: list[dict[str, Any]] = []

    async def run(started: anyio.Event) -> None:
        body = request("tools/call", {"name": "run_rollout", "arguments": arguments}, 7)
        async with http.stream("POST", "/mcp", json=body, headers=session) as answer:
            text = b""
            async for chunk in answer.aiter_raw():
                started.set()
                text += chunk
            answers.append(json.loads(text))

    async with anyio.create_task_group() as tasks:
        started = anyio.Event()
        tasks.start_soon(run, started)
        await started.wait()
        note = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
        # Another session's word counts for nothing.
        await http.post("/mcp", json=note, headers={"Mcp-Session-Id": "other"})
        assert (await http.post("/mcp", json=note, headers=session)).status_code == 202
    assert answers[0]["error"]["code"] == -32800
    rollout = {"rollout_id": (await call("start_rollout", arguments))["structuredContent"]["rollout_id"]}
    assert (await call("finalize_rollout", rollout))["structuredContent"]["outcome"] == "aborted"


async def test_bad_arguments_are_tool_errors_that_name_the_argument_and_tell_no_secret(call: Call) -> None:
    cases: dict[str, dict[str, Any]] = {
        "instruction": {"instruction": " ", "endpoint": "scripted"},
        "endpoint": {"instruction": "x", "endpoint": "nobody"},
        "mode": {"instruction": "x", "endpoint": "scripted", "mode": "glass_box"},
        "base_url": {"instruction": "x", "endpoint": "vllm"},
        "instrction": {"instrction": "x", "instruction": "x"},
        "api_key": {"instruction": "x", "api_key": ["sk-very-secret"]},
    }
    for argument, arguments in cases.items():
        result = await call("run_rollout", arguments)
        assert result["isError"], argument
        assert result["structuredContent"]["error_code"] == "bad_argument"
        assert result["structuredContent"]["argument"] == argument
        assert argument in result["content"][0]["text"]
        assert "sk-very-secret" not in json.dumps(result)
    assert (await call("finalize_rollout", {"rollout_id": "x", "wait_s": -1}))["structuredContent"][
        "argument"
    ] == "wait_s"


async def test_an_unknown_id_is_an_error_for_mcp_and_a_payload_for_the_older_shape(
    http: httpx.AsyncClient, call: Call
) -> None:
    for tool in TOOLS[2:]:
        newer = await call(tool, {"rollout_id": "nobody"})
        assert newer["isError"]
        assert "unknown rollout_id: nobody" in newer["content"][0]["text"]
        body = request("tools/call", {"name": tool, "arguments": {"rollout_id": "nobody"}})
        older = (await http.post("/mcp", json=body, headers={"Accept": "*/*"})).json()["result"]["data"]
        assert older["rollout_id"] == "nobody"
        said = older.get("error") or older.get("reason") or older.get("status")
        assert said in ("unknown", "unknown rollout_id: nobody"), tool


@pytest.mark.parametrize("name", ["reset", "step", "state", "close"])
async def test_nobody_reaches_the_environments_controls_over_mcp(http: httpx.AsyncClient, name: str) -> None:
    for accept in (BOTH["Accept"], "*/*"):
        for body in (request(name), request("tools/call", {"name": name, "arguments": {}})):
            answer = (await http.post("/mcp", json=body, headers={"Accept": accept})).json()
            assert "result" not in answer
            assert answer["error"]["code"] in (-32601, -32602, -32603)


async def test_an_open_session_outlives_the_server(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        port = steady_port()
        with served(tmp_path, port=port, sessions=0) as url:
            client = await official(stack, url)
            first = await client.call_tool("run_rollout", shell("true"))
        with served(tmp_path, port=port, sessions=0):
            rollout = {"rollout_id": first.structuredContent["rollout_id"]}
            again = await client.call_tool("finalize_rollout", rollout)
            assert again.structuredContent == first.structuredContent


async def test_what_is_no_request_is_refused_as_the_protocol_says(http: httpx.AsyncClient) -> None:
    assert (await http.get("/mcp")).status_code == 405
    assert (await http.delete("/mcp", headers={"Mcp-Session-Id": "any"})).status_code == 204
    broken = await http.post("/mcp", content=b"{", headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, -32700)
    batch = await http.post("/mcp", json=[request("ping")])
    assert (batch.status_code, batch.json()["error"]["code"]) == (400, -32600)
    future = await http.post("/mcp", json=request("ping"), headers={"MCP-Protocol-Version": "2099-01-01"})
    assert (future.status_code, future.json()["error"]["data"]["requested"]) == (400, "2099-01-01")
    unknown = await http.post("/mcp", json=request("tools/call", {"name": "rm"}))
    assert unknown.json()["error"]["code"] == -32602
    assert (await http.post("/mcp", json=request("prompts/list"))).json()["error"]["code"] == -32601
    odd = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": [1]}}
    assert (await http.post("/mcp", json=odd)).status_code == 202
    half = await http.post("/mcp", content=rb'{"jsonrpc":"2.0","id":"\ud800","method":"ping"}')
    assert half.content == rb'{"jsonrpc":"2.0","id":"\ud800","result":{}}'
    assert (await http.post("/mcp", json={"jsonrpc": "2.0", "method": "notifications/initialized"})).status_code == 202


@pytest.mark.parametrize(("asked", "given"), [("2024-11-05", "2024-11-05"), ("1999-01-01", "2025-11-25")])
async def test_the_handshake_settles_on_a_version_both_know(http: httpx.AsyncClient, asked: str, given: str) -> None:
    hello = request("initialize", {"protocolVersion": asked, "capabilities": {}, "clientInfo": {}})
    assert (await http.post("/mcp", json=hello)).json()["result"]["protocolVersion"] == given


async def test_the_protocol_without_handshake_is_spoken_too(http: httpx.AsyncClient) -> None:
    spoken = "2026-07-28"
    meta = {"io.modelcontextprotocol/protocolVersion": spoken, "io.modelcontextprotocol/clientCapabilities": {}}

    async def ask(method: str, **headers: str) -> httpx.Response:
        sent = {"MCP-Protocol-Version": spoken, "Mcp-Method": method, **headers}
        return await http.post("/mcp", json=request(method, {"_meta": meta}), headers=sent)

    found = (await ask("server/discover")).json()["result"]
    assert found["supportedVersions"] == [spoken]
    assert found["resultType"] == "complete"
    assert [tool["name"] for tool in (await ask("tools/list")).json()["result"]["tools"]] == TOOLS + GROUP_TOOLS
    lied = await ask("tools/list", **{"Mcp-Method": "tools/call"})
    assert (lied.status_code, lied.json()["error"]["code"]) == (400, -32020)
    assert (await ask("initialize")).status_code == 404


NEWEST = """
import anyio, sys
from mcp import Client
async def main():
    for mode in ("auto", "legacy", "2026-07-28"):
        async with Client(sys.argv[1] + "/mcp", mode=mode) as client:
            assert len((await client.list_tools()).tools) == COUNT
            script = "sleep 1; for i in $(seq 40); do head -c 60000 /dev/zero | tr '\\\\0' x > $i; done"
            arguments = {"instruction": script, "agent": "shell", "endpoint": "scripted"}
            result = await client.call_tool("run_rollout", arguments, progress_callback=heard)
            size = sum(len(text) for text in result.structured_content["files"].values())
            assert size > 1_500_000, size
            assert (await client.call_tool("get_state", {"rollout_id": "nobody"})).is_error
async def heard(*words):
    pass
anyio.run(main)
""".replace("COUNT", str(len(TOOLS + GROUP_TOOLS)))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_newest_clients_work_too(server: str, tmp_path: Path) -> None:
    """They need packages that cannot live beside OpenEnv's."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    installed = subprocess.run([python, "-m", "pip", "install", "-q", "mcp>=2.3,<3"], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"cannot install mcp 2: {installed.stderr[-300:]}")
    done = subprocess.run([python, "-c", NEWEST, server], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
async def test_a_real_agents_turns_are_told_while_it_works(tmp_path: Path, state_dir: Path) -> None:
    from fastmcp import Client

    for name in ("layers", "cache", "downloads"):
        (tmp_path / name).symlink_to(state_dir / name)
    write = {"name": "bash", "arguments": {"command": "echo hi > out", "description": "writes"}}
    job = {"instruction": "Make out", "endpoint": "scripted", "verify": ["grep -q hi out"]}
    heard: list[str] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    with served(tmp_path) as url:
        async with Client(f"{url}/mcp") as client:
            script = [{"tool_calls": [write]}, {"text": "done"}]
            done = await client.call_tool("run_rollout", {**job, "solution": script}, progress_handler=hear)
            assert done.structured_content is not None
            rollout = {"rollout_id": done.structured_content["rollout_id"]}
            transcript = (await client.call_tool("get_messages", rollout)).structured_content
    assert done.structured_content["reward"] == 1.0
    assert "agent, 1 turn so far" in heard
    for turn in done.structured_content["proxy_turns"]:
        rows = [turn[name] for name in ("completion_tokens", "completion_token_ids", "per_token_logps")]
        assert len({len(row) for row in rows}) == 1
    assert transcript is not None
    assert "tool" in [part["type"] for message in transcript["messages"] for part in message["parts"]]


def test_the_endpoint_does_not_wait_for_openenv_to_be_imported() -> None:
    code = "import sys, rollcage.server.mcp; sys.exit('openenv' in sys.modules or 'mcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
