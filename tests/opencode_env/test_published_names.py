"""Code written for the published environment: its modules, its names, its own ways of making and reading values."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from opencode_env import CommandResult, OpenCodeEnv, OpenCodeTask, RolloutResult, RolloutTurn
from opencode_env.client import _extract_text
from opencode_env.server.catalog import ENDPOINT_KINDS, catalog_summary, resolve_endpoint
from rollcage.results.result import RolloutResult as Result
from rollcage.schema.views import RolloutState
from rollcage.server.openenv import shaped
from rollcage.simulators import ScriptedModel
from rollcage.types import Outcome, ScriptedTurn
from support.served import served

MODULES = {
    "opencode_env.client": ["OpenCodeEnv"],
    "opencode_env.config": ["OpenCodeConfig"],
    "opencode_env.harness": ["OpenCodeSession", "OpenCodeSessionFactory"],
    "opencode_env.models": ["CommandResult", "OpenCodeState", "RolloutResult", "RolloutTurn"],
    "opencode_env.sandbox": ["E2BSandboxBackend", "SandboxBackend", "SandboxHandle"],
    "opencode_env.sandbox.base": ["BgJob", "ExecResult", "SandboxBackend", "SandboxHandle"],
    "opencode_env.sandbox.e2b": ["E2BSandboxBackend", "E2BSandboxHandle"],
    "opencode_env.server.app": ["app", "main"],
    "opencode_env.server.opencode_environment": ["OpenCodeEnvironment"],
    "opencode_env.task": ["OpenCodeTask"],
}


@pytest.mark.parametrize("module", MODULES)
def test_every_published_module_has_its_names(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in MODULES[module] if not hasattr(found, name)] == []


def test_a_result_is_made_of_the_published_fields_and_read_back() -> None:
    result = RolloutResult(
        task_id="t1",
        sandbox_id="box-1",
        reward=0.75,
        setup_results=[CommandResult(cmd="pip install pandas", exit_code=0)],
        proxy_turns=[RolloutTurn(turn=1, completion_tokens=["hi"], per_token_logps=[-0.1])],
    )
    assert RolloutResult.model_validate_json(_extract_text(result.model_dump_json())) == result
    assert RolloutResult.model_validate_json(_extract_text(result.model_dump(mode="json"))) == result
    assert RolloutResult() == RolloutResult(task_id="", sandbox_id="", reward=None)


def test_what_is_no_task_is_refused_in_the_published_words() -> None:
    for value in (42, [], [{"role": "assistant", "content": "hi"}], [{"role": "user", "content": []}], ["hi"]):
        with pytest.raises(TypeError, match="Cannot coerce"):
            OpenCodeTask.coerce(value)


def test_of_chat_messages_the_last_user_text_is_the_instruction() -> None:
    parts = [{"type": "text", "text": "Fix it."}, {"type": "image_url", "image_url": {}}]
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "no"}, {"role": "user", "content": parts}]
    assert OpenCodeTask.coerce(said).instruction == "Fix it."
    assert OpenCodeTask.coerce([*said, {"role": "assistant", "content": "ok"}]).instruction == "Fix it."


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for kind in ("VLLM", "OPENAI", "HF_ROUTER"):
        for field in ("URL", "BASE_URL", "API_KEY", "MODEL"):
            monkeypatch.delenv(f"{kind}_{field}", raising=False)
    return monkeypatch


def test_the_catalog_prefers_what_is_given_then_the_variable_then_its_default(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("OPENAI_API_KEY", "of-the-variable")
    given = resolve_endpoint("openai", base_url="https://mine.example/v1", api_key="mine", model="m")
    assert given[:4] == ("openai", "https://mine.example/v1", "mine", "m") and not given.disable_thinking_default
    assert resolve_endpoint("openai")[1:4] == ("https://api.openai.com/v1", "of-the-variable", "gpt-4o-mini")
    bare.setenv("VLLM_URL", "https://engine.example/")
    vllm = resolve_endpoint("vllm")
    assert vllm[1:4] == ("https://engine.example/v1", "intercepted", "Qwen/Qwen3.5-4B")
    assert vllm.disable_thinking_default


def test_the_catalog_says_what_is_missing_as_a_value_error(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="unknown endpoint kind 'bogus'; known are vllm, openai, hf_router"):
        resolve_endpoint("bogus", base_url="http://x", api_key="y", model="z")
    with pytest.raises(ValueError, match=r"no api_key.* OPENAI_API_KEY"):
        resolve_endpoint("openai")


def test_the_summary_of_the_catalog_tells_what_is_configured_and_no_key(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("OPENAI_API_KEY", "a-key-nobody-sees")
    summary = {entry["kind"]: entry for entry in catalog_summary()}
    assert tuple(summary) == ENDPOINT_KINDS
    assert [kind for kind, entry in summary.items() if entry["configured"]] == ["openai"]
    assert summary["vllm"]["base_url_env"] == "VLLM_URL" and "nobody" not in str(summary)


async def test_a_plain_with_block_is_sync_as_published(tmp_path: Path) -> None:
    def use(url: str) -> tuple[RolloutResult, int]:
        with OpenCodeEnv(base_url=url) as env:
            env.reset()
            raw = env.call_tool("run_rollout", instruction="echo hi", agent="shell", endpoint="scripted", setup=None)
            parsed = RolloutResult.model_validate_json(_extract_text(raw))
            again = env.run_rollout(instruction="echo hi", agent="shell", endpoint="scripted", verify=["true"])
            assert (parsed.outcome, parsed.reward) == ("succeeded", None)
            return again, env.state().rollouts_completed

    async with served(tmp_path) as server:
        result, completed = await anyio.to_thread.run_sync(use, server.url)
    assert isinstance(result, RolloutResult) and result.reward == 1.0 and completed == 2


async def test_the_log_of_the_agent_is_its_own_events_at_every_door(tmp_path: Path) -> None:
    call = {"name": "bash", "arguments": {"command": "echo hi", "description": "say it"}}
    solution: list[dict[str, Any]] = [{"tool_calls": [call]}, {"text": "Done."}]
    async with served(tmp_path) as server, OpenCodeEnv(base_url=server.url, connect_timeout_s=120) as env:
        result = await env.run_rollout(instruction="Say hi.", endpoint="scripted", solution=solution)
        async with server.http() as http:
            over_http = (await http.get(f"/rollouts/{result.rollout_id}/result")).json()
    said = [json.loads(line) for line in result.agent_log_tail.splitlines()]
    assert {"tool_use", "text", "step_finish"} <= {event["type"] for event in said}
    assert over_http["agent_log_tail"] == result.agent_log_tail
    assert "llm.provider=rollcage" in over_http["agent_stderr_tail"], "its diagnostic log has a field of its own"


async def test_what_is_said_of_thinking_reaches_the_engine_and_nothing_else_does(tmp_path: Path) -> None:
    async with ScriptedModel() as model, served(tmp_path) as server:
        url, key = model.base_url, model.endpoint([ScriptedTurn(text="hi")]).key.get_secret_value()
        older = {"model_key": "vllm://scripted", "vllm_url": url, "api_key": key}
        newer = {"endpoint": "vllm", "base_url": url, "model": "scripted", "api_key": key}
        router = {"model_key": "hf-router://scripted:x", "base_url": url, "hf_token": key, "model": "scripted"}
        async with OpenCodeEnv(base_url=server.url, connect_timeout_s=120) as env:
            for arguments, want in (
                (older, {"enable_thinking": False}),
                (router, {"enable_thinking": False}),
                ({**older, "thinking": True}, {"enable_thinking": True}),
                ({**newer, "disable_thinking": True}, {"enable_thinking": False}),
                ({**newer, "disable_thinking": False}, None),
            ):
                result = await env.run_rollout(instruction="Say hi.", agent="mini", **arguments)
                [turn] = result.proxy_turns
                assert turn.request.get("chat_template_kwargs") == want, arguments


@pytest.mark.parametrize(("outcome", "word"), [("finished", "succeeded"), ("aborted", "aborted"), (None, None)])
def test_clients_of_the_published_shapes_get_the_outcome_they_know(outcome: str | None, word: str | None) -> None:
    ended = None if outcome is None else Outcome(outcome)
    for answer in (Result(outcome=ended), RolloutState(rollout_id="r", status="done", outcome=ended)):
        sent = shaped(answer)
        assert sent["data"]["outcome"] == json.loads(sent["content"][0]["text"])["outcome"] == word
        assert sent["data"].keys() == answer.model_dump().keys()
    assert RolloutResult.model_validate({"outcome": outcome}).outcome == word
