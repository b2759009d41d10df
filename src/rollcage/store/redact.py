"""Takes a key out of what is about to be logged, should somebody have echoed it: an engine's refusal, say."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from rollcage.events import EVENT, Event, FilesCollected, Queued, StageEnded, StageStarted, TurnEnded
from rollcage.json_safe import json_safe
from rollcage.types import KEY_REPEATED, Turn

SHORTEST = 8
"""Shorter keys ("none", "x") are no secrets, and would be found everywhere."""
HIDDEN = "[key]"
_WORDS = ("request", "message", "usage", "error", "untrainable_reason", "finish_reason")
"""What a turn says beside its tokens."""


def hidden(event: Event, secret: str) -> Event:
    """The event without the secret; the same one where it is not in it."""
    if len(secret) < SHORTEST or isinstance(event, Queued | StageStarted | StageEnded | FilesCollected):
        return event
    if isinstance(event, TurnEnded):
        turn = _turn(event.turn, secret)
        return event if turn is event.turn else TurnEnded(turn=turn)
    # What came out of a box may be nested deeper than can be written; the log would cut it off there, too.
    plain = json_safe(event)
    if secret not in json.dumps(plain, ensure_ascii=False):
        return event
    return EVENT.validate_python(_without(plain, secret))


def _turn(turn: Turn, secret: str) -> Turn:
    """The turn without the secret. Tokens are what the engine sampled, so none is changed: all are kept, or none."""
    words = {name: getattr(turn, name) for name in _WORDS}
    changed = _without(json_safe(words), secret) if _holds(words, secret) else {}
    others = (each.text for token in turn.tokens for each in token.top)
    if secret in "".join(token.text for token in turn.tokens) or secret in "\n".join(others):
        changed["tokens"] = ()
    if not changed:
        return turn
    if turn.error is None:
        changed |= {"trainable": False, "untrainable_reason": KEY_REPEATED}
    return turn.model_copy(update=changed)


def _holds(value: dict[str, Any], secret: str) -> bool:
    # A request has the whole conversation in it, turn after turn: it is looked at as fast as it can be.
    try:
        return secret.encode() in msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError):
        return secret in json.dumps(json_safe(value), ensure_ascii=False)


def _without(value: Any, secret: str) -> Any:
    if isinstance(value, str):
        return value.replace(secret, HIDDEN)
    if isinstance(value, dict):
        return {_without(key, secret): _without(item, secret) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, secret) for item in value]
    return value
