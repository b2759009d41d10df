"""OpenCode's own events in the neutral words of `AgentEvent`. Pure; never trusts the shape of what comes out of a box.

The vocabulary is described in `transcript.py`.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeGuard

from rollcage.agent_events import (
    AgentDelta,
    AgentEvent,
    AgentFileEdit,
    AgentNote,
    AgentOutput,
    AgentRaw,
    AgentReasoning,
    AgentReportedError,
    AgentSession,
    AgentText,
    AgentToolCall,
    AgentUsage,
)
from rollcage.agents.opencode.transcript import FINISHED
from rollcage.json_safe import json_safe
from rollcage.types import JsonObject

ToolKind = Literal["execute", "read", "edit", "search", "fetch", "other"]
TOOL_KINDS: dict[str, ToolKind] = {
    "bash": "execute",
    "read": "read",
    "edit": "edit",
    "write": "edit",
    "apply_patch": "edit",
    "glob": "search",
    "grep": "search",
    "webfetch": "fetch",
}
_TELLING = ("command", "filePath", "pattern", "url", "description", "path")
"""Arguments that say what a call is about, the most telling first."""


def event_of(data: JsonObject, *, by_user: bool = False) -> AgentEvent:
    """One event of OpenCode's. `by_user`: its part belongs to a message of the user's."""
    part, kind = _table(data.get("part")), data.get("type")
    place = {
        "session": _text(data.get("sessionID"))[:200],
        "message": _text(part.get("messageID") or data.get("messageID")),
        "id": _text(part.get("id") or data.get("partID")),
    }
    match kind:
        case "session":
            return AgentSession(**place)
        case "note":
            return AgentNote(**place, text=_text(data.get("text")))
        case "delta":
            return AgentDelta(**place, text=_text(data.get("text")))
        case "stdout":
            return AgentOutput(**place, text=_text(data.get("text")))
        case "error":
            return _error(place, data.get("error"))
        case _ if part:
            return _part(place, part, final=kind in FINISHED.values(), by_user=by_user)
        case _:
            return AgentRaw(**place, name=_text(kind))


def _part(place: dict[str, str], part: JsonObject, *, final: bool, by_user: bool) -> AgentEvent:
    match part.get("type"):
        case "text":
            role: Literal["user", "assistant"] = "user" if by_user else "assistant"
            return AgentText(**place, text=_text(part.get("text")), role=role, final=final)
        case "reasoning":
            return AgentReasoning(**place, text=_text(part.get("text")), final=final)
        case "tool":
            return _tool_call(place, part)
        case "step-finish":
            return _usage(place, part)
        case other:
            return AgentRaw(**place, name=_text(other))


def _tool_call(place: dict[str, str], part: JsonObject) -> AgentToolCall:
    state, name = _table(part.get("state")), _text(part.get("tool"))
    arguments = json_safe(_table(state.get("input")))
    code, spent = _table(state.get("metadata")).get("exit"), _table(state.get("time"))
    start, end, status = spent.get("start"), spent.get("end"), state.get("status")
    return AgentToolCall(
        **place,
        call_id=_text(part.get("callID")),
        name=name,
        kind=TOOL_KINDS.get(name, "other"),
        title=_title(arguments) or _text(state.get("title")),
        arguments=arguments,
        status=status if status in ("pending", "running", "error") else "completed",
        result=_text(state.get("output")),
        error=_text(state.get("error")) if status == "error" else "",
        exit_code=code if _is_number(code) and isinstance(code, int) else None,
        seconds=(end - start) / 1000 if _is_number(start) and _is_number(end) else None,
        edits=_edits(name, arguments, _table(state.get("metadata"))),
    )


def _edits(tool: str, arguments: JsonObject, metadata: JsonObject) -> tuple[AgentFileEdit, ...]:
    path, old, new = (_text(arguments.get(name)) for name in ("filePath", "oldString", "newString"))
    if tool == "edit" and (old or new):
        return (AgentFileEdit(path=path, removed=old, added=new, diff=_text(metadata.get("diff"))),)
    if tool == "write" and (content := _text(arguments.get("content"))):
        return (AgentFileEdit(path=path, change="write", added=content),)
    if tool == "apply_patch" and (patch := _text(arguments.get("patchText"))):
        return (AgentFileEdit(diff=patch),)
    return ()


def _title(arguments: JsonObject) -> str:
    return next((value for name in _TELLING if isinstance(value := arguments.get(name), str) and value), "")


def _usage(place: dict[str, str], part: JsonObject) -> AgentUsage:
    tokens, cost = _table(part.get("tokens")), part.get("cost")
    return AgentUsage(
        **place,
        input_tokens=_count(tokens.get("input")),
        output_tokens=_count(tokens.get("output")),
        reasoning_tokens=_count(tokens.get("reasoning")),
        cached_tokens=_count(_table(tokens.get("cache")).get("read")),
        cost=float(cost) if _is_number(cost) else 0.0,
        finish_reason=_text(part.get("reason")),
    )


def _error(place: dict[str, str], error: Any) -> AgentReportedError:
    if not isinstance(error, dict):
        return AgentReportedError(**place, text=_text(error))
    text = _table(error.get("data")).get("message") or error.get("message")
    return AgentReportedError(**place, name=_text(error.get("name")), text=_text(text))


def error_line(error: Any) -> str:
    """An error of OpenCode's own, in one line."""
    if not isinstance(error, dict):
        return str(error)
    data = error.get("data")
    message = data.get("message") if isinstance(data, dict) else None
    return f"{error.get('name', 'error')}: {message or ''}".strip(": ")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 53


def _count(value: Any) -> int:
    return int(value) if _is_number(value) and value > 0 else 0


def _table(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    if value is None:
        return ""
    return str(json_safe(value if isinstance(value, str) else json.dumps(json_safe(value))))
