"""What goes wrong with remote environments, in the words of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollcage.errors import EnvironmentFailed, EnvironmentLost, ResetFailed, ScoringError
from rollcage.fleet.errors import EndpointDown, FleetError, InstanceLost, ResetRefused, VerifierFailed

_KINDS: tuple[tuple[type[FleetError], type[EnvironmentFailed | ScoringError]], ...] = (
    (VerifierFailed, ScoringError),
    (ResetRefused, ResetFailed),
    (InstanceLost, EnvironmentLost),
    (EndpointDown, EnvironmentLost),
)


@contextmanager
def named(address: str) -> Iterator[None]:
    """Errors of the environment's own become those that rollouts know."""
    try:
        yield
    except FleetError as error:
        kind = next((ours for theirs, ours in _KINDS if isinstance(error, theirs)), EnvironmentFailed)
        raise kind(f"{address}: {error}") from error
