"""Assembles an assistant message from the pieces a stream brings, however oddly they are cut."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from rollcage.gateway.shapes import Delta, ToolCall
from rollcage.types import JsonObject


@dataclass
class _Call:
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def complete(self) -> bool:
        """Whether the arguments so far are a whole JSON object."""
        try:
            return isinstance(msgspec.json.decode("".join(self.arguments)), dict)
        except (ValueError, RecursionError):
            return False


class Message:
    """An assistant message in the making."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._refusal: list[str] = []
        self._calls: list[_Call] = []
        self._at: dict[int, _Call] = {}

    def add(self, delta: Delta) -> None:
        """Append what a chunk brings (or a whole message, which is one big delta)."""
        if delta.content:
            self._content.append(delta.content)
        # Engines that are moving from one name to the other send both, with the same text.
        if reasoning := delta.reasoning or delta.reasoning_content:
            self._reasoning.append(reasoning)
        if delta.refusal:
            self._refusal.append(delta.refusal)
        for piece in delta.tool_calls or ():
            self._add_call(piece)

    def add_text(self, text: str) -> None:
        """Append to the content (text completions)."""
        self._content.append(text)

    def value(self) -> JsonObject:
        """The message as it stands, in OpenAI's shape; reasoning is `reasoning_content` whatever its engine's name."""
        message: JsonObject = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._refusal:
            message["refusal"] = "".join(self._refusal)
        if self._calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": "".join(c.arguments)}}
                for c in self._calls
            ]
        return message

    def _add_call(self, piece: ToolCall) -> None:
        name = (piece.function and piece.function.name) or ""
        call = self._call_for(piece, name)
        if piece.id and not call.id:
            call.id = piece.id
        if name.startswith(call.name):  # the first time, or told again in full
            call.name = name
        elif name and not call.name.endswith(name):
            call.name += name
        if piece.function and piece.function.arguments:
            call.arguments.append(piece.function.arguments)

    def _call_for(self, piece: ToolCall, name: str) -> _Call:
        if piece.index is not None:
            call = self._at.get(piece.index)
            # Some servers number every call 0 and tell them apart by id alone. An id without a name proves nothing:
            # vLLM once gave each piece of one call an id of its own.
            if call is None or (piece.id and name and call.id and piece.id != call.id):
                call = self._at[piece.index] = self._new()
            return call
        if piece.id:
            known = next((call for call in self._calls if call.id == piece.id), None)
            return known or self._new()
        last = self._calls[-1] if self._calls else self._new()
        if name and last.name and (name != last.name or last.complete()):
            return self._new()
        return last

    def _new(self) -> _Call:
        self._calls.append(_Call())
        return self._calls[-1]
