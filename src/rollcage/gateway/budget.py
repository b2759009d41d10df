"""Bounds what a box can put into the log by calls that come to nothing.

An answer costs a model's time, and what was asked for it is kept whole. A refusal costs nothing: a box could have the
log filled with bodies that no model takes, or that it sends and hangs up on. So these have a budget per rollout.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

from rollcage.json_safe import json_safe
from rollcage.store.packing import dumps, pack
from rollcage.types import JsonObject, Turn

BROKEN_BYTES = 64 << 20
"""What failed calls of one rollout may put into the log. What several of them say counts once: it is kept once."""
BROKEN_CALLS = 10_000
"""After so many failed calls none is passed on any more: each takes a row, however short."""
ROW_BYTES = 1 << 10
"""What a call costs that says nothing new."""
PIECE_BYTES = 512
"""What a blob costs at least: it takes a row too, and remembering it is bounded this way."""
HEAD_CHARS = 2000
"""What is kept of a body beyond the budget."""

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
        if self._fits(await asyncio.to_thread(_costs, turn.request)):
            return turn
        said = "the request was not kept, because failed calls of this rollout have filled their part of the log"
        stub = await asyncio.to_thread(_stub, turn.request)
        return turn.model_copy(update={"request": stub, "error": f"{turn.error}; {said}"})

    def _fits(self, costs: Mapping[bytes, int]) -> bool:
        """Pay for those blobs of a body that no failed call before it had; false where that is too much."""
        fresh = [digest for digest in costs if digest not in self._known]
        cost = ROW_BYTES + sum(costs[digest] for digest in fresh)
        if cost > self._left:
            return False
        self._left -= cost
        self._known.update(fresh)
        return True


def _costs(request: JsonObject) -> dict[bytes, int]:
    """What the log would keep of a body beside the row: its blobs, cut exactly as the log cuts them."""
    try:
        _, blobs = pack({"request": request})
    except (ValueError, TypeError, RecursionError):
        _, blobs = pack({"request": json_safe(request)})
    return {digest: max(len(blob.raw), PIECE_BYTES) for digest, blob in blobs.items()}


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
        return dumps(json_safe(value))
