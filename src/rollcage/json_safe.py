"""Values of unknown origin as plain JSON: what is nested too deep becomes text, what is no text is mended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

DEEPEST = 100
TOO_DEEP = "(nested too deep to be kept)"


def json_safe(value: Any, depth: int = 0) -> Any:
    """The same as plain JSON whatever it holds: what is nested too deep becomes text, what is no text is mended."""
    if isinstance(value, BaseModel):
        return {name: json_safe(getattr(value, name), depth) for name, field in _fields(value) if not field.exclude}
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        if depth >= DEEPEST:
            return TOO_DEEP
        return {json_safe(str(name)): json_safe(inner, depth + 1) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return TOO_DEEP if depth >= DEEPEST else [json_safe(inner, depth + 1) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise TypeError(f"{type(value).__name__} is nothing that JSON knows")


def _fields(value: BaseModel) -> Iterable[tuple[str, FieldInfo]]:
    return type(value).model_fields.items()


_BREAKS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
"""Many clients take these for the end of a line; in JSON they occur in strings only, where an escape is as good."""


def on_one_line(json: bytes) -> bytes:
    """The same compact JSON, on one line for every idea of what a line is."""
    for character, escape in _BREAKS:
        json = json.replace(character, escape)
    return json
