"""What goes wrong with remote environments, in the errors that rollouts know; and what counts as a reward."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollcage.errors import EnvironmentFailed, EnvironmentLost, ResetFailed, ScoringError

_KNOWN = (ScoringError, ResetFailed, EnvironmentLost, EnvironmentFailed)
"""What a rollout tells apart, the most telling first."""


@contextmanager
def boundary(address: str) -> Iterator[None]:
    """Around work on an environment: an error of its own kind becomes the one that rollouts know, with the address."""
    try:
        yield
    except EnvironmentFailed as error:
        if type(error) in _KNOWN:
            raise
        kind = next(known for known in _KNOWN if isinstance(error, known))
        raise kind(f"{address}: {error}") from error


def reward_of(name: str, said: Any) -> float | None:
    """What an environment calls a reward; None where it says nothing, ScoringError where it is not a number."""
    if said is None:
        return None
    reward = number_of(said)
    if reward is None or not math.isfinite(reward):
        raise ScoringError(f"{name} gave {reprlib.repr(said)}, which is no reward")
    return reward


def number_of(said: Any) -> float | None:
    """What an environment calls a reward, as a number; None where it is not one. It may be infinite or NaN."""
    try:
        return float(said) if isinstance(said, bool | int | float) else None
    except OverflowError:
        return math.inf
