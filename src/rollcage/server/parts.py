"""Counts the parts of a JSON text before anything decodes it: each costs time and memory, however short it is."""

from __future__ import annotations

import re

MOST_PARTS = 200_000
"""Of one request: tens of thousands of files and arguments."""

_OUTSIDE = re.compile(rb'[^"]*+')
_INSIDE = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)


class PartCounter:
    """Counts strings, and commas and opening brackets between them, piece by piece as a body arrives."""

    def __init__(self, most: int = MOST_PARTS) -> None:
        self._most, self._count = most, 0
        self._in_string = self._escaped = False

    def takes(self, piece: bytes) -> bool:
        """Whether the text, with this piece, has no more parts than it may have."""
        at = 0
        if self._escaped and piece:
            at, self._escaped = 1, False
        while at < len(piece) and self._count <= self._most:
            pattern = _INSIDE if self._in_string else _OUTSIDE
            end = pattern.match(piece, at).end()  # type: ignore[union-attr]  # it matches nothing, too
            if not self._in_string:
                self._count += sum(piece.count(mark, at, end) for mark in (b",", b"[", b"{"))
            if end < len(piece) and piece[end] == ord("\\"):
                self._escaped = True  # what it escapes is in the next piece
            elif end < len(piece):
                self._in_string = not self._in_string
                self._count += self._in_string
            at = end + 1
        return self._count <= self._most
