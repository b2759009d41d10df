"""Takes a key out of what is about to be logged, should somebody have echoed it: an engine's refusal, say."""

from __future__ import annotations

import json
from typing import Any

from rollcage._packing import tamed
from rollcage.events import EVENT, Event, FilesCollected, Queued, StageEnded, StageStarted, TurnEnded

SHORTEST = 8
"""Shorter keys ("none", "x") are no secrets, and would be found everywhere."""
HIDDEN = "[key]"
_SAID_BY_THE_ENGINE = ("error", "message", "untrainable_reason", "usage", "finish_reason")


def hidden(event: Event, secret: str) -> Event:
    """The event without the secret; the same one where it is not in it.

    Whole turns are taken as they are: their tokens are what the engine sampled, and must stay so.
    """
    if len(secret) < SHORTEST or isinstance(event, Queued | StageStarted | StageEnded | FilesCollected):
        return event
    if isinstance(event, TurnEnded):
        if event.turn.error is None and event.turn.status == 200:
            return event
        turn = event.turn
        parts = {name: tamed(getattr(turn, name)) for name in _SAID_BY_THE_ENGINE}
        if secret not in json.dumps(parts, ensure_ascii=False, default=str):
            return event
        return TurnEnded(turn=turn.model_copy(update=_without(parts, secret)))
    # What came out of a box may be nested deeper than can be written; the log would cut it off there, too.
    plain = tamed(event)
    if secret not in json.dumps(plain, ensure_ascii=False):
        return event
    return EVENT.validate_python(_without(plain, secret))


def _without(value: Any, secret: str) -> Any:
    if isinstance(value, str):
        return value.replace(secret, HIDDEN)
    if isinstance(value, dict):
        return {_without(key, secret): _without(item, secret) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without(item, secret) for item in value]
    return value
