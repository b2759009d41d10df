"""What an agent says and does, in words that are no agent's own: each agent's adapter translates into these."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from rollcage.types import JsonObject, Value


class AgentPart(Value):
    """Where something belongs in the agent's conversation. A later event with the same id takes the place of it."""

    session: str = ""
    """The agent's session; empty where it names none. The first one of a rollout is the agent's own."""
    message: str = ""
    """The message it is part of; what has the same one belongs together."""
    id: str = ""
    """Its name within the message; empty where it stands alone. Parts are shown in the order of their names: an agent
    may end one long after the next one began."""


class AgentSession(AgentPart):
    """A session began."""

    type: Literal["session"] = "session"
    parent: str = ""
    """The session that started it, where it is a subagent's."""


class AgentText(AgentPart):
    """Words: the agent's, or those it was given."""

    type: Literal["text"] = "text"
    text: str
    role: Literal["user", "assistant"] = "assistant"
    final: bool = True
    """Whether it is complete. One that is not comes again."""


class AgentReasoning(AgentPart):
    """A thought."""

    type: Literal["reasoning"] = "reasoning"
    text: str
    final: bool = True
    """Whether it is complete. One that is not comes again."""


class AgentDelta(AgentPart):
    """What was added to a text or a thought that is not complete: the one with this id."""

    type: Literal["delta"] = "delta"
    text: str


class AgentFileEdit(AgentPart):
    """A change to a file."""

    type: Literal["file_edit"] = "file_edit"
    path: str = ""
    """The file; empty where only the diff names it."""
    change: Literal["write", "edit", "delete"] = "edit"
    """`write`: the whole file is new."""
    removed: str = ""
    """The text that is taken out."""
    added: str = ""
    """The text that is put in."""
    diff: str = ""
    """The change as a diff or a patch, where the agent tells it so."""


class AgentToolCall(AgentPart):
    """A tool of the agent's, and what came of it."""

    type: Literal["tool_call"] = "tool_call"
    call_id: str = ""
    """The model's own name for the call."""
    name: str = ""
    kind: Literal["execute", "read", "edit", "search", "fetch", "other"] = "other"
    """What sort of tool it is."""
    title: str = ""
    """The one thing that tells most about it: the command, the path, the pattern."""
    arguments: JsonObject = {}
    status: Literal["pending", "running", "completed", "error"] = "completed"
    result: str = ""
    """What the model was told."""
    error: str = ""
    """Why it failed."""
    exit_code: int | None = None
    """Of a command."""
    seconds: float | None = None
    """How long it took, where the agent tells."""
    edits: tuple[AgentFileEdit, ...] = ()
    """The changes to files that it is for; made only where the call is completed."""

    @property
    def ended(self) -> bool:
        """Whether there is a result or an error."""
        return self.status in ("completed", "error")


class AgentUsage(AgentPart):
    """What one step cost, by the agent's own count."""

    type: Literal["usage"] = "usage"
    input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    """Of the input, how many were in a cache."""
    cost: float = 0.0
    """In the currency of the agent's price list; 0 where it knows no price."""
    finish_reason: str = ""


class AgentReportedError(AgentPart):
    """An error that the agent tells of."""

    type: Literal["error"] = "error"
    name: str = ""
    """The agent's own word for this kind of error."""
    text: str = ""


class AgentOutput(AgentPart):
    """Something it printed that is no event."""

    type: Literal["output"] = "output"
    stream: Literal["stdout", "stderr"] = "stdout"
    text: str


class AgentNote(AgentPart):
    """A remark of rollcage's about the agent's events: that some were left out."""

    type: Literal["note"] = "note"
    text: str


class AgentRaw(AgentPart):
    """Something that only this agent has; its own words are all there is."""

    type: Literal["raw"] = "raw"
    name: str = ""
    """The agent's own word for it."""


AgentEvent = Annotated[
    AgentSession
    | AgentText
    | AgentReasoning
    | AgentDelta
    | AgentToolCall
    | AgentFileEdit
    | AgentUsage
    | AgentReportedError
    | AgentOutput
    | AgentNote
    | AgentRaw,
    Field(discriminator="type"),
]
AGENT_EVENT: TypeAdapter[AgentEvent] = TypeAdapter(AgentEvent)
"""Reads one back from its JSON shape."""
