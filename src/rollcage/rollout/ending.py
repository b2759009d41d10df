"""How a rollout ends: which outcome an ending of the agent, of its model or an error of ours comes to."""

from __future__ import annotations

from collections.abc import Iterator

from rollcage.agents.base import AgentExit
from rollcage.errors import (
    AgentError,
    EnvironmentFailed,
    EnvironmentLost,
    ModelUnreachable,
    ResetFailed,
    RollcageError,
    SandboxError,
    SandboxLost,
    ScoringError,
    SetupError,
    StoreError,
    VerifierHung,
)
from rollcage.events import Ended
from rollcage.types import Blame, Outcome, Turn


class Failure(Exception):
    """The rollout ends here, with this outcome."""

    def __init__(self, outcome: Outcome, code: str, message: str, *, blame: Blame | None = None) -> None:
        super().__init__(message)
        self.ended = Ended(outcome=outcome, error=f"{outcome.value}: {message}", error_code=code, blame=blame)


def mute(ending: AgentExit, tail: str) -> str:
    """Why an agent that ended without its model has failed, whatever its exit code: its reward would be that of no
    work, and none of it the model's."""
    words = ending.error or ending.last_words or "".join(tail.strip().splitlines()[-1:])
    said = f"its last words: {words[-500:]}" if words else "it said nothing"
    return f"the agent ended with exit code {ending.code} and never called its model; {said}"


def verdict_of(ending: AgentExit | None, last: Turn | None, *, limit: str, silent: bool) -> Ended:
    """How the AGENT stage ended; raises where its work must not be scored.

    `ending`: None is an agent whose time ran out. `last`: the model's last failure, if no good answer came after it;
    calls that the agent itself broke off are none. `silent`: the model was asked and never said a word; one that
    speaks and is slow has used up the agent's time, and what there is is scored.
    """
    if ending is None and last is None and silent:
        raise Failure(Outcome.MODEL_UNREACHABLE, "model_unreachable", "the model was asked and never answered in time")
    if last is not None and _model_broke(last) and (ending is None or ending.code != 0):
        status = f"HTTP {last.status}" if last.status else "none"
        message = f"the model's last answer was {status}. {last.error or ''}".strip()
        raise Failure(Outcome.MODEL_UNREACHABLE, "model_unreachable", message)
    if ending is None:
        outcome, message = Outcome.AGENT_TIMEOUT, "the agent's time ran out"
    elif limit:
        outcome, message = Outcome.LIMIT_REACHED, limit
    elif ending.code != 0:
        outcome, message = Outcome.AGENT_FAILED, f"exit code {ending.code}. {ending.error or ''}".strip()
    else:
        return Ended(outcome=Outcome.FINISHED)
    return Ended(outcome=outcome, error=f"{outcome.value}: {message}", error_code=outcome.value)


def _whole(turn: Turn) -> bool:
    return turn.status == 200 and turn.error is None


def _model_broke(turn: Turn) -> bool:
    """Whether it was the model's side that failed, and not what the agent asked for."""
    return not _whole(turn) and (turn.status in (0, 200, 401, 403, 404, 408, 429) or turn.status >= 500)


_OUTCOMES: tuple[tuple[type[Exception], Outcome, str], ...] = (
    (SandboxLost, Outcome.SANDBOX_LOST, "sandbox_lost"),
    (SetupError, Outcome.SANDBOX_FAILED, "machine_not_ready"),
    (SandboxError, Outcome.SANDBOX_FAILED, "sandbox_failed"),
    (ModelUnreachable, Outcome.MODEL_UNREACHABLE, "model_unreachable"),
    (EnvironmentLost, Outcome.ENVIRONMENT_FAILED, "environment_lost"),
    (ResetFailed, Outcome.ENVIRONMENT_FAILED, "reset_failed"),
    (EnvironmentFailed, Outcome.ENVIRONMENT_FAILED, "environment_failed"),
    (AgentError, Outcome.AGENT_FAILED, "agent_not_started"),
    (VerifierHung, Outcome.VERIFY_FAILED, "verify_timeout"),
    (ScoringError, Outcome.VERIFY_FAILED, "bad_reward"),
    (StoreError, Outcome.INTERNAL_ERROR, "log_failed"),
    (RollcageError, Outcome.INTERNAL_ERROR, "internal_error"),
)


def _causes(error: Exception) -> Iterator[Exception]:
    """What went wrong, out of the groups that concurrent tasks wrap it in."""
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error


def ended_by(error: Exception) -> Ended:
    """How a rollout ends that this error came out of."""
    causes = list(_causes(error))
    for kind, outcome, code in _OUTCOMES:
        for cause in causes:
            if isinstance(cause, kind):
                blame = Blame(cause.blame) if isinstance(cause, RollcageError) and cause.blame else None
                return Ended(outcome=outcome, error=f"{outcome.value}: {cause}", error_code=code, blame=blame)
    error = causes[0]
    message = f"{Outcome.INTERNAL_ERROR.value}: {type(error).__name__}: {error}"
    return Ended(outcome=Outcome.INTERNAL_ERROR, error=message, error_code="internal_error")
