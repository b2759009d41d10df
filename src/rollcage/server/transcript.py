"""A rollout's transcript, folded from its log: messages with their parts, `[{info, parts}]`. Pure.

An agent that has a transcript of its own shape makes it from its own events (`HasTranscript`); that of any other agent
is made here from its neutral events, in the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollcage.agent_events import (
    AgentDelta,
    AgentEvent,
    AgentFileEdit,
    AgentOutput,
    AgentReasoning,
    AgentReportedError,
    AgentText,
    AgentToolCall,
)
from rollcage.agents.base import HasTranscript
from rollcage.events import AgentEmitted, Entry, Queued, Requeued
from rollcage.schema.views import Message
from rollcage.types import JsonObject

KINDS = ("queued", "requeued", "agent_event")
"""The entries a transcript is made of."""


def transcript_of(entries: Iterable[Entry], agents: Mapping[str, object]) -> list[Message]:
    """The messages so far, oldest first, the instruction included. `agents`: those known here, by name."""
    instruction, agent, emitted = "", "", list[AgentEmitted]()
    for entry in entries:
        match entry.event:
            case Queued(job=job):
                instruction, agent = job.task.instruction, job.agent.name
            case Requeued():
                emitted = []
            case AgentEmitted():
                emitted.append(entry.event)
            case _:
                pass
    events = [one.event for one in emitted]
    known = agents.get(agent)
    if isinstance(known, HasTranscript):
        rows = known.transcript([one.raw for one in emitted if one.raw is not None], instruction)
    else:
        rows = messages_of(events, instruction)
    return [Message(**row) for row in (*rows, *_printed(events))]


def messages_of(events: Sequence[AgentEvent], instruction: str) -> list[JsonObject]:
    """The messages of the agent's own session as they began, each with its parts in the order of their names."""
    session = next((event.session for event in events if event.session), "")
    messages: dict[str, JsonObject] = {}
    parts: dict[tuple[str, str], JsonObject] = {}
    for number, event in enumerate(events):
        key = (event.message, event.id or f"#{number:09}")
        if event.session != session:
            continue
        if isinstance(event, AgentDelta):
            if key in parts:
                parts[key]["text"] = parts[key].get("text", "") + event.text
        elif part := _part(event):
            role = event.role if isinstance(event, AgentText) else "assistant"
            info = {"id": event.message, "sessionID": session, "role": role}
            message = messages.setdefault(event.message, {"info": info, "parts": []})
            part |= {"id": key[1], "messageID": event.message, "sessionID": session}
            if key in parts:
                parts[key].clear()
                parts[key].update(part)
            else:
                parts[key] = part
                message["parts"].append(part)
    rows = [{**row, "parts": sorted(row["parts"], key=lambda part: str(part["id"]))} for row in messages.values()]
    if instruction and not any(row["info"]["role"] == "user" for row in rows):
        info = {"id": "", "sessionID": session, "role": "user"}
        rows.insert(0, {"info": info, "parts": [{"type": "text", "text": instruction, "sessionID": session}]})
    return rows


def _part(event: AgentEvent) -> dict[str, Any] | None:
    match event:
        case AgentText(text=text) | AgentReasoning(text=text):
            return {"type": event.type, "text": text}
        case AgentToolCall():
            state: JsonObject = {"status": event.status, "input": event.arguments, "title": event.title}
            state |= {"error": event.error} if event.status == "error" else {"output": event.result}
            return {"type": "tool", "tool": event.name, "callID": event.call_id, "state": state}
        case AgentFileEdit():
            return {"type": "patch", "files": [event.path], "diff": event.diff}
        case AgentReportedError():
            return {"type": "error", "name": event.name, "text": event.text}
        case _:
            return None


def _printed(events: Sequence[AgentEvent]) -> list[JsonObject]:
    """What the agent printed beside its events, as a message at the end."""
    printed = [
        {"id": event.stream, "messageID": "output", "type": "text", "text": event.text}
        for event in events
        if isinstance(event, AgentOutput)
    ]
    session = next((event.session for event in events if event.session), "")
    return [{"info": {"id": "output", "sessionID": session, "role": "assistant"}, "parts": printed}] if printed else []
