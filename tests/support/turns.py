"""Turns made by hand, of ids that a reader can follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollcage.types import Token, Turn


def turn(index: int, prompt: Sequence[int], answer: Sequence[int], **more: Any) -> Turn:
    """A trainable turn; the logprob of each token tells the turn and the place it came from."""
    tokens = tuple(Token(f"<{id_}>", id_, -(index + place / 1024)) for place, id_ in enumerate(answer))
    given: dict[str, Any] = {"trainable": True, "finish_reason": "stop", "request": {}}
    given["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens)}
    return Turn(index=index, prompt_ids=tuple(prompt), tokens=tokens, **{**given, **more})
