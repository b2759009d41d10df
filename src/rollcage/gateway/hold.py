"""Keeps back the end of a chat stream: from the first event on that an agent could act on.

Agents run a tool as soon as its arguments are whole JSON, and do not wait for `[DONE]`. Until then every event leaves
as it came; only half an event waits for its other half, and of a large one only the end of its line.
"""

from __future__ import annotations

import re

import msgspec

from rollcage.gateway.shapes import CallPiece, chunk_of
from rollcage.gateway.usual import calm
from rollcage.sse import EventReader, told_by

DONE = b"[DONE]"
_LAST = b"data: [DONE]\n\n"

_GAP = re.compile(rb"\r?\n\r?\n|\r\r")
_MARKS = (b'"tool_calls"', DONE)
"""An event without one of these is nothing to act on."""
_OVERLAP = 11
"""As long as a gap or a mark may be, less one byte."""
LARGE = 256 << 10
"""An event of which so much has come leaves before it is whole: nobody can act on half a line."""


def _gaps(data: bytes) -> list[int]:
    """Where events end in it."""
    if b"\r" in data:
        return [gap.end() for gap in _GAP.finditer(data)]
    if b"\n" not in data:
        return []
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
        """An event that has not ended, the pieces of it that have left included."""
        self._size, self._tail = 0, b""
        """How long it is so far, and its last bytes."""
        self._left = 0
        """How many of its pieces have left."""
        self._marked = False
        """Whether it may be one to act on."""
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
        if self.idle:
            if calm(data):
                return data
            if (head := data.removesuffix(_LAST)) != data and (calm(head) or not head):
                self._events, self._held, self.done = EventReader(), [_LAST], True
                return head
        # Looked for where it may be new, and joined only when an event ends: a large one costs no more than its length.
        near = self._tail + data
        gaps = _gaps(near)
        ends = [self._size - len(self._tail) + gap for gap in gaps]
        self._half.append(data)
        self._size += len(data)
        event = near[: gaps[0]] if gaps else near
        self._marked = self._marked or any(mark in event for mark in _MARKS)
        self._tail = near[-_OVERLAP:]
        if not ends:
            self._notice_bare_done()
            return self._front(data)
        if self._left:
            return self._end_large(ends[0])
        data, self._half = b"".join(self._half), []
        if calm(data) and not self._watch.busy:
            self._start(b"")
            return data
        at = 0
        for end in ends:
            event = data[at:end]
            if not self._watch.harmless(event) and any(map(self._watch.acts, told_by(event))):
                self._begin(data[at:])
                return data[:at]
            at = end
        self._start(data[at:])
        self._notice_bare_done()
        return data[:at]

    def end(self) -> bytes:
        """What was kept back."""
        held, self._held, self._half = b"".join((*self._held, *self._half[self._left :])), [], []
        return held

    def _front(self, data: bytes) -> bytes:
        """What may leave of an event that has not ended, the last piece of which is `data`."""
        if self._size < LARGE or self._marked or self._watch.busy or self._events is not None:
            return b""
        pieces = self._half[self._left :]
        if any(b"\n" in piece or b"\r" in piece for piece in pieces):
            return b""  # a line of it has ended, and some readers act on that
        self._left = len(self._half)
        return b"".join(pieces)

    def _end_large(self, end: int) -> bytes:
        """The first event ends there, and most of it has left."""
        pieces, gone = self._half, sum(map(len, self._half[: self._left]))
        rest = b"".join(pieces[self._left :])
        acts = self._marked and any(map(self._watch.acts, told_by(b"".join(pieces)[:end])))
        self._start(b"")
        if acts:
            self._begin(rest)
            return b""
        after = rest[end - gone :]
        return rest[: end - gone] + (self.feed(after) if after else b"")

    def _start(self, data: bytes) -> None:
        """An event begins with this; nothing else waits."""
        self._half, self._size, self._left = [data] if data else [], len(data), 0
        self._tail, self._marked = data[-_OVERLAP:], any(mark in data for mark in _MARKS)

    def _notice_bare_done(self) -> None:
        """Some servers leave out the blank line after the last event."""
        if 0 < self._size < 32 and b"".join(self._half).strip() in (b"data: " + DONE, b"data:" + DONE):
            half = b"".join(self._half)
            self._start(b"")
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
