"""The values of the published environment by their published names; rollcage has them, and their shapes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, field_validator

from rollcage.results.result import CommandOutcome, ProxyTurn
from rollcage.results.result import RolloutResult as Result
from rollcage.schema.arguments import RolloutArguments as Arguments
from rollcage.schema.openenv import ACTIONS, OpenCodeState, RolloutAction, RolloutObservation, published_outcome

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

# The published values can be changed, and take in what the published environment has stored.


class CommandResult(CommandOutcome):
    """One setup or verify command, by its published name."""

    model_config = ConfigDict(frozen=False, extra="ignore")

    exit_code: int | None = None  # type: ignore[assignment]
    """None where nobody told; rollcage always does."""


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
    outcome: str | None = None  # type: ignore[assignment]
    """How it ended; `succeeded` where the agent ended by itself, the word that published clients know."""

    @field_validator("outcome")
    @classmethod
    def _published(cls, outcome: str | None) -> str | None:
        return published_outcome(outcome)


class RolloutArguments(Arguments, total=False):
    """The arguments of `run_rollout` and `start_rollout` beside `instruction`; the server says what each means."""

    on_disconnect: Literal["continue", "abort"]
