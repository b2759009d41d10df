"""What becomes of a request on its way to the model: pure functions, request in, request out.

Also what is refused without asking the model at all, and what each call is for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from rollcage.gateway.engines import Engine, Wanted
from rollcage.types import Endpoint, JsonObject, Limits, Purpose

_CAPS = ("max_tokens", "max_completion_tokens", "n_predict")
"""Every name under which some engine takes the ceiling of an answer."""

# Where OpenCode, Claude Code and Codex name a session and the one that started it. What is nearest comes first.
_SESSIONS = (
    *("x-session-id", "x-session-affinity"),
    *("x-claude-code-agent-id", "x-claude-code-session-id"),
    *("thread-id", "session-id"),
)
LONGEST_SESSION = 200
"""Characters of a session's name that are kept: a box can send long headers, and each would be logged."""
_PARENTS = ("x-parent-session-id", "x-claude-code-parent-agent-id", "x-codex-parent-thread-id")
_TITLES = (
    "You are a title generator",
    "Generate a title for this conversation",
    "Generate a concise, sentence-case title",
)
_SUMMARIES = ("You are a context summarization agent", "You are a helpful AI assistant tasked with summarizing")


class Origin(NamedTuple):
    """Who made a call, and what for."""

    purpose: Purpose
    session: str
    parent_session: str


def outgoing(body: JsonObject, *, endpoint: Endpoint, limits: Limits, engine: Engine, spent: int = 0) -> JsonObject:
    """The request as it goes upstream. `spent` is what the model has generated so far, of `limits.token_budget`."""
    sampling = endpoint.sampling
    chat = "prompt" not in body
    sent = {**body, "model": endpoint.model}
    if sampling.temperature is not None:
        sent["temperature"] = sampling.temperature
    if sampling.seed is not None:
        sent["seed"] = sampling.seed
    if chat and sampling.thinking is not None:
        sent["chat_template_kwargs"] = _dict(body, "chat_template_kwargs") | {"enable_thinking": sampling.thinking}
    for name, value in sampling.extra_body.items():
        merged = isinstance(value, dict) and isinstance(sent.get(name), dict)
        sent[name] = {**sent[name], **value} if merged else value
    _cap(sent, _ceiling(limits, spent), engine.cap_field if chat else "max_tokens")
    if engine.unstreams(_wanted(sent, chat, 0)):
        sent["stream"] = False
        sent.pop("stream_options", None)
    _ask(sent, engine, chat, sampling.top_logprobs)
    return sent


def added(body: JsonObject, sent: JsonObject, engine: Engine) -> JsonObject:
    """What `outgoing` put in for the sake of capture and the agent had not sent itself."""
    asked = engine.asks(_wanted(sent, "prompt" not in body, 0))
    return {name: sent[name] for name in asked if name in sent and name not in body}


def limit_reached(limits: Limits, *, turns: int, spent: int) -> str:
    """Which limit a further call would go beyond, in words; empty where it may go on.

    The words matter: agents retry on errors that look passing, by status or by text, and this one must make them stop.
    """
    if limits.max_turns and turns >= limits.max_turns:
        return "turn limit reached"
    if limits.token_budget and spent >= limits.token_budget:
        return "token budget used up"
    return ""


def problem(message: str, kind: str = "invalid_request_error") -> bytes:
    """An error body in OpenAI's shape."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})


def origin_of(headers: Mapping[str, str], body: JsonObject) -> Origin:
    """What a call is for, told by its headers (names in lower case) and its shape (as one of chat completions)."""
    session = _first(headers, _SESSIONS)
    parent = _first(headers, _PARENTS)
    if not parent and "x-claude-code-agent-id" in headers:
        parent = headers.get("x-claude-code-session-id", "")[:LONGEST_SESSION]
    helper = headers.get("x-openai-subagent", "")
    purpose = Purpose.SUBAGENT if parent or helper else Purpose.AGENT
    if helper == "compact":
        purpose = Purpose.COMPACTION
    messages = body.get("messages")
    texts = [_text_of(message) for message in messages[:2]] if isinstance(messages, list) else []
    if not body.get("tools") and any(text.startswith(_TITLES) for text in texts):
        purpose = Purpose.TITLE
    elif texts and texts[0].startswith(_SUMMARIES) and not body.get("tools"):
        purpose = Purpose.COMPACTION
    return Origin(purpose, session, parent)


def _ceiling(limits: Limits, spent: int) -> int:
    """Tokens this answer may have; 0 means as many as it likes."""
    left = max(limits.token_budget - spent, 1) if limits.token_budget else 0
    return min(filter(None, (limits.max_tokens_cap, left)), default=0)


def _cap(sent: JsonObject, ceiling: int, name: str) -> None:
    given = [each for each in _CAPS if sent.get(each) is not None]
    if name == "max_completion_tokens" and "max_tokens" in given:
        # Models that know only the modern name refuse the old one.
        sent.setdefault(name, sent["max_tokens"])
        del sent["max_tokens"]
        given = [name if each == "max_tokens" else each for each in given]
    if not ceiling:
        return
    for each in given if {"max_tokens", "max_completion_tokens"} & set(given) else [*given, name]:
        asked = sent.get(each)
        # Engines coerce strings and floats, and read -1 as "no end": whatever is no plain count is replaced.
        plain = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 0
        sent[each] = min(asked, ceiling) if plain and asked is not None else ceiling


def _ask(sent: JsonObject, engine: Engine, chat: bool, alternatives: int) -> None:
    for name, value in engine.asks(_wanted(sent, chat, alternatives)).items():
        before = sent.get(name)
        if isinstance(value, dict):
            sent[name] = _dict(sent, name) | value
        elif _is_count(value) and _is_count(before):
            sent[name] = max(value, before)
        else:
            sent[name] = value


def _wanted(sent: JsonObject, chat: bool, alternatives: int) -> Wanted:
    return Wanted(
        chat=chat, stream=sent.get("stream") is True, tools=bool(sent.get("tools")), alternatives=alternatives
    )


def _first(headers: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((headers[name][:LONGEST_SESSION] for name in names if headers.get(name)), "")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _dict(body: JsonObject, name: str) -> JsonObject:
    value = body.get(name)
    return value if isinstance(value, dict) else {}


def _text_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        content = next((part.get("text") for part in content if isinstance(part, dict)), None)
    return content if isinstance(content, str) else ""
