"""Events as nearly all are, many at a time. Compiled (`_wire.c`) where it could be built; in Python everywhere else.

Of the usual shape is an event with one choice that adds words, one token, its id and its logprob, and nothing else: no
count, no end, no ids of the prompt. It is a line `data: ` and a blank one.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from rollcage.gateway.shapes import Chunk, Logprobs, MessagePiece, TokenEntry, chunk_in
from rollcage.gateway.token_draft import TOKEN_ID, TokenDraft
from rollcage.types import columns

Piece = str | bytes | MessagePiece
"""What a token adds to the message: words, or a delta that brings more (as JSON where it was not read yet)."""


_CHUNK_HEAD = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")


def python_take_usual(data: bytes, start: int, tokens: TokenDraft, pieces: list[Piece]) -> int:
    """Take in the events from `start` on, up to the first of another shape; returns where that begins.

    `data` ends with an event. `pieces` gets what each adds to the message.
    """
    entries: list[TokenEntry] = []
    ids: list[int] = []
    while start < len(data):
        end = data.find(b"\n", start)
        whole = data.startswith(b"data: ", start) and data.startswith(b"\n\n", end)
        chunk = chunk_in(data[start + 6 : end]) if whole and end >= 0 else None
        entry = None if chunk is None else _usual(chunk)
        if chunk is None or entry is None:
            break
        choice = chunk.choices[0]  # type: ignore[index]
        entries.append(entry)
        ids += choice.token_ids or ()
        if choice.delta is not None:
            pieces.append(choice.delta)
        start = end + 2
    if entries:
        tokens.add(Logprobs(entries), ids)
    return start


def python_calm(data: bytes) -> bool:
    """Whether these are whole events of which none can be one to act on or to take out: told without parsing."""
    return (
        data.endswith(b"\n\n")
        and b'"tool_calls"' not in data
        and b"[DONE]" not in data
        and b'"choices":[]' not in data
        and b'"choices": []' not in data
        and b"\r" not in data
    )


def python_framed(data: bytes, key: bytes) -> bytes | None:
    """What these chunks of HTTP's carry, where they are whole, calm and without the key: then they may be passed on
    as they came. None of everything else, the last chunk included.
    """
    carried, at = [], 0
    while at < len(data):
        head = _CHUNK_HEAD.match(data, at)
        end = head.end() + int(head[1], 16) if head else 0
        if head is None or end == head.end() or not data.startswith(b"\r\n", end):
            return None
        carried.append(data[head.end() : end])
        at = end + 2
    body = b"".join(carried)
    return body if python_calm(body) and not (key and key in body) else None


def _usual(chunk: Chunk) -> TokenEntry | None:
    """The one token of a chunk of the usual shape."""
    if (
        (choices := chunk.choices) is None
        or len(choices) != 1
        or chunk.error is not None
        or chunk.usage is not None
        or chunk.prompt_token_ids is not None
        or chunk.sglext is not None
        or chunk.verbose is not None
        or (choice := choices[0]).index != 0
        or choice.delta is None
        or (logprobs := choice.logprobs) is None
        or (rows := logprobs.content) is None
        or (named := choice.token_ids) is None
        or not len(rows) == len(named) == 1
        or choice.text is not None
        or choice.finish_reason is not None
        or choice.prompt_token_ids is not None
        or rows[0].token.startswith(TOKEN_ID)
    ):
        return None
    return rows[0]


TakeUsual = Callable[[bytes, int, TokenDraft, list[Piece]], int]
take_usual: TakeUsual
calm: Callable[[bytes], bool]
framed: Callable[[bytes, bytes], bytes | None]
singles: Callable[[bytearray], bytes | None]
compiled: bool
"""Whether the compiled part is at work."""

try:
    # By name: a part that was built from an older source may lack some.
    from rollcage.gateway._wire import calm, framed, singles
    from rollcage.gateway._wire import take_usual as _take_usual
except ImportError:
    take_usual, calm, framed, singles, compiled = python_take_usual, python_calm, python_framed, columns.singles, False
else:

    def take_usual(data: bytes, start: int, tokens: TokenDraft, pieces: list[Piece]) -> int:
        """As `python_take_usual`."""
        at, some, tops = _take_usual(data, start, *tokens.buffers(), pieces)  # type: ignore[arg-type]
        if some:
            tokens.grew(some, tops)
        return at

    compiled = True
