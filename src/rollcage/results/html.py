"""A result as a notebook shows it. What agents and models said is text here and never markup."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape

from rollcage.results.result import ProxyTurn, RolloutResult

MOST_TURNS = 100
MOST_TEXT = 4000
"""So much is shown of one turn: a page of a notebook is kept in its file."""


def html_of(result: RolloutResult) -> str:
    """A short table, and each turn to unfold."""
    rows = "".join(f"<tr><th>{name}</th><td>{escape(_cut(text))}</td></tr>" for name, text in _rows(result))
    more = len(result.proxy_turns) - MOST_TURNS
    tail = f"<p>and {more} more turns</p>" if more > 0 else ""
    return f"<div><table>{rows}</table>{''.join(map(_turn, result.proxy_turns[:MOST_TURNS]))}{tail}</div>"


def _rows(result: RolloutResult) -> Iterator[tuple[str, str]]:
    yield "rollout", result.rollout_id
    if result.task_id:
        yield "task", result.task_id
    yield "outcome", str(result.outcome.value if result.outcome else "running")
    parts = ", ".join(f"{name} {value:g}" for name, value in result.reward_parts.items())
    yield "reward", "none" if result.reward is None else f"{result.reward:g}" + (f" ({parts})" if parts else "")
    if result.trust:
        yield "trust", result.trust
    if result.suspicions:
        yield "suspicions", "; ".join(f"{each.what}: {', '.join(each.paths)}" for each in result.suspicions)
    if result.error:
        yield "error", result.error
    sampled = sum(len(turn.completion_tokens) for turn in result.proxy_turns)
    yield "turns", f"{len(result.proxy_turns)}, {sampled} tokens sampled"
    yield "time", f"{result.wall_s:.1f} s"


def _turn(turn: ProxyTurn) -> str:
    how = turn.upstream_error or turn.finish_reason or "cut"
    head = f"turn {turn.turn + 1} · {turn.purpose} · {len(turn.completion_tokens)} tokens · {how}"
    body = "\n".join(_said(turn))
    return f"<details><summary>{escape(_cut(head))}</summary><pre>{escape(_cut(body))}</pre></details>"


def _said(turn: ProxyTurn) -> Iterator[str]:
    for name in ("reasoning_content", "reasoning", "content"):
        if text := turn.message.get(name):
            yield text if isinstance(text, str) else json.dumps(text)
    for call in turn.message.get("tool_calls") or ():
        yield json.dumps(call.get("function", call) if isinstance(call, dict) else call, ensure_ascii=False)


def _cut(text: str) -> str:
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"
