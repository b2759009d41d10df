"""Keeps back the end of a chat stream: from the first event on that an agent could act on.

Agents run a tool as soon as its arguments are whole JSON, and do not wait for `[DONE]`. Until then every event leaves
as it came; only half an event waits for its other half.
"""

from __future__ import annotations

import re

import msgspec

from rollcage.gateway.shapes import CallPiece, chunk_of
from rollcage.gateway.usual import calm
from rollcage.sse import EventReader, told_by

DONE = b"[DONE]"

_GAP = re.compile(rb"\r?\n\r?\n|\r\r")
_LONGEST_GAP = 4


def _gaps(data: bytes) -> list[int]:
    """Where events end in it."""
    if b"\r" in data:
        return [gap.end() for gap in _GAP.finditer(data)]
    ends, at = [], data.find(b"\n\n")
    while at >= 0:
        ends.append(at + 2)
        at = data.find(b"\n\n", at + 2)
    return ends


class ActionWatch:
    """Follows the tool calls of a stream, to tell the chunk with which an agent could begin to act."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], list[str]] = {}

    @property
    def busy(self) -> bool:
        """Whether a tool call has begun."""
        return bool(self._calls)

    def harmless(self, data: bytes) -> bool:
        """Whether no event among these can be one to keep back: what nearly all are, told without parsing."""
        return b'"tool_calls"' not in data and DONE not in data and not self._calls

    def acts(self, data: bytes) -> bool:
        """Whether an agent that has seen this event may act: a tool call is whole, or the stream is."""
        if self.harmless(data):
            return False
        if data.strip() == DONE:
            return True
        chunk = chunk_of(data)
        for choice in (chunk.choices if chunk else None) or ():
            piece = choice.delta or choice.message
            calls = (piece.tool_calls if piece else None) or ()
            whole = [self._whole(choice.index or 0, call) for call in calls]
            if any(whole) or (choice.finish_reason and self._calls):
                return True
        return False

    def _whole(self, choice: int, call: CallPiece) -> bool:
        place = (choice, call.index or 0)
        if place not in self._calls and self._calls:
            return True  # with the next call, the one before it is over
        pieces = self._calls.setdefault(place, [])
        added = (call.function.arguments if call.function else None) or ""
        pieces.append(added)
        if not pieces[0].lstrip().startswith("{"):
            pieces[:] = ["".join(pieces)]
            return bool(pieces[0].strip()) and not pieces[0].lstrip().startswith("{")
        return added.rstrip().endswith("}") and _is_json("".join(pieces))


class HeldEnd:
    """A stream that is passed on byte by byte, up to the event from which on it is kept back."""

    def __init__(self) -> None:
        self._watch = ActionWatch()
        self._half: list[bytes] = []
        """An event that has not ended."""
        self._size, self._tail = 0, b""
        """How long it is so far, and its last bytes."""
        self._held: list[bytes] = []
        self._events: EventReader | None = None
        self.done = False
        """Whether `[DONE]` has come."""

    @property
    def idle(self) -> bool:
        """Whether it waits for nothing: no event has begun, no tool call, and nothing is kept back."""
        return not self._size and self._events is None and not self._watch.busy

    @property
    def holding(self) -> bool:
        """Whether the rest is kept back."""
        return self._events is not None

    def feed(self, data: bytes) -> bytes:
        """What may leave with this portion."""
        if self._events is not None:
            self._keep(data)
            return b""
        if self.idle and calm(data):
            return data
        # Looked for where it may be new, and joined only when an event ends: a large one costs no more than its length.
        near = self._tail + data
        ends = [self._size - len(self._tail) + end for end in _gaps(near)]
        self._half.append(data)
        self._size += len(data)
        self._tail = near[-_LONGEST_GAP + 1 :]
        if not ends:
            self._notice_bare_done()
            return b""
        data, self._half = b"".join(self._half), []
        if calm(data) and not self._watch.busy:
            self._size, self._tail = 0, b""
            return data
        at = 0
        for end in ends:
            event = data[at:end]
            if not self._watch.harmless(event) and any(map(self._watch.acts, told_by(event))):
                self._begin(data[at:])
                return data[:at]
            at = end
        self._half, self._size, self._tail = [data[at:]], len(data) - at, data[at:][-_LONGEST_GAP + 1 :]
        self._notice_bare_done()
        return data[:at]

    def end(self) -> bytes:
        """What was kept back."""
        held, self._held, self._half = b"".join((*self._held, *self._half)), [], []
        return held

    def _notice_bare_done(self) -> None:
        """Some servers leave out the blank line after the last event."""
        if 0 < self._size < 32 and b"".join(self._half).strip() in (b"data: " + DONE, b"data:" + DONE):
            half, self._half = b"".join(self._half), []
            self._begin(half)
            self.done = True

    def _begin(self, data: bytes) -> None:
        self._events = EventReader()
        self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._held.append(data)
        if self._events is not None:
            for event in self._events.feed(data):
                self.done = self.done or event.data.strip() == DONE


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return False
    return True
