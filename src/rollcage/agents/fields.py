"""Reads fields of what an agent prints, whatever is really there: it comes out of a box. Merges configurations."""

from __future__ import annotations

import json
from typing import Any, TypeGuard

from rollcage.json_safe import json_safe
from rollcage.types import JsonObject


def is_number(value: Any) -> TypeGuard[float]:
    """A number that JSON can carry exactly."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 53


def count(value: Any) -> int:
    """A number of things; 0 where it is not a number."""
    return int(value) if is_number(value) and value > 0 else 0


def table(value: Any) -> JsonObject:
    """An object; an empty one where it is not an object."""
    return value if isinstance(value, dict) else {}


def tables(value: Any) -> list[JsonObject]:
    """The objects of a list; empty where it is not a list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """A text; anything else as JSON."""
    if value is None:
        return ""
    return str(json_safe(value if isinstance(value, str) else json.dumps(json_safe(value))))


def merged(base: JsonObject, over: JsonObject) -> JsonObject:
    """One configuration over another: what both have as objects is merged in turn."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result
