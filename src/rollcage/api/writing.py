"""Values as JSON, whatever agents and models put into them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_json

from rollcage._packing import tamed

_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Many clients take these for the end of a line; in JSON they occur in strings only, where an escape is as good."""


def json_of(
    value: BaseModel, *, include: AbstractSet[str] | None = None, exclude: AbstractSet[str] | None = None
) -> bytes:
    """Compact JSON. Half a character, as JavaScript agents leave when they cut a text, becomes a question mark."""
    chosen = None if include is None else set(include)
    left_out = None if exclude is None else set(exclude)
    try:
        return value.__pydantic_serializer__.to_json(value, include=chosen, exclude=left_out)
    except (PydanticSerializationError, RecursionError):
        plain = tamed(value)
        names = [name for name in plain if (chosen is None or name in chosen) and name not in (left_out or ())]
        return to_json({name: plain[name] for name in names}, inf_nan_mode="null")


def on_one_line(json: bytes) -> bytes:
    """The same compact JSON, on one line for every idea of what a line is."""
    for character, escape in _BREAKS:
        json = json.replace(character, escape)
    return json
