"""What goes wrong with remote environments, in the words of rollouts."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollcage.errors import EnvironmentFailed, EnvironmentLost, ResetFailed, ScoringError
from rollcage.fleet.environment import number_of
from rollcage.fleet.errors import EndpointDown, FleetError, InstanceLost, ResetRefused, VerifierFailed

_KINDS: tuple[tuple[type[FleetError], type[EnvironmentFailed | ScoringError]], ...] = (
    (VerifierFailed, ScoringError),
    (ResetRefused, ResetFailed),
    (InstanceLost, EnvironmentLost),
    (EndpointDown, EnvironmentLost),
)


def reward_of(name: str, said: Any) -> float | None:
    """The number that an environment calls a reward; null where it says nothing. What is no number is ScoringError."""
    if said is None:
        return None
    reward = number_of(said)
    if reward is None or not math.isfinite(reward):
        raise ScoringError(f"{name} gave {reprlib.repr(said)}, which is no reward")
    return reward


@contextmanager
def named(address: str) -> Iterator[None]:
    """Errors of the environment's own become those that rollouts know."""
    try:
        yield
    except FleetError as error:
        kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), EnvironmentFailed)
        raise kind(f"{address}: {error}") from error
