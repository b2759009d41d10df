"""Chat chunks for tests, as engines send them."""

from __future__ import annotations

from typing import Any

from rollcage.types import JsonObject

HEAD: JsonObject = {"id": "chatcmpl-9f", "object": "chat.completion.chunk", "created": 1_700_000_000, "model": "engine"}


def chunk(**delta: Any) -> JsonObject:
    """A chunk that adds this."""
    choice = {"index": 0, "delta": delta, "logprobs": {"content": []}, "finish_reason": None, "token_ids": [1]}
    return {**HEAD, "choices": [choice]}


def finish(reason: str, **extra: Any) -> JsonObject:
    """The chunk that ends an answer."""
    return {**HEAD, "choices": [{"index": 0, "delta": {}, "finish_reason": reason, **extra}]}


def usage(prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0) -> JsonObject:
    """The chunk that counts."""
    return {**HEAD, "choices": [], "usage": counted(prompt, completion, cached=cached, reasoning=reasoning)}


def counted(prompt: int, completion: int, *, cached: int = 0, reasoning: int = 0) -> JsonObject:
    """Usage as engines tell it."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached} if cached else None,
        "completion_tokens_details": {"reasoning_tokens": reasoning} if reasoning else None,
    }


def call_piece(
    index: int | None, *, id: str | None = None, name: str | None = None, arguments: str | None = None
) -> JsonObject:
    """A piece of a tool call."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    piece: JsonObject = {"function": function}
    if index is not None:
        piece["index"] = index
    return {**piece, "id": id, "type": "function"} if id is not None else piece


def completion(message: JsonObject, reason: str = "stop", **extra: Any) -> JsonObject:
    """A whole answer."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": reason}
    return {**HEAD, "object": "chat.completion", "choices": [choice], **extra}
