"""What the OpenEnv environment and its clients say to each other. Imports `openenv`, which costs seconds."""

from __future__ import annotations

import json
from typing import Annotated, Any

from openenv.core.env_server.mcp_types import Tool, ToolError
from openenv.core.env_server.types import Action, Observation, State
from pydantic import ConfigDict, Field, WithJsonSchema, field_validator

from rollcage.types import FINISHED_BEFORE, Outcome

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


def published_outcome(outcome: str | None) -> str | None:
    """The outcome in the words of published clients."""
    return FINISHED_BEFORE if outcome == Outcome.FINISHED else outcome
