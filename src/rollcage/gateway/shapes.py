"""The wire as typed structs: what completions carry, in every engine's dialect, and nothing we do not keep.

The typed decoder skips what no field names, which makes it several times faster than building dictionaries. What does
not fit (a null where a number belongs, content as a list) is read once more, leniently.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from rollcage.types import JsonObject


class Top(msgspec.Struct, gc=False):
    """One candidate at a position."""

    token: str = ""
    logprob: float | None = None
    id: int | None = None


class TokenEntry(msgspec.Struct, gc=False):
    """One sampled token: OpenAI's shape, with llama.cpp's `id`."""

    token: str = ""
    logprob: float | None = None
    id: int | None = None
    top_logprobs: list[Top] | None = None


class Logprobs(msgspec.Struct, gc=False):
    """Rows for chat; columns for text completions."""

    content: list[TokenEntry] | None = None
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None


class Function(msgspec.Struct, gc=False):
    """The inner part of a tool call."""

    name: str | None = None
    arguments: str | None = None


class CallPiece(msgspec.Struct, gc=False):
    """A tool call or a piece of one."""

    index: int | None = None
    id: str | None = None
    function: Function | None = None


class MessagePiece(msgspec.Struct, gc=False):
    """A message, or what a chunk adds to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[CallPiece] | None = None

    @property
    def thought(self) -> str:
        """Its reasoning. Engines that are moving from one name to the other send both, with the same text."""
        return self.reasoning or self.reasoning_content or ""


class Choice(msgspec.Struct, gc=False):
    """One answer, or a piece of it."""

    index: int | None = 0
    delta: MessagePiece | None = None
    message: MessagePiece | None = None
    text: str | None = None
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Verbose(msgspec.Struct, gc=False):
    """What llama.cpp adds where it is asked to."""

    tokens: list[int] | None = None


class Chunk(msgspec.Struct, gc=False):
    """One event of a stream, or a whole answer."""

    choices: list[Choice] | None = None
    usage: JsonObject | None = None
    prompt_token_ids: list[int] | None = None
    sglext: JsonObject | None = None
    verbose: Verbose | None = msgspec.field(default=None, name="__verbose")
    error: Any = None
    recorded: bool | None = msgspec.field(default=None, name="__recorded")
    """Said by our own model that answers from a record."""


class _Spelled(msgspec.Struct, gc=False):
    bytes: list[int] | None = None


class _SpelledLogprobs(msgspec.Struct, gc=False):
    content: list[_Spelled] | None = None


class _SpelledChoice(msgspec.Struct, gc=False):
    index: int | None = 0
    logprobs: _SpelledLogprobs | None = None


class _SpelledChunk(msgspec.Struct, gc=False):
    choices: list[_SpelledChoice] | None = None


_CHUNK = msgspec.json.Decoder(Chunk)
_PIECE = msgspec.json.Decoder(MessagePiece)
_SPELLED = msgspec.json.Decoder(_SpelledChunk)


def chunk_of(data: bytes) -> Chunk | None:
    """What an event says; None where it is no JSON object (half a line, for one)."""
    if (chunk := chunk_in(data)) is not None:
        return chunk
    value = object_of(data)
    return None if value is None else _lenient(value)


def chunk_in(data: bytes) -> Chunk | None:
    """What an event says; None where it is not as typed, and `chunk_of` may know better."""
    try:
        return _CHUNK.decode(data)
    except (ValueError, RecursionError):
        return None


def piece_of(data: bytes) -> MessagePiece:
    """What a delta brings."""
    try:
        return _PIECE.decode(data)
    except (ValueError, RecursionError):
        return message_piece(object_of(data)) or MessagePiece()


def object_of(data: bytes) -> JsonObject | None:
    """A JSON object, read generously: lone surrogates and bad UTF-8 become U+FFFD; None where it is not one."""
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        try:
            value = _clean(json.loads(data.decode("utf-8", "replace"), parse_constant=lambda _: None))
        except (ValueError, RecursionError):
            return None
    return value if isinstance(value, dict) else None


def spellings(data: bytes) -> list[str]:
    """The texts of choice 0's tokens by their bytes, for entries whose text is a `token_id:`."""
    try:
        choices = _SPELLED.decode(data).choices or ()
    except (ValueError, RecursionError):
        return []
    entries = [entry for c in choices if not c.index and c.logprobs for entry in c.logprobs.content or ()]
    return [bytes(b & 255 for b in e.bytes or ()).decode("utf-8", "replace") for e in entries]


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_clean(each) for each in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(each) for key, each in value.items()}
    return value


def _lenient(value: JsonObject) -> Chunk:
    usage, sglext, verbose = value.get("usage"), value.get("sglext"), value.get("__verbose")
    return Chunk(
        choices=[_choice(each) for each in _objects(value.get("choices"))],
        usage=usage if isinstance(usage, dict) else None,
        prompt_token_ids=_ids(value.get("prompt_token_ids")),
        sglext=sglext if isinstance(sglext, dict) else None,
        verbose=Verbose(_ids(verbose.get("tokens"))) if isinstance(verbose, dict) else None,
        error=value.get("error"),
    )


def _choice(value: JsonObject) -> Choice:
    logprobs = value.get("logprobs")
    return Choice(
        index=_int(value.get("index")),
        delta=message_piece(value.get("delta")),
        message=message_piece(value.get("message")),
        text=_text(value.get("text")),
        logprobs=_logprobs(logprobs) if isinstance(logprobs, dict) else None,
        finish_reason=_text(value.get("finish_reason")),
        token_ids=_ids(value.get("token_ids")),
        response_token_ids=_ids(value.get("response_token_ids")),
        prompt_token_ids=_ids(value.get("prompt_token_ids")),
    )


def message_piece(value: object) -> MessagePiece | None:
    """A message, or what a chunk adds to it, read leniently; None where it is no object."""
    if not isinstance(value, dict):
        return None
    return MessagePiece(
        content=_text(value.get("content")),
        reasoning=_text(value.get("reasoning")),
        reasoning_content=_text(value.get("reasoning_content")),
        refusal=_text(value.get("refusal")),
        tool_calls=[_tool_call(each) for each in _objects(value.get("tool_calls"))],
    )


def _tool_call(value: JsonObject) -> CallPiece:
    function = value.get("function")
    inner = function if isinstance(function, dict) else {}
    arguments = inner.get("arguments")
    if arguments is not None and not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return CallPiece(
        index=_int(value.get("index")),
        id=_text(value.get("id")),
        function=Function(name=_text(inner.get("name")), arguments=arguments),
    )


def _logprobs(value: JsonObject) -> Logprobs:
    try:
        return msgspec.convert(value, Logprobs)
    except (ValueError, RecursionError):
        content = [_entry(each) for each in _objects(value.get("content"))]
        return Logprobs(content=content or None)


def _entry(value: JsonObject) -> TokenEntry:
    others = _objects(value.get("top_logprobs"))
    top = [Top(_text(each.get("token")) or "", _float(each.get("logprob")), _int(each.get("id"))) for each in others]
    return TokenEntry(_text(value.get("token")) or "", _float(value.get("logprob")), _int(value.get("id")), top)


def _objects(value: object) -> list[JsonObject]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: object) -> str | None:
    if isinstance(value, list):  # content parts
        return "".join(_text(part.get("text")) or "" for part in _objects(value))
    return value if isinstance(value, str) else None


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < 1e300 else None


def _ids(value: object) -> list[int] | None:
    if not isinstance(value, list):
        return None
    ids = [each for each in value if isinstance(each, int) and not isinstance(each, bool)]
    return ids if len(ids) == len(value) else None
