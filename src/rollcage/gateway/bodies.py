"""Reads what agents send. Large bodies are read in a thread and in parts, between which everybody else gets a turn.

A decoder cannot be interrupted: it never lets go of the interpreter. So what is large is cut into its members or items,
and a long text into slices, until each can be decoded in a fraction of a millisecond. On the way up large members are
copied as they came, because no policy touches them.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rollcage.gateway.shapes import object_of
from rollcage.types import JsonObject

LARGE = 256 << 10
"""Decoded at a stretch, about."""

MOST_PARTS = 1_000_000
"""Each costs about 100 bytes once decoded, however short it was, and time that nobody else gets."""

DEEPEST = 6
"""Large values are cut so many levels deep: each level reads all of what is below it."""

_BREAK = re.compile(rb"[ !#-.:-@G-Z\[\]^_`g-mo-qsv-z{|}~]")
"""A byte behind which a text may be cut: no part of an escape, nor of a character of several bytes."""
_TEXT = msgspec.json.Decoder(str)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


HELD = 2 << 20
"""Characters of texts that are remembered in order to be shared."""
TOOL_LISTS = 8
"""Lists of tools that are."""
LONG = 512
"""Shorter texts are not shared."""


class SharedParts:
    """Texts and lists of tools that requests have in common: calls that wait hold each of them once."""

    def __init__(self) -> None:
        self._texts: dict[tuple[int, str, str], str] = {}
        self._left = HELD
        self._tools: deque[Any] = deque(maxlen=TOOL_LISTS)

    def share(self, body: JsonObject) -> None:
        """Put what is remembered in the place of what is equal to it. Of bodies that are not large: it looks at all."""
        messages, tools = body.get("messages"), body.get("tools")
        for message in messages if isinstance(messages, list) else ():
            if isinstance(message, dict) and isinstance(text := message.get("content"), str) and len(text) > LONG:
                message["content"] = self._text(text)
        if isinstance(tools, list) and tools:
            with suppress(RecursionError):
                known = next((each for each in self._tools if each == tools), None)
                if known is None:
                    self._tools.append(tools)
                else:
                    body["tools"] = known

    def _text(self, text: str) -> str:
        look = (len(text), text[:32], text[-64:])
        known = self._texts.get(look)
        if known is not None:
            return known if known == text else text
        if len(text) <= HELD >> 3:
            self._texts[look] = text
            self._left -= len(text)
            while self._left < 0:
                self._left += len(self._texts.pop(next(iter(self._texts))))
        return text


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


async def joined(pieces: Sequence[bytes]) -> bytes:
    """A body in one piece. Copying much of it lets go of the interpreter."""
    large = sum(map(len, pieces)) > LARGE
    return await asyncio.to_thread(b"".join, pieces) if large else b"".join(pieces)


async def read(data: bytes) -> Body | None:
    """The JSON object in these bytes; None where they hold none, or one of so many parts that it would fill memory."""
    if len(data) > LARGE:
        return await asyncio.to_thread(_read_large, data)
    value = object_of(data)
    return None if value is None else Body(value)


def _read_large(data: bytes) -> Body | None:
    if sum(data.count(mark, at, at + LARGE) for mark in (b",", b"[", b"{") for at in _steps(data)) > MOST_PARTS:
        return None
    try:
        members = _MEMBERS.decode(data)
        value = {name: _value(raw) for name, raw in members.items()}
    except (ValueError, RecursionError):
        found = object_of(data)  # some other way of spelling
        return None if found is None else Body(found)
    return Body(value, {name: raw for name, raw in members.items() if _size(raw) > LARGE})


def _value(raw: msgspec.Raw, depth: int = 0) -> Any:
    data = memoryview(raw)
    if len(data) <= LARGE or depth == DEEPEST:
        return msgspec.json.decode(raw)
    match data[:1]:
        case b"[":
            return [_value(item, depth + 1) for item in _ITEMS.decode(raw)]
        case b"{":
            return {name: _value(item, depth + 1) for name, item in _MEMBERS.decode(raw).items()}
        case b'"':
            return _text(data)
    return msgspec.json.decode(raw)


def _text(data: memoryview) -> str:
    slices, start, end = [], 1, len(data) - 1
    while start < end:
        found = _BREAK.search(data, min(start + LARGE, end), end)
        stop = found.end() if found else end
        slices.append(_TEXT.decode(b'"%b"' % bytes(data[start:stop])))
        start = stop
    return "".join(slices)


def _steps(data: bytes) -> range:
    return range(0, len(data), LARGE)


def _size(raw: msgspec.Raw) -> int:
    return len(memoryview(raw))
