"""Events as OpenCode's adapter would put them into the log."""

from __future__ import annotations

from rollcage.agents.opencode.neutral import event_of
from rollcage.events import AgentEmitted
from rollcage.types import JsonObject


def opencode(data: JsonObject) -> AgentEmitted:
    return AgentEmitted(event=event_of(data), raw=data)
