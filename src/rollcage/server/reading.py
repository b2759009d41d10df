"""What can be read of rollouts that a caller may see: straight from the log, whoever runs them.

A result is written piece by piece: a long rollout's turns never are in memory all at once.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import get_args

import anyio
from anyio.abc import TaskGroup
from pydantic_core import to_json

from rollcage.agents.base import Agent
from rollcage.errors import UnknownRollout, UsageError
from rollcage.events import Entry, Event, FilesCollected, Queued, TurnEnded
from rollcage.gateway.live import Delta
from rollcage.results.fold import Rollout
from rollcage.results.result import TAIL_EVENTS, RolloutResult, proxy_turn, result_of
from rollcage.runner import Owners
from rollcage.runner.groups import TRAINED_KINDS
from rollcage.runner.live import subscribe
from rollcage.schema.views import (
    STATUS,
    EventPage,
    Files,
    Messages,
    RolloutPage,
    RolloutState,
    Trace,
    TurnPage,
    traced,
)
from rollcage.schema.writing import json_of
from rollcage.server.auth import Caller
from rollcage.server.feeds import FeedLine, Feeds
from rollcage.server.transcript import KINDS, transcript_of
from rollcage.store import Query, Store, Summary
from rollcage.trajectory import MergeView, merge_view
from rollcage.types import Stage, Standing, Turn

Entries = list[Entry]
Lines = list[FeedLine]
Rows = list[Summary]

PAGE = 8
"""Turns that are read at once. Their requests mostly are one conversation, which is fetched once for all of them."""
TURN, AGENT = "turn_ended", "agent_event"
"""The bulk of a log: the turns, which are written one by one, and the agent's own words: a result has the last ones."""

_FIELDS = list(RolloutResult.model_fields)
_HEAD = set(_FIELDS[: _FIELDS.index("proxy_turns")])
_LATER = {"proxy_turns", "proxy_log_tail"}
_KINDS = [kind.model_fields["kind"].default for kind in get_args(get_args(Event)[0])]
_KINDS = [kind for kind in _KINDS if kind not in (TURN, AGENT)]


def state_of(summary: Summary, position: int | None = None) -> RolloutState:
    """The state of one rollout, from its row."""
    return RolloutState(
        rollout_id=summary.id,
        task_id=summary.task_id,
        status=STATUS[summary.stage],
        stage=summary.stage,
        queue_position=position,
        serve_session_id=summary.session or None,
        proxy_turns_so_far=summary.turns,
        tokens_so_far=summary.tokens,
        outcome=summary.outcome,
        reward=summary.reward,
        standing=Standing.of(summary.outcome, summary.reward),
        error=summary.error,
        started_at=summary.created_at,
        finished_at=summary.ended_at,
        agent=summary.agent,
        model=summary.model,
        instruction=summary.instruction,
    )


