"""Code written for the published environment: its modules, its names, its own ways of making and reading values."""

from __future__ import annotations

import importlib
from pathlib import Path

import anyio
import pytest

from opencode_env import CommandResult, OpenCodeEnv, OpenCodeTask, RolloutResult, RolloutTurn
from opencode_env.client import _extract_text
from opencode_env.server.catalog import ENDPOINT_KINDS, catalog_summary, resolve_endpoint
from served import served

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
    with pytest.raises(TypeError, match="Cannot coerce"):
        OpenCodeTask.coerce(42)


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
