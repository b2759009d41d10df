"""In a box: how values cross between tests in the judge and code under test in its worker, as JSON and never as pickle.

Exact builtin types, and a few of the standard library, cross as data. For everything else the caller decides: `other`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath
from typing import Any

DEPTH = 64
LINE = 8 << 20
"""Bytes of one message."""

_LISTS: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z"}
_TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: ("b", bytes.hex, bytes.fromhex),
    bytearray: ("a", bytearray.hex, bytearray.fromhex),
    complex: ("c", repr, complex),
    Decimal: ("D", str, Decimal),
    Fraction: ("F", str, lambda text: Fraction(*map(int, text.split("/")))),  # and not 1e999999999
    datetime: ("T", datetime.isoformat, datetime.fromisoformat),
    date: ("Y", date.isoformat, date.fromisoformat),
    timedelta: ("S", lambda value: str(value // timedelta(microseconds=1)), lambda text: timedelta(0, 0, int(text))),
    PosixPath: ("P", str, PosixPath),
}
_MAKERS = {tag: kind for kind, tag in _LISTS.items()}
_READERS = {tag: read for tag, _, read in _TEXTS.values()}


def pack(value: Any, other: Callable[[Any], Any], depth: int = DEPTH) -> Any:
    """A value as JSON has it."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if not depth:
        raise ValueError("nested too deeply to be carried")
    if kind in _LISTS:
        return {_LISTS[kind]: [pack(item, other, depth - 1) for item in value]}
    if kind is dict:
        return {"d": [[pack(key, other, depth - 1), pack(item, other, depth - 1)] for key, item in value.items()]}
    if kind in _TEXTS:
        tag, write, _ = _TEXTS[kind]
        return {tag: write(value)}
    return other(value)


def unpack(data: Any, other: Callable[[Any], Any]) -> Any:
    """The value again; whatever else stands there is `other`'s. ValueError, TypeError or KeyError for nonsense."""
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("a bare list is no value")
        return data
    if len(data) == 1:
        [(tag, inner)] = data.items()
        if tag in _MAKERS:
            return _MAKERS[tag](unpack(item, other) for item in inner)
        if tag == "d":
            return {unpack(key, other): unpack(item, other) for key, item in inner}
        if tag in _READERS:
            return _READERS[tag](inner)
    return other(data)
