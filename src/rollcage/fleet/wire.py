"""Reads what an MCP endpoint sends: JSON-RPC messages, alone or as server-sent events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollcage.types import JsonObject


class Malformed(ValueError):
    """This is no JSON-RPC."""


class ServerEvent(NamedTuple):
    """One server-sent event."""

    data: str
    id: str
    retry_s: float | None


@dataclass
class EventReader:
    """Bytes in, events out, however they are cut."""

    _rest: list[bytes] = field(default_factory=list)
    _carriage: bool = False
    _data: list[str] = field(default_factory=list)
    _id: str = ""
    _retry: float | None = None

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """The events that are whole now."""
        if not chunk:
            return
        # The CR of a CRLF that was cut has ended its line already.
        start = 1 if self._carriage and chunk.startswith(b"\n") else 0
        self._carriage = chunk.endswith(b"\r")
        lines = chunk[start:].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        # Pieces of a long line are put together once, at its end.
        self._rest.append(lines.pop(0))
        if not lines:
            return
        lines.insert(0, b"".join(self._rest))
        self._rest = [lines.pop()]
        for line in lines:
            event = self._line(line.decode("utf-8", "replace"))
            if event:
                yield event

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            event = ServerEvent("\n".join(self._data), self._id, self._retry)
            seen, self._data = bool(self._data or self._retry is not None), []
            self._retry = None
            return event if seen else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit() and len(value) < 10:
            self._retry = int(value) / 1000
        return None


def message_of(text: str | bytes) -> JsonObject:
    """One JSON-RPC message."""
    try:
        # NaN and its like are no JSON either, but common; as text they can be passed on to anybody.
        message = json.loads(text, parse_constant=str)
    except RecursionError as error:
        raise Malformed("the answer is nested too deep") from error
    except ValueError as error:
        raise Malformed("the answer is no JSON") from error
    if not isinstance(message, dict):
        raise Malformed("the answer is no JSON object")
    return message
