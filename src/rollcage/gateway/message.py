"""Puts an assistant message together, from a whole answer or from pieces, however oddly they are cut. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from rollcage.gateway.shapes import CallPiece, MessagePiece
from rollcage.types import JsonObject


@dataclass(eq=False)
class CallDraft:
    """A tool call in the making."""

    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        """What the model wrote so far."""
        return "".join(self.pieces)

    def value(self) -> JsonObject:
        """The call as it stands, in OpenAI's shape."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class MessageDraft:
    """An assistant message in the making."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self.calls: list[CallDraft] = []
        """The tool calls so far."""
        self._at: dict[int, CallDraft] = {}

    def add(self, piece: MessagePiece, *, whole: bool = False) -> list[tuple[CallDraft, str]]:
        """Append what a chunk brings, or a `whole` message.

        Returns the calls it touched, each with the new part of its arguments (may be empty).
        """
        if piece.content:
            self._content.append(piece.content)
        if thought := piece.reasoning or piece.reasoning_content:  # not by `thought`: this runs once per chunk
            self._reasoning.append(thought)
        if piece.refusal:
            self._refusal.append(piece.refusal)
        return [self._add_call(each, whole) for each in piece.tool_calls] if piece.tool_calls else []

    def add_text(self, text: str) -> None:
        """Append to the content (text completions)."""
        self._content.append(text)

    def spoken(self) -> tuple[str, str, str]:
        """Content, reasoning, and the names and arguments of calls, so far."""
        calls = [f"{call.name} {call.arguments}" if call.name else call.arguments for call in self.calls]
        return "".join(self._content), "".join(self._reasoning), "".join(calls)

    def value(self) -> JsonObject:
        """The message as it stands, in OpenAI's shape; reasoning is `reasoning_content` whatever its engine's name."""
        message: JsonObject = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._refusal:
            message["refusal"] = "".join(self._refusal)
        if self.calls:
            message["tool_calls"] = [call.value() for call in self.calls]
        return message

    def _add_call(self, piece: CallPiece, whole: bool) -> tuple[CallDraft, str]:
        name = (piece.function and piece.function.name) or ""
        arguments = (piece.function and piece.function.arguments) or ""
        call = self._new() if whole else self._call_for(piece, name)
        call.id = call.id or piece.id or ""
        if name.startswith(call.name):  # the first time, or told again in full
            call.name = name
        elif not call.name.endswith(name):
            call.name += name
        if arguments:
            call.pieces.append(arguments)
        return call, arguments

    def _call_for(self, piece: CallPiece, name: str) -> CallDraft:
        if piece.index is not None:
            call = self._at.get(piece.index)
            # Some servers number every call 0 and tell them apart by id alone. An id without a name proves nothing:
            # vLLM once gave each piece of one call an id of its own.
            if call is None or (piece.id and name and call.id and piece.id != call.id):
                call = self._at[piece.index] = self._new()
            return call
        if piece.id:
            return next((call for call in self.calls if call.id == piece.id), None) or self._new()
        last = self.calls[-1] if self.calls else self._new()
        if name and last.name and (name != last.name or object_in(last.arguments) is not None):
            return self._new()
        return last

    def _new(self) -> CallDraft:
        self.calls.append(CallDraft())
        return self.calls[-1]


def object_in(arguments: str) -> JsonObject | None:
    """The JSON object that a call's arguments are; None where they are not one."""
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
