"""Values as JSON, whatever agents and models put into them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from rollcage.json_safe import json_safe, on_one_line

__all__ = ["json_of", "on_one_line"]


def json_of(
    value: BaseModel, *, include: AbstractSet[str] | None = None, exclude: AbstractSet[str] | None = None
) -> bytes:
    """Compact JSON. Half a character, as JavaScript agents leave when they cut a text, becomes a question mark."""
    chosen = None if include is None else set(include)
    left_out = None if exclude is None else set(exclude)
    try:
        return value.__pydantic_serializer__.to_json(value, include=chosen, exclude=left_out)
    except (PydanticSerializationError, RecursionError):
        plain = json_safe(value)
        names = [name for name in plain if (chosen is None or name in chosen) and name not in (left_out or ())]
        return to_json({name: plain[name] for name in names}, inf_nan_mode="null")
