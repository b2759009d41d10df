"""Reads entries of older logs: each is brought from the version it was written in to today's. Pure.

Entries are never changed on the disk. An entry has the version of the code that wrote it; `UPCASTS[n - 1]` leads from
version n to n + 1, by the kind of event. Never edit one that was released, add one: that is why the words of agents
stand here once more, as version 1 had them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeGuard

from rollcage.json_safe import json_safe
from rollcage.types import JsonObject

Upcast = Callable[[JsonObject], JsonObject]
"""An event's JSON as the next version has it; what it is given is shared, and not to be touched."""


def _agent_said(body: JsonObject) -> JsonObject:
    """Version 1 kept what every agent said in the words of OpenCode."""
    data = _table(body.get("data"))
    return {"kind": "agent_event", "event": _agent_event(data), "raw": data}


def _noticed(body: JsonObject) -> JsonObject:
    return {**body, "kind": "suspicion"}


def _ended(body: JsonObject) -> JsonObject:
    """Version 1 called it a success whenever the agent ended by itself, whatever it earned."""
    return {**body, "outcome": "finished"} if body.get("outcome") == "succeeded" else body


UPCASTS: tuple[Mapping[str, Upcast], ...] = ({"agent_said": _agent_said, "noticed": _noticed, "ended": _ended},)
"""By version, then by kind. A kind that is not named is the same in the next version."""
VERSION = len(UPCASTS) + 1
"""What is written today."""
FORMER: Mapping[str, tuple[str, ...]] = {"agent_event": ("agent_said",), "suspicion": ("noticed",)}
"""What kinds of event were called before: by these names the file still knows them."""


def upcast(body: JsonObject, version: int) -> JsonObject:
    """An entry's event, written in this version, as today's code reads it."""
    for table in UPCASTS[version - 1 :]:
        if change := table.get(str(body.get("kind"))):
            body = change(body)
    return body


def with_former(kinds: Iterable[str]) -> list[str]:
    """The kinds by all the names that entries have for them."""
    return [name for kind in kinds for name in (kind, *FORMER.get(kind, ()))]


_FINAL = ("step_start", "text", "reasoning", "tool_use", "step_finish")
_TOOL_KINDS = {"bash": "execute", "read": "read", "glob": "search", "grep": "search", "webfetch": "fetch"}
_TOOL_KINDS |= dict.fromkeys(("edit", "write", "apply_patch"), "edit")
_TELLING = ("command", "filePath", "pattern", "url", "description", "path")


def _agent_event(data: JsonObject) -> JsonObject:
    part, kind = _table(data.get("part")), data.get("type")
    place: JsonObject = {
        "session": _text(data.get("sessionID"))[:200],
        "message": _text(part.get("messageID") or data.get("messageID")),
        "id": _text(part.get("id") or data.get("partID")),
    }
    match kind:
        case "session":
            return {**place, "type": "session"}
        case "note" | "delta":
            return {**place, "type": kind, "text": _text(data.get("text"))}
        case "stdout" | "stderr":
            return {**place, "type": "output", "stream": kind, "text": _text(data.get("text"))}
        case "error":
            error = _table(data.get("error"))
            text = _table(error.get("data")).get("message") or error.get("message")
            return {**place, "type": "error", "name": _text(error.get("name")), "text": _text(text)}
        case _:
            return place | _part_event(part, kind)


def _part_event(part: JsonObject, kind: Any) -> JsonObject:
    final = kind in _FINAL
    match part.get("type") or (kind if final else None):
        case "text":
            # The user's words came at once; those of the agent had a beginning in time.
            role = "assistant" if final or "time" in part else "user"
            return {"type": "text", "text": _text(part.get("text")), "role": role, "final": final}
        case "reasoning":
            return {"type": "reasoning", "text": _text(part.get("text")), "final": final}
        case "tool" | "tool_use":
            return _tool_call(part)
        case "step-finish":
            return _usage(part)
        case other:
            return {"type": "raw", "name": _text(other or kind)}


def _tool_call(part: JsonObject) -> JsonObject:
    state, name = _table(part.get("state")), _text(part.get("tool"))
    asked, metadata, spent = (_table(state.get(key)) for key in ("input", "metadata", "time"))
    arguments, status, code = json_safe(asked), state.get("status"), metadata.get("exit")
    start, end = spent.get("start"), spent.get("end")
    return {
        "type": "tool_call",
        "call_id": _text(part.get("callID")),
        "name": name,
        "kind": _TOOL_KINDS.get(name, "other"),
        "title": next((arguments[key] for key in _TELLING if isinstance(arguments.get(key), str)), ""),
        "arguments": arguments,
        "status": status if status in ("pending", "running", "error") else "completed",
        "result": _text(state.get("output")),
        "error": _text(state.get("error")) if status == "error" else "",
        "exit_code": code if _is_count(code) else None,
        "seconds": (end - start) / 1000 if _is_count(start) and _is_count(end) else None,
        "edits": _edits(name, arguments),
    }


def _edits(tool: str, arguments: JsonObject) -> list[JsonObject]:
    path, old, new, content, patch = (
        _text(arguments.get(key)) for key in ("filePath", "oldString", "newString", "content", "patchText")
    )
    if tool == "edit" and (old or new):
        return [{"path": path, "removed": old, "added": new}]
    if tool == "write" and content:
        return [{"path": path, "change": "write", "added": content}]
    return [{"diff": patch}] if tool == "apply_patch" and patch else []


def _usage(part: JsonObject) -> JsonObject:
    tokens = _table(part.get("tokens"))
    counts = {f"{name}_tokens": _count(tokens.get(name)) for name in ("input", "output", "reasoning")}
    cached = _count(_table(tokens.get("cache")).get("read"))
    return {"type": "usage", **counts, "cached_tokens": cached, "finish_reason": _text(part.get("reason"))}


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53


def _count(value: Any) -> int:
    return int(value) if _is_count(value) else 0


def _table(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(json_safe(value if isinstance(value, str) else json.dumps(json_safe(value))))
