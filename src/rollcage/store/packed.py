"""An event as the log's file keeps it, packed by who has it: this process, or a node of a cluster that sends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import zstandard

from rollcage.errors import StoreError
from rollcage.events import Event, TurnEnded
from rollcage.json_safe import json_safe
from rollcage.store.packing import Blob, Columns, Ids, LongTexts, Nested, Own, blob_of, pack_beside
from rollcage.types import Token, TokenColumns, Turn

LEVEL = 1
"""How hard content is compressed."""


class Packed(NamedTuple):
    """An event ready to be written."""

    event: Event
    """What is looked at here: of a turn that was packed elsewhere all but its words, ids and tokens."""
    sampled: int
    """Tokens of a turn."""
    body: bytes
    blobs: dict[bytes, tuple[int, bytes]]
    """Content that it needs and that may not be stored yet: how to read it, and its bytes, compressed."""


class EventPacker:
    """Packs the events of one rollout, in the order of its log: what an earlier one brought is not brought again.

    That is safe while the rollout is open: content that its log refers to is never pruned.
    """

    def __init__(self) -> None:
        self._brought: set[bytes] = set()
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)

    def pack(self, event: TurnEnded) -> Packed:
        """The event, to be sent to who has the log."""
        body, blobs = packed_body(event)
        fresh = compressed(self._compressor, {name: each for name, each in blobs.items() if name not in self._brought})
        self._brought.update(fresh)
        return Packed(TurnEnded.model_construct(turn=_sketch(event.turn)), len(event.turn.tokens), body, fresh)


def compressed(compressor: zstandard.ZstdCompressor, blobs: dict[bytes, Blob | str]) -> dict[bytes, tuple[int, bytes]]:
    """Content as the file has it."""
    found = {digest: blob_of(content) for digest, content in blobs.items()}
    return {digest: (int(blob.codec), compressor.compress(blob.raw)) for digest, blob in found.items()}


def packed_body(event: Event, texts: LongTexts | None = None) -> tuple[bytes, dict[bytes, Blob | str]]:
    """The body of an event, and the content that it needs by name; StoreError where nothing can carry it."""
    try:
        return pack_beside(texts or LongTexts(0), _plain(event))
    except (ValueError, TypeError, RecursionError):
        # Models and agents can write what no JSON tool will carry; it must not cost them the rollout.
        try:
            return pack_beside(texts or LongTexts(0), json_safe(event))
        except (ValueError, TypeError, RecursionError) as error:
            said = " ".join(str(error).split())[:300]
            raise StoreError(f"cannot log `{event.kind}`: {said}") from error


def _sketch(turn: Turn) -> Turn:
    """The turn as it is counted: the engine's count, or ours where it gave none."""
    counted = {"prompt_tokens": len(turn.prompt_ids), "completion_tokens": len(turn.tokens)}
    usage = {name: turn.usage.get(name, number) for name, number in counted.items()}
    nothing: dict[str, Any] = {"request": {}, "message": {}, "prompt_ids": (), "tokens": (), "history": None}
    return Turn.model_construct(**{**turn.__dict__, **nothing, "usage": usage})


def _plain(event: Event) -> dict[str, Any]:
    """The event as what JSON knows, but for tokens: they are many, and go as the columns that they are."""
    if not isinstance(event, TurnEnded):
        return event.model_dump()  # its JSON mode makes nothing of infinities, and a model can write 1e999
    turn = event.turn
    history = turn.history and turn.history.model_dump(mode="json")
    own = {**turn.__dict__, "purpose": turn.purpose.value, "history": history}
    own |= {"prompt_ids": Ids(turn.prompt_ids), "tokens": _columns(turn.tokens)}
    return {"kind": event.kind, "turn": Own(own)}


def _columns(tokens: Sequence[Token]) -> Sequence[Token] | Columns:
    if not isinstance(tokens, TokenColumns):
        return tokens
    if not tokens:
        return ()
    top = Columns((tokens.top_texts, tokens.top_ids, tokens.top_logprobs))
    return Columns((tokens.texts, tokens.ids, tokens.logprobs, Nested(tokens.counts, top)))
