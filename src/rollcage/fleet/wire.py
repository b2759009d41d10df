"""Reads what an MCP endpoint sends: JSON-RPC messages, alone or as server-sent events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rollcage.types import JsonObject

LARGEST = 64 * 1024 * 1024
"""Bytes of one answer; screenshots are large, but an endpoint shall not fill our memory."""


class Malformed(ValueError):
    """This is no JSON-RPC, or too much of it."""


class ServerEvent(NamedTuple):
    """One server-sent event."""

    data: str
    id: str
    retry_s: float | None


@dataclass
class EventReader:
    """Bytes in, events out, however they are cut."""

    _rest: bytes = b""
    _data: list[str] = field(default_factory=list)
    _id: str = ""
    _retry: float | None = None
    _size: int = 0

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """The events that are whole now."""
        self._size += len(chunk)
        if self._size > LARGEST:
            raise Malformed(f"the answer is larger than {LARGEST} bytes")
        # A lone CR may be half of a CRLF that was cut; leave it for the next chunk.
        whole = self._rest + chunk
        held = whole[-1:] if whole.endswith(b"\r") else b""
        lines = whole[: len(whole) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
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
        elif name == "retry" and value.isdigit():
            self._retry = int(value) / 1000
        return None


def message_of(text: str | bytes) -> JsonObject:
    """One JSON-RPC message."""
    try:
        message = json.loads(text)
    except ValueError as error:
        raise Malformed("the answer is no JSON") from error
    if not isinstance(message, dict):
        raise Malformed("the answer is no JSON object")
    return message
