"""What a repeated start under one idempotency key must have in common with the first: every argument. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from rollcage.errors import UsageError
from rollcage.schema.request import SECRETS, RolloutRequest

NOT_COMPARED = {*SECRETS, "idempotency_key", "on_disconnect"}
"""Keys, and what says nothing of the rollout."""


class Conflict(UsageError):
    """The idempotency key names a rollout that was asked for with other arguments; `argument` names one of them."""


def fingerprint(request: RolloutRequest) -> dict[str, str]:
    """A digest of each argument that is not left at its default.

    Keys of models are left out: nothing that is kept may help to guess one.
    """
    fields = type(request).model_fields
    given = request.model_dump(mode="json", include=set(fields) - NOT_COMPARED)
    plain = {name: (value, fields[name].get_default()) for name, value in given.items()}
    return {name: _digest(value) for name, (value, default) in plain.items() if value != _listed(default)}


def check_same(request: RolloutRequest, first: Mapping[str, str], rollout_id: str) -> None:
    """Conflict where this is another request than the one with the fingerprint `first`, which that rollout is of."""
    now = fingerprint(request)
    differ = sorted(name for name in {*first, *now} if first.get(name) != now.get(name))
    if differ:
        raise Conflict(
            f"rollout {rollout_id} was started under this idempotency_key with another {', '.join(differ)}",
            argument=differ[0],
            remedy="repeat the first request as it was, or use a new key",
        )


def _listed(value: object) -> object:
    """A default as JSON has it."""
    return list(value) if isinstance(value, tuple) else value


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
