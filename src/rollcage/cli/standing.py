"""The colour and the exit code of a rollout's standing."""

from __future__ import annotations

from collections.abc import Mapping

from rollcage.cli import codes
from rollcage.results.fold import Rollout
from rollcage.types import Outcome, Standing

STYLES: Mapping[Standing, str] = {
    Standing.RUNNING: "cyan",
    Standing.PASSED: "green",
    Standing.PARTIAL: "yellow",
    Standing.FAILED: "red",
    Standing.UNSCORED: "dim",
    Standing.BROKEN: "magenta",
}
"""How each is coloured, wherever a rollout is shown."""


def style_of(outcome: Outcome | None, reward: float | None) -> str:
    """The colour of a rollout with this outcome and this reward."""
    return STYLES[Standing.of(outcome, reward)]


def exit_code(rollout: Rollout, require: float | None = None) -> int:
    """The exit code of the command that ran or watched this rollout to its end; `require` is the least reward."""
    reward = rollout.reward
    if Standing.of(rollout.outcome, reward) is Standing.BROKEN:
        not_ready = rollout.error_code in ("model_unreachable", "machine_not_ready", "log_failed")
        return codes.NOT_READY if not_ready else codes.BROKEN
    if require is not None and (reward is None or reward < require):
        return codes.BELOW
    return codes.OK
