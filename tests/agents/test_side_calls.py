"""Titles and compactions of the real agents, provoked by a small window: the log tells them from the agent's turns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import rollcage
from rollcage.conformance.agents import opened_subject
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import Settings
from rollcage.types import Limits, Purpose
from rollcage.wiring import agents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WINDOW = {"provider": {"rollcage": {"models": {"model": {"limit": {"context": 14_000, "output": 2000}}}}}}
SWITCHED_ON: dict[str, dict[str, Any]] = {
    "opencode": {"config": {"compaction": {"auto": True}, "agent": {"title": {"disable": False}}, **WINDOW}},
    "claude-code": {
        "env": {
            "DISABLE_AUTO_COMPACT": "",
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "8",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000",
        }
    },
    "codex": {"config": {"model_auto_compact_token_limit": 13_000}},
    "pi": {"config": {"compaction": {"enabled": True, "reserveTokens": 998_000, "keepRecentTokens": 100}}},
    "qwen-code": {"config": {"model": {"generationConfig": {"contextWindowSize": 30_000}}}},
}
"""What makes each sum up what was said, long before its model's window is full."""
ASKS = {
    "opencode": "You are a context summarization agent",
    "claude-code": "Your task is to create a detailed summary of the conversation so far",
    "codex": "You are performing a CONTEXT CHECKPOINT COMPACTION",
    "pi": "You are a context summarization assistant",
    "qwen-code": "You are the component that summarizes a conversation",
}
"""How each asks for it, in its first or its last message."""
TITLE = "You are a title generator"


@pytest.mark.parametrize("name", SWITCHED_ON)
async def test_a_compaction_is_no_turn_of_the_agents(name: str, state_dir: Path) -> None:
    agent = agents(Settings.from_environ(os.environ))[name]
    async with LocalProvider(state_dir) as provider, opened_subject(agent, provider, pace=30) as subject:
        # A script goes by how long a conversation is, and begins anew in one that was summed up: a limit ends it.
        script = subject.script(*(f"seq 1 3000; true {step}" for step in range(4)))
        played = await subject.play("Count.", script, spec=SWITCHED_ON[name], limits=Limits(max_turns=6))
    turns, wanted = played.rollout.turns, []
    for turn in turns:
        first, *_, last = turn.request["messages"]
        said = json.dumps([first, last])
        side = Purpose.COMPACTION if ASKS[name] in said else Purpose.TITLE if TITLE in said else Purpose.AGENT
        wanted.append(side)
    assert [turn.purpose for turn in turns] == wanted
    assert {Purpose.AGENT, Purpose.COMPACTION} <= set(wanted)
    assert (Purpose.TITLE in wanted) == (name == "opencode")
    assert len({turn.session for turn in turns}) == 1
    trained = sum(sum(sequence.loss_mask) for sequence in rollcage.sequences(played.rollout))
    own = sum(len(turn.tokens) for turn in turns if turn.purpose is Purpose.AGENT)
    assert trained == own > 0, "what was said of the summary's is not learned"