class LogReader:
    """Reads one log for many callers; `UnknownRollout` for what is not there, or belongs to another."""

    def __init__(self, store: Store, tasks: TaskGroup) -> None:
        """`tasks` outlives whoever follows a rollout here."""
        self._store = self.store = store
        self._owners = Owners.beside(store)
        self._feeds = Feeds(store, tasks)
        self.agents: Mapping[str, Agent] = {}
        """The agents known here, by name: some have transcripts of their own shape."""

    def position(self, rollout_id: str) -> int | None:
        """Its place in the queue of this process; None where it has none."""
        return None

    async def visible(self, rollout_id: str, caller: Caller) -> Summary:
        """The rollout's row, if this caller may see it: what it may not see does not exist."""
        try:
            summary = await self._store.summary(rollout_id)
        except UnknownRollout:
            summary = None
        if summary is None or not (caller.admin or summary.caller == caller.name):
            raise UnknownRollout(f"unknown rollout_id: {rollout_id}")
        return summary

    async def state(self, rollout_id: str, caller: Caller) -> RolloutState:
        """Where it is. One row of one table: cheap."""
        summary = await self.visible(rollout_id, caller)
        state = state_of(summary, self.position(summary.id))
        if state.stage is not Stage.PROVISION:
            return state
        entries = await self._store.read(rollout_id)  # few, as long as there is no box
        return state.model_copy(update={"progress": Rollout.fold(entries).progress})

    async def reached(self, rollout_id: str, caller: Caller) -> tuple[RolloutState, int]:
        """Where it is, and the seq of its newest entry."""
        state = await self.state(rollout_id, caller)
        return state, (await self._store.last(rollout_id))[0]

    async def list(self, query: Query, caller: Caller, *, cursor: str = "", limit: int = 50) -> RolloutPage:
        """Rollouts that match, newest first; those of this caller only, unless it may see all."""
        if cursor and not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
            raise UsageError("is not one that this server gave", argument="cursor", remedy="leave it out to start anew")
        rows, more = await self.page(query, caller, before=int(cursor) if cursor else None, limit=limit)
        states = [state_of(row, self.position(row.id)) for row in rows]
        return RolloutPage(rollouts=states, next_cursor=None if more is None else str(more))

    async def page(
        self, query: Query, caller: Caller, *, before: int | None = None, limit: int = 50
    ) -> tuple[Rows, int | None]:
        """The same as rows of the log, and the `before` of the next page."""
        if not caller.admin:
            query = query.model_copy(update={"caller": caller.name})
        return await self._store.page(query, before=before, limit=limit)

    async def lines(self, rollout_id: str, caller: Caller, *, after: int = 0) -> AsyncGenerator[Lines, None]:
        """Entries above `after`, then new ones, as many at a time as there are, and each as JSON too; over after
        `Ended`. Each is written once for all followers. An unknown id raises before anything is yielded.
        """
        await self.visible(rollout_id, caller)
        return self._feeds.follow(rollout_id, after=after)

    async def live(self, rollout_id: str, caller: Caller) -> AsyncIterator[Delta]:
        """What its model says from now on, while it says it; over when its agent is, or where nothing is said."""
        summary = await self.visible(rollout_id, caller)
        return subscribe(self._owners.socket(summary.owner), rollout_id)

    async def merge(self, rollout_id: str, caller: Caller) -> MergeView:
        """How its turns join so far."""
        await self.visible(rollout_id, caller)
        rollout = Rollout.fold(await self._store.read(rollout_id, kinds=TRAINED_KINDS))
        return await anyio.to_thread.run_sync(merge_view, rollout)

    async def written(self, rollout_id: str, caller: Caller, *, wait_s: float) -> AsyncGenerator[bytes, None]:
        """What it came to, as JSON in pieces: however long it was, little of it is in memory at a time."""
        await self.visible(rollout_id, caller)
        return written(self._store, rollout_id, wait_s)

    async def messages(self, rollout_id: str, caller: Caller) -> Messages:
        """The agent's transcript so far, `[{info, parts}]`: of OpenCode as its own server has it."""
        summary = await self.visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, kinds=KINDS)
        return Messages(
            rollout_id=rollout_id,
            status=STATUS[summary.stage],
            serve_session_id=summary.session or None,
            messages=transcript_of(entries, self.agents),
        )

    async def events(self, rollout_id: str, caller: Caller, *, after: int = 0, limit: int = 200) -> EventPage:
        """Entries of its log with a seq above `after`, oldest first."""
        await self.visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, after=after, limit=limit)
        summary = await self._store.summary(rollout_id)
        last, ended = await self._store.last(rollout_id)
        reached = entries[-1].seq if entries else min(after, last)
        return EventPage(
            rollout_id=rollout_id,
            status=STATUS[summary.stage],
            events=entries,
            next_after=reached,
            ended=ended and reached >= last,
            sse=f"/rollouts/{rollout_id}/events",
        )

    async def turns(self, rollout_id: str, caller: Caller, *, after: int = 0, limit: int = 20) -> TurnPage:
        """Model calls, whole, oldest first."""
        entries, more = await self._turns(rollout_id, caller, after, limit)
        turns = [proxy_turn(entry.event.turn) for entry in entries if isinstance(entry.event, TurnEnded)]
        return TurnPage(rollout_id=rollout_id, turns=turns, next_after=more)

    async def trace(self, rollout_id: str, caller: Caller, *, after: int = 0, limit: int = 20) -> Trace:
        """Model calls token by token, as trainers need them."""
        entries, more = await self._turns(rollout_id, caller, after, limit)
        summary = await self._store.summary(rollout_id)
        return Trace(
            rollout_id=rollout_id,
            reward=summary.reward if summary.outcome is not None else None,
            outcome=summary.outcome,
            turns=[traced(entry.event.turn) for entry in entries if isinstance(entry.event, TurnEnded)],
            next_after=more,
            raw=f"/rollouts/{rollout_id}/turns?after={after}&limit={limit}",
        )

    async def _turns(self, rollout_id: str, caller: Caller, after: int, limit: int) -> tuple[Entries, int | None]:
        await self.visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, after=after, limit=limit + 1, kinds=("turn_ended",))
        more = entries[limit - 1].seq if len(entries) > limit else None
        return entries[:limit], more

    async def files(self, rollout_id: str, caller: Caller) -> Files:
        """What the agent left in the workdir; nothing before it was collected."""
        await self.visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, kinds=("files_collected",))
        if entries and isinstance(found := entries[-1].event, FilesCollected):
            first = (await self._store.read(rollout_id, limit=1))[0].event
            folder = first.job.task.workdir if isinstance(first, Queued) else ""
            files = {f"{folder}/{path}": text for path, text in found.files.items()}
            return Files(rollout_id=rollout_id, files=files, files_extra=[f"{folder}/{path}" for path in found.extra])
        return Files(rollout_id=rollout_id)


def still_running(result: RolloutResult, wait_s: float | None) -> RolloutResult:
    """The same, with words for who asked too early."""
    error = f"still_running: it had not ended after {wait_s or 0:g} s; ask again"
    return result.model_copy(update={"error": error, "error_code": "still_running"})


async def written(store: Store, rollout_id: str, wait_s: float) -> AsyncGenerator[bytes, None]:
    """The JSON of the result as it is now: what ends meanwhile is not in it, so that all of it fits together."""
    last, _ = await store.last(rollout_id)
    found = await store.read(rollout_id, kinds=_KINDS)
    found += await store.read(rollout_id, kinds=(AGENT,), limit=TAIL_EVENTS, newest=True)
    entries = sorted((entry for entry in found if entry.seq <= last), key=lambda entry: entry.seq)
    rollout = await anyio.to_thread.run_sync(Rollout.fold, entries)
    rollout = rollout.model_copy(update={"verdicts": await store.verdicts(rollout)})
    result = await anyio.to_thread.run_sync(result_of, rollout)
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
        broken.append(f"turn {turn.index + 1}: {turn.error}")
    return json_of(proxy_turn(turn))
