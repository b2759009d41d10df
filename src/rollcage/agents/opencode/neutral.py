"""OpenCode's own events in the neutral words of `AgentEvent`. Pure; never trusts the shape of what comes out of a box.

The vocabulary is described in `transcript.py`.
"""

from __future__ import annotations

from typing import Any, Literal

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
from rollcage.agents.fields import count, is_number, table, text
from rollcage.agents.opencode.transcript import FINISHED
from rollcage.agents.tool_calls import ToolKind, edits_of, title_of
from rollcage.json_safe import json_safe
from rollcage.sandboxes.base import CapturedOutput
from rollcage.types import JsonObject

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
_LOGGED = "timestamp="


def event_of(data: JsonObject, *, by_user: bool = False) -> AgentEvent:
    """One event of OpenCode's. `by_user`: its part belongs to a message of the user's."""
    part, kind = table(data.get("part")), data.get("type")
    place = {
        "session": text(data.get("sessionID"))[:200],
        "message": text(part.get("messageID") or data.get("messageID")),
        "id": text(part.get("id") or data.get("partID")),
    }
    match kind:
        case "session":
            return AgentSession(**place)
        case "note":
            return AgentNote(**place, text=text(data.get("text")))
        case "delta":
            return AgentDelta(**place, text=text(data.get("text")))
        case "stdout":
            return AgentOutput(**place, text=text(data.get("text")))
        case "error":
            return _error(place, data.get("error"))
        case _ if part:
            return _part(place, part, final=kind in FINISHED.values(), by_user=by_user)
        case _:
            return AgentRaw(**place, name=text(kind))


def _part(place: dict[str, str], part: JsonObject, *, final: bool, by_user: bool) -> AgentEvent:
    match part.get("type"):
        case "text":
            role: Literal["user", "assistant"] = "user" if by_user else "assistant"
            return AgentText(**place, text=text(part.get("text")), role=role, final=final)
        case "reasoning":
            return AgentReasoning(**place, text=text(part.get("text")), final=final)
        case "tool":
            return _tool_call(place, part)
        case "step-finish":
            return _usage(place, part)
        case other:
            return AgentRaw(**place, name=text(other))


def _tool_call(place: dict[str, str], part: JsonObject) -> AgentToolCall:
    state, name = table(part.get("state")), text(part.get("tool"))
    arguments = json_safe(table(state.get("input")))
    code, spent = table(state.get("metadata")).get("exit"), table(state.get("time"))
    start, end, status = spent.get("start"), spent.get("end"), state.get("status")
    return AgentToolCall(
        **place,
        call_id=text(part.get("callID")),
        name=name,
        kind=TOOL_KINDS.get(name, "other"),
        title=title_of(arguments) or text(state.get("title")),
        arguments=arguments,
        status=status if status in ("pending", "running", "error") else "completed",
        result=text(state.get("output")),
        error=text(state.get("error")) if status == "error" else "",
        exit_code=code if is_number(code) and isinstance(code, int) else None,
        seconds=(end - start) / 1000 if is_number(start) and is_number(end) else None,
        edits=_edits(name, arguments, table(state.get("metadata"))),
    )


def _edits(tool: str, arguments: JsonObject, metadata: JsonObject) -> tuple[AgentFileEdit, ...]:
    if tool == "apply_patch" and (patch := text(arguments.get("patchText"))):
        return (AgentFileEdit(diff=patch),)
    edits, diff = edits_of(arguments), text(metadata.get("diff"))
    if tool == "edit":
        return tuple(edit.model_copy(update={"diff": diff}) for edit in edits)
    return edits if tool == "write" else ()


def _usage(place: dict[str, str], part: JsonObject) -> AgentUsage:
    tokens, cost = table(part.get("tokens")), part.get("cost")
    return AgentUsage(
        **place,
        input_tokens=count(tokens.get("input")),
        output_tokens=count(tokens.get("output")),
        reasoning_tokens=count(tokens.get("reasoning")),
        cached_tokens=count(table(tokens.get("cache")).get("read")),
        cost=float(cost) if is_number(cost) else 0.0,
        finish_reason=text(part.get("reason")),
    )


def _error(place: dict[str, str], error: Any) -> AgentReportedError:
    if not isinstance(error, dict):
        return AgentReportedError(**place, text=text(error))
    message = table(error.get("data")).get("message") or error.get("message")
    return AgentReportedError(**place, name=text(error.get("name")), text=text(message))


def error_line(error: Any) -> str:
    """An error of OpenCode's own, in one line."""
    if not isinstance(error, dict):
        return str(error)
    data = error.get("data")
    message = data.get("message") if isinstance(data, dict) else None
    return f"{error.get('name', 'error')}: {message or ''}".strip(": ")


def complaint_in(printed: CapturedOutput) -> str:
    """The last line of what it printed to stderr that is not of its log."""
    whole = printed.text.splitlines()[1 if printed.truncated else 0 :]
    lines = [line for line in whole if line.strip() and not line.startswith(_LOGGED)]
    return lines[-1].strip() if lines else ""
