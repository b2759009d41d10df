"""What is wrong with an argument is found before anything starts, at every door, and said of that argument."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import start_blocking_portal
from mcp.client.streamable_http import streamable_http_client
from openenv.core.generic_client import GenericEnvClient

import rollcage
from mcp import ClientSession
from rollcage.errors import UsageError
from rollcage.schema.request import RolloutRequest
from support.served import served

pytestmark = pytest.mark.anyio

HALF = "a\ud800b"
WRONG: list[dict[str, Any]] = [
    {"instruction": HALF},
    {"instruction": "a\0b"},
    {"task_id": HALF},
    {"task_id": "x" * 201},
    {"setup": [HALF]},
    {"setup": ["true", ""]},
    {"setup_shell": HALF},
    {"setup_shell": "echo\0"},
    {"verify": ["a\0b"]},
    {"verify": [" \n"]},
    {"setup_hosts": ["https://index.example/simple"]},
    {"setup_hosts": ["*"]},
    {"test_script": HALF},
    {"test_script": "\n"},
    {"upload_files": {"a": HALF}},
    {"upload_files": {HALF: "a"}},
    {"upload_files": {"a": "x", "a/b": "y"}},
    {"upload_files": {"a/b/c": "x", "/home/user/workdir/a": "y"}},
    {"upload_files": {"a": "x", "./a": "y"}},
    {"upload_files": {"/home/user": "x"}},
    {"upload_files": {"a\0": "x"}},
    {"tests": {"a": "x", "a/b": "y"}},
    {"metadata": {"deep": [{"in": HALF}]}},
    {"solution": [{"tool_calls": [{"name": "bash", "arguments": {"command": HALF}}]}]},
    {"system_prompt": HALF},
    {"model_key": HALF},
    {"driver": "bogus"},
    {"driver": HALF},
    {"driver": "serve", "agent": "shell"},
    {"driver": "serve", "agent": "nop"},
    {"system_prompt": "p", "agent": "oracle"},
    {"disabled_tools": ["bash"], "agent": "mini"},
    {"disabled_tools": [""]},
    {"max_tokens_cap": True},
    {"max_turns": False},
    {"agent_timeout_s": True},
    {"seed": True},
    {"mode": "grey_box"},
    {"mode": True},
]
JSON = {"Content-Type": "application/json"}
PLAIN: dict[str, Any] = {"instruction": "do it", "endpoint": "scripted"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    started = served(tmp_path_factory.mktemp("home"))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(started) as process:
        yield process.url


def _name(wrong: dict[str, Any]) -> str:
    return next(iter(wrong))


async def test_http_names_the_argument_and_starts_nothing(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=120) as http:
        for wrong in WRONG:
            # Written as ASCII: half a character is a legal escape of JSON.
            answer = await http.post("/rollouts", content=json.dumps({**PLAIN, **wrong}), headers=JSON)
            said = answer.json()
            assert (answer.status_code, said["error_code"]) == (422, "bad_argument"), (wrong, said)
            assert said["argument"] == _name(wrong), (wrong, said)
        assert (await http.get("/rollouts")).json()["rollouts"] == []


async def test_the_stock_mcp_client_is_told_the_same(server: str) -> None:
    async with AsyncExitStack() as stack:
        read, write, _ = await stack.enter_async_context(streamable_http_client(f"{server}/mcp"))
        session = await stack.enter_async_context(ClientSession(read, write))
        await session.initialize()
        for wrong in WRONG:
            if "\ud800" in str(wrong) or "ud800" in json.dumps(wrong):
                continue  # this client writes UTF-8, and cannot be made to send half a character
            result = await session.call_tool("start_rollout", {**PLAIN, **wrong})
            assert result.isError, wrong
            assert _name(wrong) in result.content[0].text, (wrong, result)  # type: ignore[union-attr]
        listed = await session.list_tools()
    schema = next(tool.inputSchema for tool in listed.tools if tool.name == "run_rollout")
    assert schema["properties"]["task_id"]["maxLength"] == 200


async def test_openenvs_stock_client_is_told_the_same_in_an_observation(server: str) -> None:
    async with GenericEnvClient(base_url=server, connect_timeout_s=120, message_timeout_s=600) as env:
        await env.reset()
        for wrong in WRONG:
            action = {"type": "call_tool", "tool_name": "run_rollout", "arguments": {**PLAIN, **wrong}}
            observed = (await env.step(action)).observation
            assert observed["error"]["error_type"] == "invalid_args", (wrong, observed)
            assert observed["error"]["message"].startswith(_name(wrong)), (wrong, observed)


async def test_python_and_the_command_line_are_told_the_same(tmp_path: Path) -> None:
    settings = rollcage.Settings.from_environ({"ROLLCAGE_HOME": str(tmp_path)})
    for wrong in WRONG:
        if wrong.keys() & {"driver", "agent"}:
            continue  # known to the agent alone, once there is a runner
        given = {**PLAIN, **wrong}
        with pytest.raises(UsageError) as caught:
            await rollcage.arun("do it", settings=settings, **given)
        assert caught.value.argument == _name(wrong), wrong
    assert not (tmp_path / "rollouts.db").exists(), "nothing was started, not even a log"
    command = [sys.executable, "-m", "rollcage", "run", "-i", "x", "-e", "scripted", "--verify", " "]
    typed = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "ROLLCAGE_HOME": str(tmp_path)})
    assert typed.returncode == 2 and "--verify: entry 1 is empty" in typed.stderr


async def test_a_task_file_is_held_to_the_same(tmp_path: Path) -> None:
    file = tmp_path / "task.json"
    for wrong in ({"verify": [""]}, {"setup": ["a\0b"]}, {"files": {"a": "x", "a/b": "y"}}):
        file.write_text(json.dumps({"instruction": "x", **wrong}))
        with pytest.raises(UsageError) as caught:
            await rollcage.arun(file, endpoint="scripted", settings=rollcage.Settings.from_environ())
        assert caught.value.argument == _name(wrong).replace("files", "upload_files")


async def test_null_is_not_given_for_every_optional_argument_of_every_tool(server: str) -> None:
    nothing = dict.fromkeys(RolloutRequest.model_fields)
    async with GenericEnvClient(base_url=server, connect_timeout_s=120, message_timeout_s=600) as env:
        await env.reset(seed=None, episode_id=None)

        async def call(tool: str, **arguments: object) -> dict[str, Any]:
            step = await env.step({"type": "call_tool", "tool_name": tool, "arguments": arguments})
            assert step.observation["error"] is None, step.observation
            data: dict[str, Any] = step.observation["result"]["data"]
            return data

        shell = {"instruction": "true", "agent": "shell", "endpoint": "scripted"}
        done = await call("run_rollout", **{**nothing, **shell, "on_disconnect": None})
        assert (done["outcome"], done["mode"]) == ("succeeded", "transparent_proxy")
        name = done["rollout_id"]
        assert (await call("subscribe_events", rollout_id=name, after=None))["ended"]
        assert (await call("finalize_rollout", rollout_id=name, wait_s=None))["outcome"] == "succeeded"
    async with httpx.AsyncClient(base_url=server, timeout=120) as http:
        assert (await http.post("/rollouts", json={**nothing, **shell})).status_code == 201


async def test_the_bounds_of_every_number_are_in_the_schema(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=120) as http:
        document = (await http.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            for method in methods.values():
                for parameter in method.get("parameters", ()):
                    kinds = [parameter["schema"], *parameter["schema"].get("anyOf", ())]
                    for kind in kinds:
                        if kind.get("type") in ("integer", "number"):
                            bounds = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
                            assert all(each & kind.keys() for each in bounds), (path, parameter["name"])
        listing = document["paths"]["/rollouts"]["get"]["parameters"]
        limit = next(each["schema"] for each in listing if each["name"] == "limit")
        assert (limit["minimum"], limit["maximum"]) == (1, 200)
        body = document["components"]["schemas"]["RolloutRequest"]["properties"]
        assert body["task_id"]["maxLength"] == 200
        for beyond in (0, 201):
            refused = await http.get("/rollouts", params={"limit": beyond})
            assert (refused.status_code, refused.json()["argument"]) == (422, "limit")
