"""The agent's own transcript, folded from its log into OpenCode's shape: messages with their parts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollcage.agents.opencode_transcript import Transcript
from rollcage.api.views import Message
from rollcage.events import AgentSaid, Entry, Queued, Requeued
from rollcage.types import JsonObject

KINDS = ("queued", "requeued", "agent_said")
"""The entries a transcript is made of."""


def transcript_of(entries: Iterable[Entry]) -> list[Message]:
    """The messages so far, oldest first, the instruction included."""
    instruction, transcript, printed = "", Transcript(), list[JsonObject]()
    for entry in entries:
        match entry.event:
            case Queued(job=job):
                instruction = job.task.instruction
            case Requeued():
                transcript, printed = Transcript(), []
            case AgentSaid(data={"type": "stdout" | "stderr" as stream, "text": str(text)}):
                # An agent that is no OpenCode and only prints.
                printed.append({"id": stream, "messageID": "output", "type": "text", "text": text})
            case AgentSaid(data=data):
                transcript.add(data)
            case _:
                pass
    messages = [Message(**row) for row in transcript.messages(instruction)]
    if printed:
        info = {"id": "output", "sessionID": transcript.session, "role": "assistant"}
        messages.append(Message(info=info, parts=printed))
    return messages
