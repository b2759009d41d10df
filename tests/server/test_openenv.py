"""The environment, as OpenEnv's own clients, validators and raw sockets see it."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from rollcage.server.auth import new_key
from support.environment_server import HOLD, served, shell
from support.paths import ROOT
from support.processes import let_go
from support.served import served as serve

pytestmark = pytest.mark.anyio

KEY = "rc-a-key-for-tests"


@contextmanager
def command(home: Path, **environment: str) -> Iterator[str]:
    """`rollcage serve`, as users start it; its address."""
    program = [sys.executable, "-m", "rollcage", "serve", "--port", "0", "--json", "--quiet", "--home", str(home)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, env={**os.environ, **environment}) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, b"")
            document = b""
            for line in lines:
                document += line
                if line.strip() == b"}" or line.strip().endswith(b"}"):
                    break
            yield json.loads(document)["url"]
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with command(tmp_path_factory.mktemp("home")) as url:
        yield url


async def socket(stack: AsyncExitStack, server: str, **headers: str) -> ClientConnection:
    url = server.replace("http", "ws") + "/ws"
    return await stack.enter_async_context(connect(url, additional_headers=headers, open_timeout=120))


async def ask(ws: ClientConnection, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
    with suppress(ConnectionClosed):  # a refused session is closed at once, but first it is told why
        await ws.send(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
    answer: dict[str, Any] = json.loads(await ws.recv())
    return answer


def tool(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


async def test_an_episode_over_a_raw_socket_counts_its_rollouts(server: str) -> None:
    async with AsyncExitStack() as stack:
        ws = await socket(stack, server)
        ready = (await ask(ws, "reset", {"seed": 7, "episode_id": "mine"}))["data"]
        assert ready["metadata"]["status"] == "ready"
        listed = (await ask(ws, "step", {"type": "list_tools"}))["data"]
        assert listed["reward"] == 0.0
        assert {"reset", "step", "state", "close"}.isdisjoint(each["name"] for each in listed["observation"]["tools"])
        scored = (
            await ask(ws, "step", tool("run_rollout", **shell("touch x", verify=["test -e x", "false"], task_id="t")))
        )["data"]
        assert scored["reward"] == 0.5
        result = scored["observation"]["result"]
        assert result["data"] == result["structured_content"] == json.loads(result["content"][0]["text"])
        unscored = (await ask(ws, "step", tool("run_rollout", **shell("true", task_id="u"))))["data"]
        assert unscored["reward"] is None
        looked = (await ask(ws, "step", tool("get_state", rollout_id=result["data"]["rollout_id"])))["data"]
        assert looked["reward"] == 0.0
        state = (await ask(ws, "state"))["data"]
        assert (state["episode_id"], state["step_count"], state["rollouts_completed"]) == ("mine", 4, 2)
        assert (state["last_task_id"], state["last_reward"]) == ("u", None)
        assert state["last_sandbox_id"] == unscored["observation"]["result"]["data"]["sandbox_id"]
        await ask(ws, "reset")
        assert (await ask(ws, "state"))["data"]["rollouts_completed"] == 0


async def test_the_seed_of_the_episode_is_the_seed_of_its_rollouts(server: str) -> None:
    async with AsyncExitStack() as stack:
        ws = await socket(stack, server)
        await ask(ws, "reset", {"seed": 7})
        seeds = []
        for arguments in (shell("true"), shell("true", seed=8)):
            done = (await ask(ws, "step", tool("run_rollout", **arguments)))["data"]["observation"]["result"]["data"]
            page = await ask(ws, "step", tool("subscribe_events", rollout_id=done["rollout_id"]))
            first = page["data"]["observation"]["result"]["data"]["events"][0]["event"]
            seeds.append(first["job"]["model"]["sampling"]["seed"])
        assert seeds == [7, 8]


@pytest.mark.parametrize(
    "wrong", [{"seed": "seven"}, {"seed": "7"}, {"seed": True}, {"seed": 1.5}, {"seed": -1}, {"episode_id": 7}]
)
async def test_a_reset_with_what_is_no_seed_is_refused_by_its_name(server: str, wrong: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        ws = await socket(stack, server)
        answer = await ask(ws, "reset", wrong)
        assert (answer["type"], answer["data"]["code"]) == ("error", "VALIDATION_ERROR")
        assert [problem["loc"] for problem in answer["data"]["errors"]] == [list(wrong)]
        assert (await ask(ws, "reset", {"seed": None}))["type"] == "observation", "the session goes on"


@pytest.mark.parametrize(
    "action", [{"message": "hello"}, {}, {"type": "play", "tool_name": "run_rollout"}, {"tool_name": ""}]
)
async def test_another_action_is_answered_with_the_name_of_the_right_one(server: str, action: dict[str, Any]) -> None:
    async with AsyncExitStack() as stack:
        ws = await socket(stack, server)
        answer = await ask(ws, "step", action)
        assert answer["type"] == "observation"
        assert answer["data"]["reward"] is None, "nothing was scored"
        assert "CallToolAction" in answer["data"]["metadata"]["error"]
        assert "ListToolsAction" in answer["data"]["metadata"]["error"]


async def test_what_goes_wrong_in_a_step_is_in_its_observation(server: str) -> None:
    async with AsyncExitStack() as stack:
        ws = await socket(stack, server)
        for action, kind in (
            (tool("nothing"), "tool_not_found"),
            (tool("run_rollout", instruction=" ", endpoint="scripted"), "invalid_args"),
            ({"type": "call_tool", "tool_name": "get_state", "arguments": [1]}, "invalid_args"),
        ):
            answer = await ask(ws, "step", action)
            assert answer["data"]["observation"]["error"]["error_type"] == kind
        refused = await ask(ws, "step", tool("run_rollout", instruction="x", endpoint="nobody"))
        # A zero would say that it was scored.
        assert refused["data"]["reward"] is None


async def test_an_episode_lasts_across_plain_http_requests(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=120) as http:
        for episode in ("a", "b"):
            ready = (await http.post("/reset", json={"episode_id": episode})).json()
            assert ready["observation"]["metadata"]["status"] == "ready"
        run = tool("run_rollout", **shell("true", verify=["true"]))
        assert (await http.post("/step", json={"action": run})).json()["reward"] == 1.0
        assert (await http.post("/step", json={"action": {"type": "list_tools"}, "episode_id": "a"})).status_code == 200
        counts = {}
        for episode in ("a", "b"):
            state = (await http.get("/state", params={"episode_id": episode})).json()
            counts[state["episode_id"]] = (state["step_count"], state["rollouts_completed"])
        assert counts == {"a": (1, 0), "b": (1, 1)}


async def test_a_step_that_runs_out_of_time_names_the_rollout_that_goes_on(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=120) as http:
        mark = f"mark-{secrets.token_hex(6)}"
        step = {"action": tool("run_rollout", **shell(f"(exec -a {mark} sleep 1000); true")), "timeout_s": 4}
        error = (await http.post("/step", json=step)).json()["observation"]["error"]
        assert error["error_type"] == "timeout"
        rollout_id = error["message"].partition("rollout ")[2].split()[0]
        await let_go(mark)
        finish = {"action": tool("finalize_rollout", rollout_id=rollout_id)}
        result = (await http.post("/step", json=finish)).json()["observation"]["result"]["data"]
        assert result["outcome"] == "succeeded"


async def test_sessions_have_a_limit_and_a_client_that_vanishes_in_a_step_frees_its_place(tmp_path: Path) -> None:
    with served(tmp_path, sessions=2) as url:
        async with AsyncExitStack() as stack:
            first = await socket(stack, url)
            second = await socket(stack, url)
            started = (await ask(first, "step", tool("start_rollout", **shell(HOLD))))["data"]["observation"]["result"]
            await ask(second, "reset")
            third = await socket(stack, url)
            assert (await ask(third, "reset"))["data"]["code"] == "CAPACITY_REACHED"
            waiting = tool("finalize_rollout", rollout_id=started["data"]["rollout_id"], wait_s=600)
            await first.send(json.dumps({"type": "step", "data": waiting}))
            first.transport.abort()
            while True:
                fourth = await socket(stack, url)
                answer = await ask(fourth, "reset")
                if answer["type"] == "observation":
                    break
                await anyio.sleep(0.05)
            # Only the client is gone: what it waited for goes on.
            state = await ask(fourth, "step", tool("get_state", rollout_id=started["data"]["rollout_id"]))
            assert state["data"]["observation"]["result"]["data"]["outcome"] is None


async def test_one_key_cannot_take_every_session(tmp_path: Path) -> None:
    alice, bob = (new_key(tmp_path / "keys.toml", name) for name in ("alice", "bob"))
    create = {"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create", "params": {}}
    async with (
        serve(tmp_path / "home", "--api-key-file", str(tmp_path / "keys.toml")) as server,
        server.http(alice) as http,
    ):
        answers = [(await http.post("/mcp", json=create)).json() for _ in range(257)]
        assert "256 sessions of this key" in answers[-1]["error"]["message"]
        async with AsyncExitStack() as stack:
            refused = await socket(stack, server.url, Authorization=f"Bearer {alice}")
            assert (await ask(refused, "reset"))["data"]["code"] == "CAPACITY_REACHED"
            other = await socket(stack, server.url, Authorization=f"Bearer {bob}")
            assert (await ask(other, "reset"))["type"] == "observation"
        # What needs no session is served all the same.
        listed = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        assert "result" in (await http.post("/mcp", json=listed)).json()
        closing = {"session_id": answers[0]["result"]["session_id"]}
        await http.post("/mcp", json={**create, "method": "openenv/session/close", "params": closing})
        for _ in range(3):  # each gives its place back
            async with AsyncExitStack() as stack:
                ws = await socket(stack, server.url, Authorization=f"Bearer {alice}")
                assert (await ask(ws, "reset"))["type"] == "observation"
                await ws.send(json.dumps({"type": "close"}))
                await ws.wait_closed()


async def test_openenvs_tool_client_works(server: str) -> None:
    from openenv.core.mcp_client import MCPToolClient

    client = MCPToolClient(server)
    async with client:
        await client.reset()
        assert len(await client.list_tools()) == 7
        result = await client.call_tool("run_rollout", **shell("true", verify=["true"]))
        assert result["reward"] == 1.0
        assert (await client.call_tool("get_state", rollout_id="nobody"))["status"] == "unknown"
        with pytest.raises(RuntimeError, match="unknown kind 'nobody'"):
            await client.call_tool("run_rollout", instruction="x", endpoint="nobody")


async def test_the_typed_client_has_every_tool(server: str) -> None:
    from opencode_env import OpenCodeEnv, RolloutResult, ToolCallFailed

    async with OpenCodeEnv(base_url=server) as env:
        await env.reset(episode_id="typed")
        result = await env.run_rollout(instruction="echo hi", agent="shell", endpoint="scripted", verify=["true"])
        assert isinstance(result, RolloutResult)
        assert result.reward == 1.0
        started = await env.start_rollout(instruction=HOLD, agent="shell", endpoint="scripted", task_id="held")
        assert started.task_id == "held"
        assert (await env.get_state(started.rollout_id)).outcome is None
        assert (await env.get_messages(started.rollout_id)).rollout_id == started.rollout_id
        assert (await env.subscribe_events(started.rollout_id)).events[0].seq == 1
        assert (await env.finalize_rollout(started.rollout_id, wait_s=0)).outcome is None
        assert (await env.abort_rollout(started.rollout_id)).aborted
        for _ in range(2):
            assert (await env.finalize_rollout(started.rollout_id)).outcome == "aborted"
        state = await env.state()
        assert (state.episode_id, state.rollouts_completed, state.last_task_id) == ("typed", 2, "held")
        with pytest.raises(ToolCallFailed, match="instruction") as failed:
            await env.run_rollout(instruction=" ", endpoint="scripted")
        assert failed.value.error_type == "invalid_args"


async def test_the_typed_client_works_without_async(server: str) -> None:
    from opencode_env import OpenCodeEnv

    def work() -> tuple[float | None, int]:
        with OpenCodeEnv(base_url=server).sync() as env:
            env.reset()
            result = env.run_rollout(instruction="true", agent="shell", endpoint="scripted", verify=["true"])
            return result.reward, env.state().rollouts_completed

    assert await anyio.to_thread.run_sync(work) == (1.0, 1)


async def test_keys_are_asked_for_on_every_plane(tmp_path: Path) -> None:
    from fastmcp import Client
    from fastmcp.client.transports import StreamableHttpTransport

    from opencode_env import OpenCodeEnv

    with command(tmp_path, ROLLCAGE_SERVER_KEY=KEY) as url:
        async with AsyncExitStack() as stack:
            with pytest.raises(InvalidStatus):
                await socket(stack, url)
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            for path in ("/mcp", "/reset", "/step"):
                assert (await http.post(path, json={})).status_code == 401
            assert (await http.get("/state")).status_code == 401
        bearer = {"Authorization": f"Bearer {KEY}"}
        async with Client(StreamableHttpTransport(f"{url}/mcp", headers=bearer)) as client:
            done = await client.call_tool("run_rollout", shell("true"))
            assert done.structured_content is not None
        async with OpenCodeEnv(base_url=url, api_key=KEY) as env:
            assert (await env.get_state(done.structured_content["rollout_id"])).status == "done"


async def test_a_message_that_cannot_be_read_is_not_repeated(server: str) -> None:
    secret = "sk-very-secret"
    said: list[str] = []
    async with httpx.AsyncClient(base_url=server, timeout=120) as http:
        for path in ("/step", "/reset", "/mcp"):
            for body in (
                {"seed": secret, "actions": {"api_key": secret}},
                [secret],
                {"action": secret, "params": secret},
            ):
                said.append((await http.post(path, json=body)).text)
    bad: list[Any] = [
        {"type": "step", "api_key": secret},
        {"type": "step", "data": [secret]},
        {"type": "step", "data": {"type": "call_tool", "tool_name": [secret]}},
        {"type": "mcp", "data": {"api_key": secret}},
        {"method": "tools/call", "api_key": secret},
    ]
    for path in ("/ws", "/mcp"):
        async with connect(server.replace("http", "ws") + path, open_timeout=120) as ws:
            for frame in bad:
                await ws.send(json.dumps(frame))
                said.append(str(await ws.recv()))
    assert len(said) == 19
    assert not [words for words in said if secret in words]


async def test_64_sessions_work_at_once(server: str) -> None:
    async with AsyncExitStack() as stack:
        sockets = [await socket(stack, server) for _ in range(64)]
        episodes: list[str] = []

        async def play(number: int) -> None:
            await ask(sockets[number], "reset", {"episode_id": str(number)})
            for _ in range(3):
                await ask(sockets[number], "step", tool("get_state", rollout_id="nobody"))
            state = (await ask(sockets[number], "state"))["data"]
            assert (state["episode_id"], state["step_count"]) == (str(number), 3)
            episodes.append(state["episode_id"])

        async with anyio.create_task_group() as tasks:
            for number in range(64):
                tasks.start_soon(play, number)
        assert len(episodes) == 64


async def test_openenvs_validators_pass_on_the_live_server(server: str) -> None:
    from openenv.cli._validation import validate_running_environment

    report = await anyio.to_thread.run_sync(validate_running_environment, server, 30.0)
    assert report["passed"], report["criteria"]
    assert report["mode"] == "simulation"


# OpenEnv's collector opens its socket in a way that the websockets library deprecates.
@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
async def test_openenvs_runtime_graders_pass_on_the_live_server(server: str) -> None:
    from openenv.validation.graders.runtime.basic import (
        ObservationSchemaGrader,
        RewardWellFormedGrader,
        StateContractGrader,
    )
    from openenv.validation.parsers.openenv_yaml import OpenEnvYamlParser
    from openenv.validation.runtime.collector import collect_runtime_evidence
    from openenv.validation.runtime.contracts import RuntimePlan

    actions = [
        {"type": "list_tools"},
        tool("run_rollout", **shell("true", verify=["true"])),
        tool("get_state", rollout_id="nobody"),
        tool("nothing"),
        # No action that is none: its reward is None, as published, and graders want a number of every step.
    ]
    reset = {"episode_id": "graded", "seed": 1}
    plan = RuntimePlan.model_validate({"plan_schema_version": "1", "reset": reset, "actions": actions})
    evidence = await anyio.to_thread.run_sync(lambda: collect_runtime_evidence(server, plan, episode_timeout_s=60))
    assert evidence.failure_reason is None
    assert len(evidence.exchanges) == 2 + 2 * len(actions)
    subject = SimpleNamespace(manifest=OpenEnvYamlParser().parse(ROOT), runtime_evidence=evidence)
    for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
        verdict = await anyio.to_thread.run_sync(grader.run, subject)
        assert verdict.status.value == "pass", verdict


def test_openenv_validate_passes_on_this_project(tmp_path: Path) -> None:
    """On a copy: other tests may write into the checkout meanwhile, which the validator takes for tampering."""
    from openenv.cli.__main__ import app
    from typer.testing import CliRunner

    for name in ("openenv.yaml", "Dockerfile", "pyproject.toml", "README.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    done = CliRunner().invoke(app, ["validate", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert {each["check_id"]: each["status"] for each in report["results"]}["static.manifest"] == "pass"
    assert report["manifest"]["capabilities"]["declared_tools"] == list(_tools())


def _tools() -> list[str]:
    from rollcage.server.mcp_tools import TOOLS

    return list(TOOLS)


def test_the_typed_clients_arguments_are_the_servers() -> None:
    from opencode_env.models import RolloutArguments
    from rollcage.server.mcp_tools import RunArguments

    assert RolloutArguments.__annotations__.keys() | {"instruction"} == RunArguments.model_fields.keys()


def test_importing_the_published_package_costs_nothing_until_a_name_is_used() -> None:
    code = "import sys, opencode_env; sys.exit('openenv' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    import opencode_env

    for name in opencode_env.__all__:
        assert getattr(opencode_env, name) is not None
    with pytest.raises(AttributeError, match="Nothing"):
        opencode_env.Nothing  # noqa: B018


@pytest.mark.slow
async def test_the_server_runs_under_its_published_name(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "uvicorn", "opencode_env.server.app:app", "--port", "0", "--log-level", "info"]
    environment = {**os.environ, "ROLLCAGE_HOME": str(tmp_path)}
    with subprocess.Popen(program, stderr=subprocess.PIPE, env=environment, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(line.split()[4] for line in process.stderr if "running on" in line)
            async with httpx.AsyncClient(base_url=url, timeout=120) as http:
                assert (await http.get("/health")).status_code == 200
                assert (await http.post("/reset", json={})).json()["observation"]["metadata"]["status"] == "ready"
            process.terminate()
            assert "Application shutdown complete" in process.stderr.read()
        finally:
            process.kill()
