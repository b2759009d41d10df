"""Messages of a turn in the shape that the GenAI conventions give them; sent only where contents are asked for."""

from __future__ import annotations

import json
from typing import Any

from rollcage.types import JsonObject, Turn

LONGEST = 100_000
"""Characters of one attribute. Of a longer conversation its latest messages are kept, of a longer text its start."""


def contents_of(turn: Turn) -> dict[str, str]:
    """What the model was asked and what it answered, as attributes."""
    messages = _objects(turn.request.get("messages"))
    system = [message for message in messages if message.get("role") in ("system", "developer")]
    asked = [_message(message) for message in messages if message not in system]
    found = {"gen_ai.input.messages": _latest(asked)}
    if system:
        parts = [part for message in system for part in _texts(message.get("content"))]
        found["gen_ai.system_instructions"] = _latest(parts)
    if tools := _objects(turn.request.get("tools")):
        found["gen_ai.tool.definitions"] = shortened(json.dumps(tools))
    if turn.message:
        answer = {**_message({"role": "assistant", **turn.message}), "finish_reason": turn.finish_reason or ""}
        found["gen_ai.output.messages"] = _latest([answer])
    return found


def shortened(text: str) -> str:
    """Its beginning, where it is too long for an attribute."""
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({len(text):,} characters)"


def _latest(items: list[JsonObject]) -> str:
    """As JSON that can be read, whatever has to be left out."""
    kept: list[JsonObject] = []
    room = LONGEST
    for item in reversed(items):
        room -= len(json.dumps(item))
        if room < 0:
            kept.append({"role": "system", "parts": _texts(f"({len(items) - len(kept)} earlier ones are left out)")})
            break
        kept.append(item)
    return json.dumps(kept[::-1])


def _message(message: JsonObject) -> JsonObject:
    role = message.get("role")
    if role == "tool":
        response = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message.get("content")}
        return {"role": "tool", "parts": [response]}
    parts: list[JsonObject] = [
        {"type": "reasoning", "content": text}
        for name in ("reasoning_content", "reasoning")
        if isinstance(text := message.get(name), str) and text
    ][:1]
    parts += _texts(message.get("content"))
    for call in _objects(message.get("tool_calls")):
        function = call.get("function") if isinstance(call.get("function"), dict) else {}
        said = {"name": function.get("name"), "arguments": function.get("arguments")} if function else {}
        parts.append({"type": "tool_call", "id": call.get("id"), **said})
    return {"role": role, "parts": parts}


def _texts(content: Any) -> list[JsonObject]:
    if isinstance(content, str):
        return [{"type": "text", "content": content}] if content else []
    return [
        {"type": "text", "content": part["text"]} if isinstance(part.get("text"), str) else part
        for part in _objects(content)
    ]


def _objects(value: Any) -> list[JsonObject]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
