"""Reads server-sent events: bytes in any portions in, events out, as the standard has it.

Its work is linear in what comes, however small the portions. Where a `limit` is set, an event that grows beyond it is
left out and counted, so that memory is bounded too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ServerEvent(NamedTuple):
    """One event of a stream."""

    name: str
    """What its `event:` line said; empty for the usual kind."""
    data: bytes
    """Its `data:` lines, joined by line feeds; empty where it has none and only says `retry`."""
    id: str = ""
    """The last `id:` of the stream so far."""
    retry_s: float | None = None
    """How long to wait before asking for the stream again, where this event says so."""


_made = partial(tuple.__new__, ServerEvent)


def told_by(event: bytes) -> list[bytes]:
    """The data of each event in these bytes, which end with one."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2:
        return [event[6:-2]]  # as nearly all are
    return [each.data for each in EventReader().feed(event)]


class EventReader:
    """Cuts a stream into events. Only CR, LF and CRLF end a line: U+2028 and its kin are text."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: bytes that one event may have; None where the caller bounds the stream itself."""
        self._limit = limit
        self.skipped = 0
        """Events that were left out because they were too large."""
        self._rest: list[bytes] = []
        """Pieces of a line that has not ended."""
        self._held = 0
        """Bytes in them."""
        self._carriage = False
        self._first = self._careful = True
        """Whether the next line is the first, and whether it takes the long way: all do where sizes are counted."""
        self._name, self._id = "", ""
        self._retry_s: float | None = None
        self._data: list[bytes] = []
        self._size = 0
        self._skipping = False

    @property
    def between(self) -> bool:
        """Whether it stands between two events, with nothing begun."""
        return not (self._rest or self._data or self._name or self._carriage or self._retry_s is not None)

    @property
    def waiting(self) -> int:
        """Bytes of a line that has not ended."""
        return self._held

    def feed(self, data: bytes) -> Iterator[ServerEvent]:
        """The events that are complete with this portion. Must be read to its end before the next portion."""
        if self._carriage and data:
            # The CR of a CRLF that was cut in two has ended its line already.
            self._carriage = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._carriage = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        # Joined only when a line ends: a line of many megabytes in small portions costs no more than its length.
        if b"\n" not in data:
            self._keep(data)
            return
        lines = data.split(b"\n")
        collected = self._data
        if self._rest:
            begun = self._rest[0]
            if begun.startswith(b"data: ") and not self._careful:
                collected.append(b"".join((begun[6:], *self._rest[1:], lines.pop(0))))  # copied once, it may be large
            else:
                lines[0] = b"".join((*self._rest, lines[0]))
            self._rest, self._held = [], 0
        last = lines.pop()
        for line in lines:
            # What nearly every line is, first: one `data:` line and a blank one make an event.
            if line.startswith(b"data: ") and not self._careful:
                collected.append(line[6:])
            elif line:
                self._line(line)
            elif collected or self._retry_s is not None:
                yield self._event()
            else:
                self._end_nothing()
        self._keep(last)

    def end(self) -> Iterator[ServerEvent]:
        """What is left when the stream is over: servers forget the last blank line, and cut streams have none."""
        rest = b"".join(self._rest)
        self._rest.clear()
        if rest:
            self._line(rest)
        if self._data:
            yield self._event()

    def _keep(self, piece: bytes) -> None:
        """The beginning of a line, or more of it."""
        if not piece:
            return
        self._rest.append(piece)
        self._held += len(piece)
        if self._limit is not None and self._size + self._held > self._limit:
            self._skip()
            self._rest, self._held = [b":"], 1  # so that the end of this line is no blank line

    def _line(self, line: bytes) -> None:
        if self._careful:
            line = self._counted(line)
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            self._data.append(b"")
        elif line.startswith(b"event:"):
            self._name = _text(line[6:])
        elif line.startswith(b"id:"):
            self._id = self._id if b"\0" in line else _text(line[3:])
        elif line.startswith(b"retry:"):
            text = _text(line[6:])
            if text.isascii() and text.isdigit() and len(text) < 10:
                self._retry_s = int(text) / 1000

    def _counted(self, line: bytes) -> bytes:
        """The line; empty where its event is too large."""
        if self._first:
            line = line.removeprefix(BYTE_ORDER_MARK)
            self._first, self._careful = False, self._limit is not None
        if self._limit is None:
            return line
        self._size += len(line) + 1
        if self._size > self._limit:
            self._skip()
        return b"" if self._skipping else line

    def _skip(self) -> None:
        self._skipping = True
        self._data.clear()
        self._retry_s = None

    def _event(self) -> ServerEvent:
        collected = self._data
        data = collected[0] if len(collected) == 1 else b"\n".join(collected)
        event: ServerEvent = _made((self._name, data, self._id, self._retry_s))
        self._name, self._retry_s, self._size = "", None, 0
        collected.clear()
        return event

    def _end_nothing(self) -> None:
        """A blank line after nothing, or after what was left out."""
        self._name, self._size = "", 0
        if self._skipping:
            self._skipping = False
            self.skipped += 1


def _text(value: bytes) -> str:
    return value.removeprefix(b" ").decode("utf-8", "replace")
