"""Reads what an agent says about itself: its own events in, something worth showing out. Never trusts their shape."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from rollcage.types import JsonObject


@dataclass(frozen=True)
class Saying:
    """One thing the agent did or said."""

    kind: Literal["words", "thought", "tool", "error"]
    """What it is."""
    text: str
    """The words; for a tool, what it was asked to do."""
    tool: str = ""
    """The tool's name."""
    output: str = ""
    """What the tool answered."""
    removed: str = ""
    """Text that an edit took out."""
    added: str = ""
    """Text that an edit or a new file put in."""
    exit_code: int | None = None
    """The exit code of a shell command."""
    failed: bool = False
    """Whether the tool reported an error."""
    details: JsonObject = field(default_factory=dict)
    """The tool's whole input."""


def saying_of(data: JsonObject) -> Saying | None:
    """What there is to show about one event of an agent's own stream; None where there is nothing."""
    part = _table(data.get("part"))
    match data.get("type"):
        case "text":
            return _words("words", part)
        case "reasoning":
            return _words("thought", part)
        case "tool_use":
            return _tool(part)
        case "error":
            error = _table(data.get("error"))
            message = _table(error.get("data")).get("message") or error.get("message") or error.get("name")
            return Saying("error", _text(message) or "unknown error")
        case _:
            return None


def _words(kind: Literal["words", "thought"], part: JsonObject) -> Saying | None:
    text = _text(part.get("text")).strip()
    return Saying(kind, text) if text else None


def _tool(part: JsonObject) -> Saying:
    state, tool = _table(part.get("state")), _text(part.get("tool"))
    asked = _table(state.get("input"))
    failed = state.get("status") == "error"
    code = _table(state.get("metadata")).get("exit")
    return Saying(
        "tool",
        _asked(tool, asked),
        tool=tool or "?",
        # The answer to a read or a write repeats what the file says; the path is enough.
        output=_text(state.get("error"))
        if failed
        else ""
        if tool in ("read", "write", "edit")
        else _text(state.get("output")),
        removed=_text(asked.get("oldString")) if tool == "edit" else "",
        added=_text(asked.get("newString" if tool == "edit" else "content")) if tool in ("edit", "write") else "",
        exit_code=code if isinstance(code, int) and not isinstance(code, bool) else None,
        failed=failed,
        details=asked,
    )


def _asked(tool: str, asked: JsonObject) -> str:
    for name in ("command", "filePath", "pattern", "url", "description", "path"):
        value = asked.get(name)
        if isinstance(value, str) and value:
            return value
    return json.dumps(asked) if asked else ""


def _table(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)
