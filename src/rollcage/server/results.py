"""A rollout's result as JSON, written piece by piece: a long rollout's turns never are in memory all at once."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import get_args

import anyio
from pydantic_core import to_json

from rollcage.api.writing import json_of
from rollcage.events import Event, Rollout, TurnEnded
from rollcage.result import RolloutResult, proxy_turn, result_of
from rollcage.store import Store
from rollcage.types import Turn

PAGE = 8
"""Turns that are read at once. Their requests mostly are one conversation, which is fetched once for all of them."""
TURN, SAID = "turn_ended", "agent_said"
"""The bulk of a log: the turns, which are written one by one, and the agent's own words, which are in no result."""

_FIELDS = list(RolloutResult.model_fields)
_HEAD = set(_FIELDS[: _FIELDS.index("proxy_turns")])
_LATER = {"proxy_turns", "proxy_log_tail"}
_KINDS = [kind.model_fields["kind"].default for kind in get_args(get_args(Event)[0])]
_KINDS = [kind for kind in _KINDS if kind not in (TURN, SAID)]


def still_running(result: RolloutResult, wait_s: float | None) -> RolloutResult:
    """The same, with words for who asked too early."""
    error = f"still_running: it had not ended after {wait_s or 0:g} s; ask again"
    return result.model_copy(update={"error": error, "error_code": "still_running"})


async def written(store: Store, rollout_id: str, wait_s: float) -> AsyncGenerator[bytes, None]:
    """The JSON of the result as it is now: what ends meanwhile is not in it, so that all of it fits together."""
    last, _ = await store.last(rollout_id)
    entries = [entry for entry in await store.read(rollout_id, kinds=_KINDS) if entry.seq <= last]
    result = await anyio.to_thread.run_sync(lambda: result_of(Rollout.fold(entries)))
    if result.outcome is None:
        result = still_running(result, wait_s)
    yield json_of(result, include=_HEAD)[:-1] + b',"proxy_turns":['
    broken: list[str] = []
    after, comma = 0, b""
    while page := await store.read(rollout_id, after=after, limit=PAGE, kinds=(TURN,)):
        after = page[-1].seq
        for entry in page:
            if entry.seq <= last and isinstance(entry.event, TurnEnded):
                yield comma + await anyio.to_thread.run_sync(_turn, entry.event.turn, broken)
                comma = b","
    rest = await anyio.to_thread.run_sync(lambda: json_of(result, exclude=_HEAD | _LATER))
    tail = "\n".join(broken).encode("utf-8", "replace").decode()
    yield b'],"proxy_log_tail":' + to_json(tail) + b"," + rest[1:]


def _turn(turn: Turn, broken: list[str]) -> bytes:
    if turn.error:
        broken.append(f"turn {turn.index}: {turn.error}")
    return json_of(proxy_turn(turn))
