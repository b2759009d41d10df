"""Recorded turns in the shapes that trainers of OpenEnv read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from openenv.core.harness import TraceEntry, TrainingTrace

from rollcage.results.result import proxy_turn
from rollcage.types import JsonObject, Purpose, Turn

_POLICY = (Purpose.AGENT, Purpose.SUBAGENT)


def trace_entries(turns: Iterable[Turn], reward: float | None) -> list[TraceEntry]:
    """Every call, broken ones too; the mask is 1 only where a token can be trained on."""
    return [_entry(turn, reward) for turn in turns]


def training_trace(turns: Iterable[Turn]) -> TrainingTrace:
    """The calls of the policy whose tokens are complete; attempts that were repeated are left out."""
    turns = list(turns)
    repeated = {turn.replaces for turn in turns}
    rows = [turn for turn in turns if _trainable(turn) and turn.index not in repeated]
    return TrainingTrace.from_entries([dict(_entry(turn, None)) for turn in rows])


def _trainable(turn: Turn) -> bool:
    return turn.trainable and turn.purpose in _POLICY


def _entry(turn: Turn, reward: float | None) -> TraceEntry:
    row = proxy_turn(turn)
    mask = [0] * len(row.prompt_token_ids) + [int(_trainable(turn))] * len(row.completion_token_ids)
    choice = {"index": 0, "message": turn.message, "finish_reason": turn.finish_reason}
    metadata: JsonObject = {
        "node_id": f"turn-{turn.index}",
        "turn": turn.index,
        "purpose": turn.purpose.value,
        "session_id": turn.session,
        "parent_session_id": turn.parent_session,
        "untrainable_reason": turn.untrainable_reason,
        "replaces": turn.replaces,
        "policy_version": turn.policy_version,
        "sampling": turn.sampling,
    }
    entry: JsonObject = {
        "request": turn.request,
        "response": {"choices": [choice], "usage": turn.usage},
        "prompt_token_ids": row.prompt_token_ids,
        "completion_token_ids": row.completion_token_ids,
        "completion_tokens": row.completion_tokens,
        "per_token_logps": row.per_token_logps,
        "loss_mask": mask,
        "reward": reward,
        "metadata": metadata,
        # By the names of the older record.
        "turn": turn.index,
        "finish_reason": turn.finish_reason,
        "latency_s": turn.seconds,
        "timestamp": turn.started_at,
        "upstream_status": turn.status,
        "upstream_error": turn.error,
    }
    return cast("TraceEntry", entry)
