"""Reads what agents send. Large bodies are read in parts, between which everybody else gets a turn.

A decoder cannot be interrupted, and threads do not help: it never lets go of the interpreter. So a large body is first
cut into its members, then the list that makes it large into its items, and those are decoded a few at a time. On the
way up they are copied as they came, because no policy touches them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollcage.gateway.shapes import object_of
from rollcage.types import JsonObject

LARGE = 256 << 10
"""Decoded at a stretch, about."""

MOST_PARTS = 1_000_000
"""Each costs about 100 bytes once decoded, however short it was, and time that nobody else gets."""

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True)
class Body:
    """What an agent sent."""

    value: JsonObject
    """Decoded."""
    raw: dict[str, msgspec.Raw] = field(default_factory=dict)
    """Large members as they came."""

    @property
    def large(self) -> int:
        """Bytes of its large members."""
        return sum(map(_size, self.raw.values()))

    def spliced(self, sent: JsonObject) -> dict[str, Any]:
        """A request made from this one, its large members as they came wherever they are unchanged."""
        same = {name: raw for name, raw in self.raw.items() if sent.get(name) is self.value.get(name)}
        return {**sent, **same}


async def read(data: bytes) -> Body | None:
    """The JSON object in these bytes; None where they hold none, or one of so many parts that it would fill memory."""
    if len(data) > LARGE:
        if data.count(b",") + data.count(b"[") + data.count(b"{") > MOST_PARTS:
            return None
        body = await _in_parts(data)
        if body is not None:
            return body
    value = object_of(data)
    return None if value is None else Body(value)


async def _in_parts(data: bytes) -> Body | None:
    try:
        members = _MEMBERS.decode(data)
        value: JsonObject = {}
        large: dict[str, msgspec.Raw] = {}
        for name, raw in members.items():
            if _size(raw) > LARGE:
                await asyncio.sleep(0)
                large[name] = raw
            value[name] = await _items(raw) if name in large and _is_list(raw) else msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None  # some other way of spelling, for `object_of` to make out
    return Body(value, large)


async def _items(raw: msgspec.Raw) -> list[Any]:
    items = []
    size = 0
    for item in _ITEMS.decode(raw):
        size += _size(item)
        if size > LARGE:
            await asyncio.sleep(0)
            size = _size(item)
        items.append(msgspec.json.decode(item))
    return items


def _size(raw: msgspec.Raw) -> int:
    return len(memoryview(raw))


def _is_list(raw: msgspec.Raw) -> bool:
    return memoryview(raw)[0] == ord("[")
