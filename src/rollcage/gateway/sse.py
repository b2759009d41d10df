"""Server-sent events: bytes in any portions in, events out, as the standard reads them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One event of a stream."""

    name: str
    """What its `event:` line said; empty for the usual kind."""
    data: bytes
    """Its `data:` lines, joined by line feeds."""


_made = partial(tuple.__new__, Event)


class Events:
    """Cuts a stream into events. Only CR, LF and CRLF end a line: U+2028 and its kin are text."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._name = ""
        self._data: list[bytes] = []
        self._first = True

    def feed(self, data: bytes) -> Iterator[Event]:
        """The events that are complete with this portion. Must be read to its end before the next portion."""
        # Joined only when a line ends: a line of many megabytes in small portions costs no more than its length.
        if b"\n" not in data and b"\r" not in data and not (self._parts and self._parts[-1].endswith(b"\r")):
            self._parts.append(data)
            return
        whole = b"".join((*self._parts, data))
        # A CR at the very end may be the first half of a CRLF.
        kept = b"\r" if whole.endswith(b"\r") else b""
        if b"\r" in whole:
            whole = whole[: len(whole) - len(kept)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = whole.split(b"\n")
        self._parts = [lines.pop() + kept]
        collected = self._data
        for line in lines:
            # What nearly every line is, first: one `data:` line and a blank one make an event.
            if line.startswith(b"data: ") and not self._first:
                collected.append(line[6:])
            elif line or not collected:
                self._line(line)
            else:
                yield self._event()

    def end(self) -> Iterator[Event]:
        """What is left when the stream is over: servers forget the last blank line, and cut streams have none."""
        rest = b"".join(self._parts)
        self._parts = []
        self._line(rest.removesuffix(b"\r"))
        if self._data:
            yield self._event()

    def _event(self) -> Event:
        collected = self._data
        event = _made((self._name, collected[0] if len(collected) == 1 else b"\n".join(collected)))
        self._name = ""
        collected.clear()
        return event

    def _line(self, line: bytes) -> None:
        if self._first:
            self._first = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif not line:
            self._name = ""
        elif line.startswith(b"event:"):
            self._name = line[6:].removeprefix(b" ").decode("utf-8", "replace")
        elif line == b"data":
            self._data.append(b"")
