"""What the scripted model answers, turn by turn."""

from __future__ import annotations

from rollcage.types.base import JsonObject, Value


class ScriptedTurn(Value):
    """One answer of the scripted model."""

    text: str = ""
    """What it says."""
    reasoning: str = ""
    """What it thinks first, where the wire has a place for that."""
    tool_calls: tuple[ScriptedCall, ...] = ()
    """Tools it calls, in order, all in this one answer."""
    status: int = 200
    """Another status makes it an HTTP error with `text` as the message."""
    delay_s: float = 0.0
    """How long it waits before its first token."""
    token_delay_s: float = 0.0
    """How long it waits before each further chunk; a whole answer takes as long as a stream would."""
    cut_after: int | None = None
    """The connection breaks after this many chunks."""
    error_after: int | None = None
    """An error event is sent in the stream after this many chunks."""
    finish_reason: str = ""
    """Forces a finish reason; empty means what follows from the answer."""
    times: int | None = None
    """The fault above happens this many times, then the next turn of the script answers in its place; None: always."""


class ScriptedCall(Value):
    """One tool call of the scripted model."""

    name: str
    """The tool."""
    arguments: JsonObject = {}
    """Its arguments."""
    raw_arguments: str | None = None
    """Sent instead of `arguments`, verbatim: for malformed JSON."""
