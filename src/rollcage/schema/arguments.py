"""The arguments of a rollout for type checkers. Made by scripts/arguments.py, from `RolloutRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class RolloutArguments(TypedDict, total=False):
    """The arguments of a rollout beside `instruction`; None is the same as not given."""

    endpoint: str | None
    base_url: str | None
    api_key: str | None
    model: str | None
    model_key: str | None
    vllm_url: str | None
    hf_token: str | None
    thinking: bool | None
    disable_thinking: bool | None
    temperature: float | None
    seed: int | None
    top_logprobs: int | None
    history: Literal["as_sent", "exact"] | None
    keep_reasoning: bool | None
    task_id: str | None
    setup: Sequence[str] | None
    setup_shell: str | None
    setup_hosts: Sequence[str] | None
    verify_hosts: Sequence[str] | None
    upload_files: Mapping[str, str] | None
    verify: Sequence[str] | None
    test_script: str | None
    tests: Mapping[str, str] | None
    checks: Sequence[Mapping[str, Any]] | None
    verify_in: Literal["box", "fresh"] | None
    keep: Sequence[str] | None
    restore: Sequence[str] | None
    isolate: bool | None
    reward_from: Literal["reward.txt", "reward.json", "commands", "harbor"] | None
    seal_tests: bool | None
    guards: bool | None
    workdir: str | None
    solution: Sequence[Mapping[str, Any]] | None
    mode: Literal["transparent_proxy", "black_box"] | None
    timeout_s: float | None
    agent_timeout_s: float | None
    setup_timeout_s: float | None
    verify_timeout_s: float | None
    max_tokens_cap: int | None
    max_turns: int | None
    agent: str | None
    driver: str | None
    system_prompt: str | None
    enabled_tools: Sequence[str] | None
    disabled_tools: Sequence[str] | None
    sandbox: str | None
    template: str | None
    system: Literal["host", "base"] | None
    environment: str | None
    environment_seed: int | None
    verifier: str | None
    group_id: str | None
    policy_version: str | None
    metadata: Mapping[str, Any] | None
    idempotency_key: str | None
