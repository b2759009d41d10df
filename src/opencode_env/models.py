"""What travels between the environment and its clients. Shared: it knows neither of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypedDict

from openenv.core.env_server.mcp_types import Tool, ToolError
from openenv.core.env_server.types import Action, Observation, State
from pydantic import ConfigDict, Field, WithJsonSchema, field_validator

from rollcage.result import CommandOutcome, ProxyTurn
from rollcage.result import RolloutResult as Result

__all__ = [
    "ACTIONS",
    "CommandResult",
    "OpenCodeState",
    "RolloutAction",
    "RolloutArguments",
    "RolloutObservation",
    "RolloutResult",
    "RolloutTurn",
]

ACTIONS = ("call_tool", "list_tools")
"""The kinds of action there are."""


class RolloutAction(Action):
    """One step: call a tool, or list the tools.

    It takes in whatever is sent, so that the environment itself can say what was wrong with it.
    """

    model_config = ConfigDict(extra="allow")

    type: Annotated[str, WithJsonSchema({"type": "string", "enum": list(ACTIONS)})] = Field(
        default="call_tool", description="`call_tool` or `list_tools`."
    )
    tool_name: str = Field(default="", description="The tool to call, such as `run_rollout`.")
    arguments: Annotated[Any, WithJsonSchema({"type": "object"})] = Field(
        default_factory=dict, description="The tool's arguments."
    )

    @field_validator("arguments", mode="before")
    @classmethod
    def _read_text(cls, value: object) -> object:
        """Forms in a browser send the arguments as text."""
        if isinstance(value, str):
            try:
                return json.loads(value)
            except ValueError:
                return value
        return value


class RolloutObservation(Observation):
    """What a step gives: the answer of a tool, or the list of tools. Fields that do not apply are left out."""

    tool_name: str | None = Field(default=None, description="The tool that was called.")
    result: Any = Field(default=None, description="`{content, structured_content, data, is_error}`; null on failure.")
    error: ToolError | None = Field(default=None, description="Why the call came to nothing.")
    tools: list[Tool] | None = Field(default=None, description="The tools, where they were asked for.")


class OpenCodeState(State):
    """The state of one episode; it lasts until the next reset."""

    rollouts_completed: int = Field(default=0, ge=0, description="Rollouts that ended in this episode.")
    last_reward: float | None = Field(default=None, description="Of the last of them; null where it was not scored.")
    last_task_id: str | None = Field(default=None, description="Of the last of them.")
    last_sandbox_id: str | None = Field(default=None, description="Of the last of them.")


# The published values can be changed, and take in what the published environment has stored.


class CommandResult(CommandOutcome):
    """One setup or verify command, by its published name."""

    model_config = ConfigDict(frozen=False, extra="ignore")

    exit_code: int | None = None  # type: ignore[assignment]
    """Null where nobody told; rollcage always does."""


class RolloutTurn(ProxyTurn):
    """One model call, by its published name."""

    model_config = ConfigDict(frozen=False, extra="ignore")

    upstream_status: int | None = None  # type: ignore[assignment]
    """HTTP status of the answer."""
    upstream_error: str | dict[str, Any] | None = None  # type: ignore[assignment]
    """What broke: in one line; by the published environment as an object."""


class RolloutResult(Result):
    """What a rollout came to, by its published name."""

    model_config = ConfigDict(frozen=False, extra="ignore")

    mode: str = "black_box"
    """Whether the agent's calls were recorded."""
    setup_results: list[CommandResult] = []  # type: ignore[assignment]
    """The setup commands that ran."""
    verify_results: list[CommandResult] = []  # type: ignore[assignment]
    """The verify commands that ran."""
    proxy_turns: list[RolloutTurn] = []  # type: ignore[assignment]
    """Every model call."""


class RolloutArguments(TypedDict, total=False):
    """The arguments of `run_rollout` and `start_rollout` beside `instruction`; the server says what each means."""

    endpoint: str
    base_url: str
    api_key: str
    model: str
    model_key: str
    vllm_url: str
    hf_token: str
    thinking: bool | None
    disable_thinking: bool | None
    temperature: float | None
    seed: int | None
    top_logprobs: int
    setup: list[str]
    setup_shell: str
    upload_files: dict[str, str]
    verify: list[str]
    test_script: str
    tests: dict[str, str]
    verify_in: Literal["box", "fresh"]
    workdir: str
    solution: list[dict[str, Any]]
    task_id: str
    mode: Literal["transparent_proxy", "black_box"]
    max_tokens_cap: int
    max_turns: int
    agent_timeout_s: float
    setup_timeout_s: float
    verify_timeout_s: float
    timeout_s: float | None
    agent: str
    driver: str
    system_prompt: str
    enabled_tools: list[str] | None
    disabled_tools: list[str]
    sandbox: str
    template: str
    environment: str
    environment_seed: int | None
    verifier: str
    idempotency_key: str
    on_disconnect: Literal["continue", "abort"]
