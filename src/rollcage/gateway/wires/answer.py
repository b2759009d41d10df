"""Reads a chat answer, whole or chunk by chunk, however oddly it is cut: what both translations build on."""

from __future__ import annotations

import json
from typing import NamedTuple

from rollcage.gateway.message import CallDraft, MessageDraft, object_in
from rollcage.gateway.shapes import MessagePiece, message_piece
from rollcage.gateway.wires.base import dict_or_empty, text_or_none
from rollcage.types import JsonObject

MALFORMED = "malformed_arguments"
"""Where arguments that are no JSON object are kept: engines and agents alike demand an object."""


class Added(NamedTuple):
    """What a chunk added."""

    reasoning: str
    text: str
    calls: list[tuple[CallDraft, str]]
    """The calls it touched, with the new part of their arguments (may be empty)."""


class Tokens(NamedTuple):
    """What the engine counted."""

    prompt: int
    cached: int
    """Of the prompt."""
    completion: int
    reasoning: int
    """Of the completion."""


class ChatAnswer:
    """An answer as it comes in."""

    def __init__(self) -> None:
        self.id = ""
        """Makes names for calls that the engine left without one."""
        self.finish_reason: str | None = None
        self.stop: str | None = None
        """The stop word that ended it, where the engine tells."""
        self._message = MessageDraft()
        self._usage: JsonObject | None = None

    @property
    def calls(self) -> list[CallDraft]:
        """The tool calls so far."""
        return self._message.calls

    @property
    def tokens(self) -> Tokens | None:
        """The engine's own count; None until it has told."""
        usage = self._usage
        if usage is None:
            return None
        prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        cached = _count(dict_or_empty(usage.get("prompt_tokens_details")), "cached_tokens")
        reasoning = _count(dict_or_empty(usage.get("completion_tokens_details")), "reasoning_tokens")
        return Tokens(prompt, min(cached, prompt), completion, min(reasoning, completion))

    def add(self, chunk: JsonObject) -> Added:
        """Take in one chunk, or a whole completion."""
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        choice = _first_choice(chunk.get("choices"))
        if reason := text_or_none(choice.get("finish_reason")):
            self.finish_reason = reason
        if stop := text_or_none(choice.get("stop_reason")) or text_or_none(choice.get("matched_stop")):
            self.stop = stop
        whole = message_piece(choice.get("message"))
        piece = whole or message_piece(choice.get("delta")) or MessagePiece()
        calls = self._message.add(piece, whole=whole is not None)
        return Added(piece.thought, (piece.content or "") + (piece.refusal or ""), calls)

    def settle(self, call: CallDraft) -> CallDraft:
        """Give a call that is about to be shown an id of its own, if the engine gave it none or gave it twice."""
        place = self.calls.index(call)
        if not call.id or any(other.id == call.id for other in self.calls[:place]):
            call.id = f"{call.id or f'call_{self.id}'}_{place}"
        return call


def arguments_text(arguments: str) -> str:
    """Arguments that are a JSON object for sure: as they are, `{}` for none, or wrapped for what is no object."""
    if not arguments.strip():
        return "{}"
    return arguments if object_in(arguments) is not None else spelled({MALFORMED: arguments})


def spelled(value: object) -> str:
    """JSON with a space after each comma and colon, as chat templates and thus models write it."""
    return json.dumps(value, ensure_ascii=False)


def _first_choice(choices: object) -> JsonObject:
    """The choice that counts: agents ask for one."""
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and not choice.get("index"):
            return choice
    return {}


def _count(usage: JsonObject, name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
