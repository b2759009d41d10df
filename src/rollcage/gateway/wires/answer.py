"""Reads a chat answer, whole or chunk by chunk, however oddly it is cut: what both translations build on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rollcage.gateway.wires.base import dict_or_empty, text_or_none
from rollcage.types import JsonObject

MALFORMED = "malformed_arguments"
"""Where arguments that are no JSON object are kept: engines and agents alike demand an object."""


@dataclass(eq=False)
class Call:
    """A tool call in the making."""

    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """What the model wrote so far."""
        return "".join(self.pieces)


class Delta(NamedTuple):
    """What a chunk added."""

    reasoning: str
    text: str
    calls: list[tuple[Call, str]]
    """The calls it touched, with the new part of their arguments (may be empty)."""


class Tokens(NamedTuple):
    """What the engine counted."""

    prompt: int
    cached: int
    """Of the prompt."""
    completion: int
    reasoning: int
    """Of the completion."""


class Answer:
    """An answer as it comes in."""

    def __init__(self) -> None:
        self.id = ""
        """Makes names for calls that the engine left without one."""
        self.calls: list[Call] = []
        self.finish_reason: str | None = None
        self.stop: str | None = None
        """The stop word that ended it, where the engine tells."""
        self._usage: JsonObject | None = None
        self._at: dict[int, Call] = {}

    @property
    def tokens(self) -> Tokens | None:
        """The engine's own count; null until it has told."""
        usage = self._usage
        if usage is None:
            return None
        prompt, completion = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
        cached = _count(dict_or_empty(usage.get("prompt_tokens_details")), "cached_tokens")
        reasoning = _count(dict_or_empty(usage.get("completion_tokens_details")), "reasoning_tokens")
        return Tokens(prompt, min(cached, prompt), completion, min(reasoning, completion))

    def add(self, chunk: JsonObject) -> Delta:
        """Take in one chunk, or a whole completion."""
        if isinstance(usage := chunk.get("usage"), dict):
            self._usage = usage
        choice = _first_choice(chunk.get("choices"))
        if reason := text_or_none(choice.get("finish_reason")):
            self.finish_reason = reason
        if stop := text_or_none(choice.get("stop_reason")) or text_or_none(choice.get("matched_stop")):
            self.stop = stop
        whole = isinstance(choice.get("message"), dict)
        message = choice["message"] if whole else dict_or_empty(choice.get("delta"))
        # Engines that are moving from one name to the other send both, with the same text.
        reasoning = _text(message.get("reasoning")) or _text(message.get("reasoning_content"))
        text = _text(message.get("content")) + _text(message.get("refusal"))
        pieces = message.get("tool_calls")
        calls = [
            self._add_call(piece, whole)
            for piece in (pieces if isinstance(pieces, list) else ())
            if isinstance(piece, dict)
        ]
        return Delta(reasoning, text, calls)

    def settle(self, call: Call) -> Call:
        """Give a call that is about to be shown an id of its own, if the engine gave it none or gave it twice."""
        place = self.calls.index(call)
        if not call.id or any(other.id == call.id for other in self.calls[:place]):
            call.id = f"{call.id or f'call_{self.id}'}_{place}"
        return call

    def _add_call(self, piece: JsonObject, whole: bool) -> tuple[Call, str]:
        function = dict_or_empty(piece.get("function"))
        id, name = text_or_none(piece.get("id")) or "", text_or_none(function.get("name")) or ""
        arguments = function.get("arguments")
        if arguments is None:
            arguments = ""
        elif not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        call = self._new() if whole else self._call_for(piece.get("index"), id, name)
        call.id = call.id or id
        if name.startswith(call.name):  # the first time, or told again in full
            call.name = name
        elif not call.name.endswith(name):
            call.name += name
        if arguments:
            call.pieces.append(arguments)
        return call, arguments

    def _call_for(self, index: object, id: str, name: str) -> Call:
        if isinstance(index, int):
            call = self._at.get(index)
            # Some servers number every call 0 and tell them apart by id alone. An id without a name proves nothing:
            # some give each piece of one call an id of its own.
            if call is None or (id and name and call.id and id != call.id):
                call = self._at[index] = self._new()
            return call
        if id:
            return next((call for call in self.calls if call.id == id), None) or self._new()
        last = self.calls[-1] if self.calls else self._new()
        if name and last.name and (name != last.name or object_in(last.arguments) is not None):
            return self._new()
        return last

    def _new(self) -> Call:
        self.calls.append(Call())
        return self.calls[-1]


def object_in(arguments: str) -> JsonObject | None:
    """The JSON object that a call's arguments are; null where they are none."""
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def arguments_text(arguments: str) -> str:
    """Arguments that are a JSON object for sure: as they are, `{}` for none, or wrapped for what is no object."""
    if not arguments.strip():
        return "{}"
    return arguments if object_in(arguments) is not None else spelled({MALFORMED: arguments})


def spelled(value: object) -> str:
    """JSON with a space after each comma and colon, as chat templates and thus models write it."""
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _first_choice(choices: object) -> JsonObject:
    """The choice that counts: agents ask for one."""
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and not choice.get("index"):
            return choice
    return {}


def _text(value: object) -> str:
    if isinstance(value, list):  # content parts
        return "".join(_text(part.get("text")) for part in value if isinstance(part, dict))
    return value if isinstance(value, str) else ""


def _count(usage: JsonObject, name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
