"""Tells what an agent makes a model call for, by the headers and the prompts that it is known to send.

An agent that has a file of its own keeps its marks there. Those of Claude Code and Codex, which people run by hand, are
here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollcage.agents.base import Agent, ClassifiesCalls
from rollcage.agents.fields import table, tables
from rollcage.types import CallClassifier, CallOrigin, JsonObject, Purpose

_CLAUDE_TITLES = ("Generate a concise, sentence-case title",)
_CLAUDE_SUMMARIES = ("You are a helpful AI assistant tasked with summarizing",)
_CLAUDE_COMPACTS = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
"""How it asks for a summary within the conversation, its tools offered as before."""


def claude_code(headers: Mapping[str, str], body: JsonObject) -> CallOrigin:
    """Claude Code: a subagent has an id of its own, and the session's or another subagent's as its parent."""
    session, agent = headers.get("x-claude-code-session-id", ""), headers.get("x-claude-code-agent-id", "")
    parent = headers.get("x-claude-code-parent-agent-id") or (session if agent else "")
    purpose = by_prompt(body, _CLAUDE_TITLES, _CLAUDE_SUMMARIES) or (Purpose.SUBAGENT if parent else Purpose.AGENT)
    last = next(reversed(tables(body.get("messages"))), {})
    if last.get("role") == "user" and _text_of(last).startswith(_CLAUDE_COMPACTS):
        purpose = Purpose.COMPACTION
    return CallOrigin(purpose, agent or session, parent)


def codex(headers: Mapping[str, str], body: JsonObject) -> CallOrigin:
    """Codex: threads in a session; helpers say what they are, and each request its kind."""
    parent, helper = headers.get("x-codex-parent-thread-id", ""), headers.get("x-openai-subagent", "")
    purpose = Purpose.SUBAGENT if parent or helper else Purpose.AGENT
    if helper == "compact" or _codex_kind(headers.get("x-codex-turn-metadata", "")) == "compaction":
        purpose = Purpose.COMPACTION
    return CallOrigin(purpose, headers.get("thread-id") or headers.get("session-id", ""), parent)


def _codex_kind(metadata: str) -> object:
    try:
        return table(json.loads(metadata or "{}")).get("request_kind")
    except (ValueError, RecursionError):
        return None


def classifier_of(agent: Agent) -> CallClassifier:
    """The agent's own way to tell; `by_headers` where it has none."""
    return agent.origin if isinstance(agent, ClassifiesCalls) else by_headers


def by_headers(headers: Mapping[str, str], body: JsonObject) -> CallOrigin:
    """For agents that tell nothing themselves: whichever agent the headers are of. `x-session-id` may be anybody's."""
    if any(name.startswith("x-claude-code-") for name in headers):
        return claude_code(headers, body)
    if session := headers.get("x-session-id"):
        return CallOrigin(session=session)
    return codex(headers, body)


def by_prompt(body: JsonObject, titles: tuple[str, ...], summaries: tuple[str, ...]) -> Purpose | None:
    """What a call without tools is for, by how its first messages begin; None where they tell nothing."""
    messages = body.get("messages")
    if body.get("tools") or not isinstance(messages, list):
        return None
    texts = [_text_of(message).lstrip() for message in messages[:2]]
    if any(text.startswith(titles) for text in texts):
        return Purpose.TITLE
    return Purpose.COMPACTION if texts and texts[0].startswith(summaries) else None


def _text_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = next((part.get("text") for part in content if isinstance(part, dict)), None)
    return content if isinstance(content, str) else ""
