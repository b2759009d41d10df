"""Entries of the log without their bulk: what somebody who looks on needs of each. Pure.

A turn carries its whole request and every token with its alternatives; a long rollout comes to hundreds of megabytes.
Who wants one turn in whole asks for it.
"""

from __future__ import annotations

from rollcage.events import AgentEmitted, Entry, Queued, ToolCalled, TurnEnded
from rollcage.types import JsonObject, Turn

_OF_A_TURN = set(
    "index replaces purpose session parent_session policy_version finish_reason usage status error trainable "
    "untrainable_reason recorded history streamed started_at first_token_s seconds".split()
)


def compact(entry: Entry) -> JsonObject:
    """The entry as JSON: a turn without its texts and tokens, an agent's event without the agent's own words for it,
    a job without the script of the scripted model.
    """
    match entry.event:
        case TurnEnded(turn=turn):
            event: JsonObject = {"kind": "turn_ended", "turn": compact_turn(turn)}
        case ToolCalled():
            # The agent's own words about the call are beside it.
            event = entry.event.model_dump(mode="json", exclude={"arguments", "answer"})
        case AgentEmitted():
            # Whoever looks on need not know the agent's own words.
            event = entry.event.model_dump(mode="json", exclude={"raw"})
        case Queued():
            event = entry.event.model_dump(mode="json", exclude={"job": {"task": {"solution"}}})
        case _:
            event = entry.event.model_dump(mode="json")
    return {"rollout_id": entry.rollout_id, "seq": entry.seq, "time": entry.time, "event": event}


def compact_turn(turn: Turn) -> JsonObject:
    """A turn without its texts and tokens."""
    prompt = turn.usage.get("prompt_tokens")
    return {
        **turn.model_dump(mode="json", include=_OF_A_TURN),
        "sampling": turn.sampling,
        "token_count": len(turn.tokens),
        "prompt_count": len(turn.prompt_ids) or (prompt if isinstance(prompt, int) else 0),
    }
