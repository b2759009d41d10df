"""What agents make their model calls for, told by their headers and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.purpose import origin as opencode
from rollcage.agents.purposes import by_headers
from rollcage.agents.qwen_code import QwenCode
from rollcage.types import Purpose


@pytest.mark.parametrize(
    ("headers", "body", "purpose"),
    [
        ({}, {"tools": [{}]}, Purpose.AGENT),
        ({}, {"messages": [{"role": "user", "content": "hi"}]}, Purpose.AGENT),
        ({"x-parent-session-id": "p"}, {"tools": [{}]}, Purpose.SUBAGENT),
        ({}, {"messages": [{"role": "system", "content": "You are a title generator. You ..."}]}, Purpose.TITLE),
        (
            {},
            {"messages": [{"content": "x"}, {"content": [{"text": "Generate a title for this conversation:\n"}]}]},
            Purpose.TITLE,
        ),
        ({}, {"messages": [{"content": "You are a title generator"}], "tools": [{}]}, Purpose.AGENT),
        (
            {"x-parent-session-id": "p"},
            {"messages": [{"content": "You are a context summarization agent. ..."}]},
            Purpose.COMPACTION,
        ),
        ({}, {"messages": "nonsense"}, Purpose.AGENT),
        ({}, {"messages": [None, 3]}, Purpose.AGENT),
    ],
)
def test_what_a_call_is_for(headers: dict[str, str], body: dict[str, Any], purpose: Purpose) -> None:
    origin = opencode({"x-session-id": "s", **headers}, body)
    assert origin == (purpose, "s", headers.get("x-parent-session-id", ""))


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({"x-claude-code-session-id": "s"}, (Purpose.AGENT, "s", "")),
        ({"x-claude-code-session-id": "s", "x-claude-code-agent-id": "a"}, (Purpose.SUBAGENT, "a", "s")),
        (
            {
                "x-claude-code-session-id": "s",
                "x-claude-code-agent-id": "b",
                "x-claude-code-parent-agent-id": "a",
            },
            (Purpose.SUBAGENT, "b", "a"),
        ),
        ({"session-id": "s", "thread-id": "s"}, (Purpose.AGENT, "s", "")),
        ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"}, (Purpose.SUBAGENT, "t", "s")),
        ({"session-id": "s", "thread-id": "s", "x-openai-subagent": "compact"}, (Purpose.COMPACTION, "s", "")),
        (
            {"session-id": "s", "thread-id": "s", "x-codex-turn-metadata": '{"request_kind": "compaction"}'},
            (Purpose.COMPACTION, "s", ""),
        ),
        (
            {"session-id": "s", "thread-id": "s", "x-codex-turn-metadata": '{"request_kind": "turn"}'},
            (Purpose.AGENT, "s", ""),
        ),
        ({"session-id": "s", "x-codex-turn-metadata": "[" * 100_000}, (Purpose.AGENT, "s", "")),
        ({"session-id": "s", "x-codex-turn-metadata": "[3]"}, (Purpose.AGENT, "s", "")),
    ],
)
def test_other_agents_name_their_sessions_in_other_headers(
    headers: dict[str, str], origin: tuple[Purpose, str, str]
) -> None:
    assert by_headers(headers, {"messages": [], "tools": [{}]}) == origin


@pytest.mark.parametrize(
    ("words", "purpose"),
    [
        ("Generate a concise, sentence-case title (3-7 words)", Purpose.TITLE),
        ("You are a helpful AI assistant tasked with summarizing conversations.", Purpose.COMPACTION),
    ],
)
def test_claude_code_is_known_by_its_prompts_too(words: str, purpose: Purpose) -> None:
    headers = {"x-claude-code-session-id": "s"}
    assert by_headers(headers, {"messages": [{"role": "system", "content": words}]}) == (purpose, "s", "")


def test_claude_code_sums_up_within_its_conversation_by_the_last_words_of_its_user() -> None:
    headers, asks = {"x-claude-code-session-id": "s"}, "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n..."

    def asked(*messages: dict[str, Any]) -> Purpose:
        return by_headers(headers, {"messages": list(messages), "tools": [{}]}).purpose

    said = {"role": "user", "content": "hi"}
    assert asked(said, {"role": "user", "content": [{"type": "text", "text": asks}]}) is Purpose.COMPACTION
    assert asked({"role": "user", "content": asks}, {"role": "assistant", "content": "x"}, said) is Purpose.AGENT
    assert asked(said, {"role": "tool", "content": asks}) is Purpose.AGENT


def test_qwen_code_names_no_sessions_so_a_subagent_is_known_by_how_its_conversation_begins() -> None:
    origin, headers = QwenCode(Downloads(Path())).origin, {"x-session-id": "s"}
    rules = "Quick. Then return the final result as a normal model response (not a tool call) and stop."

    def begun(system: str, *more: str) -> dict[str, Any]:
        words = [{"role": "system", "content": system}, *({"role": "user", "content": text} for text in more)]
        return {"messages": words, "tools": [{}]}

    assert origin(headers, begun("You are Qwen Code.", "hi")) == (Purpose.AGENT, "s", "")
    first, second = origin(headers, begun(rules, "look")), origin(headers, begun(rules, "listen"))
    assert (first.purpose, first.parent_session) == (second.purpose, second.parent_session) == (Purpose.SUBAGENT, "s")
    assert len({"s", first.session, second.session}) == 3
    later = begun(rules, "look")
    later["messages"] += [{"role": "assistant", "content": "I look."}, {"role": "tool", "content": "seen"}]
    assert origin(headers, later) == first
    summary = {"messages": [{"role": "system", "content": "\nYou are the component that summarizes a conversation"}]}
    assert origin(headers, summary) == (Purpose.COMPACTION, "s", "")
    assert origin({}, {"messages": "nonsense"}) == (Purpose.AGENT, "", "")
