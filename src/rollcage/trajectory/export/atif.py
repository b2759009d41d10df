"""A rollout in the Agent Trajectory Interchange Format (ATIF), which Harbor and others read: pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from rollcage.results.fold import Rollout
from rollcage.types import POLICY, JsonObject, Turn

VERSION = "ATIF-v1.7"


def trajectory_of(rollout: Rollout) -> JsonObject:
    """The whole of it: the agent's own conversation, and those of its subagents below it."""
    replaced = {turn.replaces for turn in rollout.turns}
    sessions: dict[str, list[Turn]] = {}
    for turn in rollout.turns:
        if turn.purpose in POLICY and turn.error is None and turn.index not in replaced:
            sessions.setdefault(turn.session, []).append(turn)
    main = next((name for name, turns in sessions.items() if not turns[0].parent_session), "")
    document = _trajectory(rollout, main, sessions.get(main, []))
    others = [_trajectory(rollout, name, turns) for name, turns in sessions.items() if name != main]
    if others:
        document["subagent_trajectories"] = others
    document["extra"] = {
        "rollout_id": rollout.id,
        "task_id": rollout.job.task.id,
        "group_id": rollout.job.group_id,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "outcome": rollout.outcome.value if rollout.outcome else None,
    }
    return document


def _trajectory(rollout: Rollout, session: str, turns: list[Turn]) -> JsonObject:
    steps: list[JsonObject] = []
    for place, turn in enumerate(turns):
        if not place:
            steps += [_said(message) for message in _messages(turn) if message.get("role") in ("system", "user")]
        steps.append(_step(turn, turns[place + 1] if place + 1 < len(turns) else None))
    if not steps:
        steps.append({"source": "user", "message": rollout.job.task.instruction})
    return {
        "schema_version": VERSION,
        "session_id": session or rollout.id,
        "trajectory_id": f"{rollout.id}-{session}" if session else rollout.id,
        "agent": {
            "name": rollout.job.agent.name,
            "version": rollout.agent_version or "unknown",
            "model_name": rollout.job.model.model,
        },
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_prompt_tokens": sum(_count(turn, "prompt_tokens") for turn in turns),
            "total_completion_tokens": sum(_count(turn, "completion_tokens") for turn in turns),
            "total_steps": len(steps),
        },
    }


def _said(message: JsonObject) -> JsonObject:
    return {"source": message["role"], "message": _text(message.get("content"))}


def _step(turn: Turn, following: Turn | None) -> JsonObject:
    calls, odd = _calls(turn)
    metrics: JsonObject = {
        "prompt_tokens": _count(turn, "prompt_tokens"),
        "completion_tokens": _count(turn, "completion_tokens"),
    }
    if turn.trainable:
        metrics["prompt_token_ids"] = list(turn.prompt_ids)
        metrics["completion_token_ids"] = [token.id for token in turn.tokens]
        metrics["logprobs"] = [token.logprob for token in turn.tokens]
    step: JsonObject = {
        "source": "agent",
        "timestamp": datetime.fromtimestamp(turn.started_at, UTC).isoformat(),
        "message": _text(turn.message.get("content")),
        "metrics": metrics,
        "extra": {"turn": turn.index, "finish_reason": turn.finish_reason, "policy_version": turn.policy_version},
    }
    if thought := turn.message.get("reasoning_content") or turn.message.get("reasoning"):
        step["reasoning_content"] = _text(thought)
    if calls:
        step["tool_calls"] = calls
        known = {call["tool_call_id"] for call in calls}
        results = [
            {"source_call_id": message["tool_call_id"], "content": _text(message.get("content"))}
            for message in (_messages(following) if following else [])
            if message.get("role") == "tool" and message.get("tool_call_id") in known
        ]
        if results:
            step["observation"] = {"results": results}
    if odd:
        step["extra"]["unparsed_arguments"] = odd
    return step


def _calls(turn: Turn) -> tuple[list[JsonObject], JsonObject]:
    """The tool calls, and the arguments of those whose arguments are no object, as the model wrote them."""
    calls, odd = [], {}
    for place, call in enumerate(turn.message.get("tool_calls") or ()):
        function = call.get("function") or {}
        name = str(call.get("id") or f"call-{turn.index}-{place}")
        try:
            arguments: Any = json.loads(function.get("arguments") or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            odd[name], arguments = function.get("arguments"), {}
        calls.append({"tool_call_id": name, "function_name": function.get("name") or "", "arguments": arguments})
    return calls, odd


def _messages(turn: Turn) -> list[JsonObject]:
    value = turn.request.get("messages")
    return [message for message in value if isinstance(message, dict)] if isinstance(value, list) else []


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _count(turn: Turn, name: str) -> int:
    value = turn.usage.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
