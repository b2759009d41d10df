"""Bounds what a box can put into the log by calls that come to nothing.

An answer costs a model's time, and what was asked for it is kept whole. A refusal costs nothing: a box could have the
log filled with bodies that no model takes, or that it sends and hangs up on. So these have a budget per rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

from rollcage._packing import dumps, tamed
from rollcage.types import JsonObject, Turn

BROKEN_BYTES = 64 << 20
"""What failed calls of one rollout may put into the log. What several of them say counts once: it is kept once."""
BROKEN_CALLS = 10_000
"""After so many failed calls none is passed on any more: each takes a row, however short."""
ROW_BYTES = 1 << 10
"""What a call costs that says nothing new."""
PIECE_BYTES = 512
"""What a piece of a body costs at least, so that remembering pieces is bounded too."""
HEAD_CHARS = 2000
"""What is kept of a body beyond the budget."""
AT_A_STRETCH = 256 << 10
"""Measured before others get a turn."""

NOT_KEPT = "not_kept"
"""Stands in the request of such a turn: size, SHA-256 and beginning of the body as compact JSON."""


class Budget:
    """What one rollout's failed calls may still put into the log."""

    def __init__(self, size: int = BROKEN_BYTES) -> None:
        self._left = size
        self._known: set[bytes] = set()
        self.calls = 0
        """Failed calls so far."""

    async def kept(self, turn: Turn) -> Turn:
        """The turn as it goes into the log: one that failed is cut short once the budget is used up."""
        if turn.error is None:
            return turn
        self.calls += 1
        if await self._fits(turn.request):
            return turn
        said = "the request was not kept, because failed calls of this rollout have filled their part of the log"
        stub = await asyncio.to_thread(_stub, turn.request)
        return turn.model_copy(update={"request": stub, "error": f"{turn.error}; {said}"})

    async def _fits(self, request: JsonObject) -> bool:
        """Pay for those pieces of a body that no failed call before it had; false where that is too much."""
        fresh: set[bytes] = set()
        cost, stretch = ROW_BYTES, 0
        for piece in _pieces(request):
            digest = hashlib.blake2b(piece, digest_size=16).digest()
            if digest not in self._known and digest not in fresh:
                fresh.add(digest)
                cost += max(len(piece), PIECE_BYTES)
            if cost > self._left:
                return False
            stretch += len(piece)
            if stretch > AT_A_STRETCH:
                stretch = 0
                await asyncio.sleep(0)
        if cost > self._left:  # another call paid meanwhile
            return False
        self._left -= cost
        self._known |= fresh
        return True


def _pieces(request: JsonObject) -> Iterator[bytes]:
    for name, value in request.items():
        for item in value if isinstance(value, list) else [[name, value]]:
            yield _json(item)


def _stub(request: JsonObject) -> JsonObject:
    whole = _json(request)
    return {
        NOT_KEPT: {
            "bytes": len(whole),
            "sha256": hashlib.sha256(whole).hexdigest(),
            "head": whole[:HEAD_CHARS].decode(errors="replace"),
        }
    }


def _json(value: object) -> bytes:
    try:
        return dumps(value)
    except (ValueError, TypeError, RecursionError):
        return dumps(tamed(value))
