"""Tells what OpenCode makes a model call for: the agent's own turns, titles, summaries, subagents."""

from __future__ import annotations

from collections.abc import Mapping

from rollcage.agents.purposes import by_prompt
from rollcage.types import CallOrigin, JsonObject, Purpose

_TITLES = ("You are a title generator", "Generate a title for this conversation")
_SUMMARIES = ("You are a context summarization agent",)


def origin(headers: Mapping[str, str], body: JsonObject) -> CallOrigin:
    """By OpenCode's headers (names in lower case) and prompts."""
    session = headers.get("x-session-id") or headers.get("x-session-affinity", "")
    parent = headers.get("x-parent-session-id", "")
    purpose = by_prompt(body, _TITLES, _SUMMARIES) or (Purpose.SUBAGENT if parent else Purpose.AGENT)
    return CallOrigin(purpose, session, parent)
