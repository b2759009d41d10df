"""The environment's class as it was published: made without arguments, in process and served by OpenEnv's own app."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from openenv.core.env_server.mcp_types import CallToolObservation, ListToolsObservation

from opencode_env import CallToolAction, CommandResult, ListToolsAction, RolloutResult, RolloutTurn
from opencode_env.client import _extract_text
from opencode_env.config import provider_npm_package
from opencode_env.live_watch import print_rollout_summary
from opencode_env.server import opencode_environment as published
from rollcage.schema.request import RolloutRequest
from rollcage.types import Task

_IN_PROCESS = """
import asyncio, json
from fastmcp import Client
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.types import Action
from opencode_env import CallToolAction, ListToolsAction, RolloutResult
from opencode_env.client import _extract_text
from opencode_env.server.opencode_environment import OpenCodeEnvironment

rollout = {"agent": "shell", "endpoint": "scripted"}

def action(instruction, **more):
    return CallToolAction(tool_name="run_rollout", arguments={"instruction": instruction, **rollout, **more})

env = OpenCodeEnvironment()
assert isinstance(env, MCPEnvironment)
ready = env.reset(seed=3, episode_id="mine").metadata
assert ready["status"] == "ready" and "run_rollout" in ready["message"]
assert "run_rollout" in [tool.name for tool in env.step(ListToolsAction()).tools]
seen = env.step(action("echo hi > a", verify=["test -f a"], task_id="t"))
result = RolloutResult.model_validate_json(_extract_text(seen))
assert (seen.reward, result.reward, seen.result.content[0].text) == (1.0, 1.0, _extract_text(seen))
assert env.step(CallToolAction(tool_name="nothing")).error.error_type == "tool_not_found"
assert env.step(action("")).error.error_type == "invalid_args"
assert env.step(action("true")).reward is None
unknown = env.step(Action())
assert unknown.reward is None and not unknown.done and "Unknown action type: 'Action'" in unknown.metadata["error"]

async def stock_client():
    async with Client(env.mcp_server) as client:
        tools = [tool.name for tool in await client.list_tools()]
        return tools, (await client.call_tool("run_rollout", action("true", verify=["true"]).arguments)).data

tools, served = asyncio.run(stock_client())
assert "run_rollout" in tools and served["reward"] == 1.0, (tools, served)

async def other_loop():
    first, second = await asyncio.gather(*(env.step_async(action("true", verify=[v])) for v in ("true", "false")))
    late = await env.step_async(action("sleep 600"), timeout_s=0.5)
    return first.reward, second.reward, late

first, second, late = asyncio.run(other_loop())
assert (first, second, late.error.error_type) == (1.0, 0.0, "timeout")
state = env.state
counts = [state.episode_id, state.step_count, state.rollouts_completed]
started = env.step(CallToolAction(tool_name="start_rollout", arguments={"instruction": "sleep 600", **rollout}))
print(json.dumps([*counts, json.loads(_extract_text(started))["rollout_id"]]))
"""

_SERVED = """
import socket, sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from opencode_env import CallToolAction
from openenv.core.env_server.mcp_types import CallToolObservation
from opencode_env.server.opencode_environment import OpenCodeEnvironment

app = create_app(
    OpenCodeEnvironment, CallToolAction, CallToolObservation, env_name="opencode_env", max_concurrent_envs=4
)
listener = socket.socket(fileno=int(sys.argv[1]))
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""

_CLIENT = """
import sys
from opencode_env import OpenCodeEnv

with OpenCodeEnv(base_url=sys.argv[1]).sync() as env:
    env.reset()
    result = env.run_rollout(
        instruction="echo hi > a", agent="shell", endpoint="scripted", verify=["test -f a"], task_id="t"
    )
    print(result.reward, env.state().rollouts_completed, env.state().last_task_id)
"""


def settings(home: Path) -> dict[str, str]:
    return {**os.environ, "ROLLCAGE_HOME": str(home)}


@pytest.mark.timeout(900)
def test_it_is_reset_and_stepped_in_process_with_and_without_a_loop(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _IN_PROCESS], env=settings(tmp_path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    episode, steps, completed, running = json.loads(done.stdout)
    assert (episode, steps, completed) == ("mine", 9, 5)
    # The process has ended, and with it what still ran.
    listed = subprocess.run(
        [sys.executable, "-m", "rollcage", "ls", "--json"], env=settings(tmp_path), capture_output=True, text=True
    )
    outcomes = {row["id"]: row["outcome"] for row in json.loads(listed.stdout)}
    assert outcomes[running] == "aborted" and None not in outcomes.values(), outcomes


@pytest.mark.timeout(900)
def test_openenvs_own_app_serves_it(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVED, str(listener.fileno())],
            env=settings(tmp_path),
            pass_fds=[listener.fileno()],
        )
    try:
        # The socket listens already: whoever connects waits until it is served.
        told = subprocess.run([sys.executable, "-c", _CLIENT, url], capture_output=True, text=True)
        assert told.stdout.split() == ["1.0", "1", "t"], told.stderr
    finally:
        server.terminate()
        server.wait()


def test_the_text_of_an_answer_is_found_in_every_wrapping() -> None:
    wrapped = {"content": [{"type": "text", "text": '{"reward": 1.0}'}], "data": None}
    seen = CallToolObservation(tool_name="run_rollout", result=wrapped)
    for answer in ('{"reward": 1.0}', {"reward": 1.0}, wrapped, {"result": wrapped}, seen):
        assert RolloutResult.model_validate_json(_extract_text(answer)).reward == 1.0


def test_values_are_made_changed_and_read_as_published() -> None:
    result = RolloutResult(task_id="t", setup_results=[CommandResult(cmd="true")], proxy_turns=[RolloutTurn(turn=1)])
    result.reward = 0.5
    assert RolloutResult.model_validate_json(result.model_dump_json()) == result
    stored = {
        "mode": "black_box",
        "verify_results": [{"cmd": "pytest", "exit_code": None}],
        "proxy_turns": [{"turn": 1, "upstream_status": None, "upstream_error": {"error": "boom"}}],
        "what_they_may_add": 1,
    }
    assert RolloutResult.model_validate(stored).proxy_turns[0].upstream_error == {"error": "boom"}


def test_the_published_places_are_where_things_are_in_a_box() -> None:
    assert published.HOME == "/home/user" and published.WORKDIR == published.WORKDIR_PATH == "/home/user/workdir"
    assert published.REWARD_FILE == published.REMOTE_REWARD_PATH == f"{Task(instruction='x').reward_dir}/reward.txt"
    assert published.REMOTE_TEST_PATH == "/home/user/tests/test.sh"
    assert published.INSTRUCTION_PATH == "/home/user/task/instruction.md"
    assert published.AGENT_LOG == "/home/user/logs/agent/opencode.jsonl"
    assert published.PROXY_LOG == "/home/user/logs/agent/proxy.log"
    assert RolloutRequest(instruction="x").verify_timeout_s == published.VERIFY_TIMEOUT_S


def test_small_published_names_are_there() -> None:
    assert provider_npm_package("openai_compatible") == "@ai-sdk/openai-compatible"
    assert callable(print_rollout_summary)
    assert CallToolAction(tool_name="x").type == "call_tool" and ListToolsAction().type == "list_tools"
    assert ListToolsObservation(tools=[]).tools == []
