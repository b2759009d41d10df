"""What can be read of rollouts that a caller may see: straight from the log, whoever runs them."""

from __future__ import annotations

from rollcage.api.views import STATUS, EventPage, Files, Messages, Trace, TurnPage, traced
from rollcage.errors import UnknownRollout
from rollcage.events import Entry, FilesCollected, Queued, TurnEnded
from rollcage.result import proxy_turn
from rollcage.server.admission import Caller
from rollcage.server.transcript import KINDS, transcript_of
from rollcage.store import Store, Summary

Entries = list[Entry]


class Reader:
    """Reads one log for many callers; `UnknownRollout` for what is not there, or belongs to another."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def visible(self, rollout_id: str, caller: Caller) -> Summary:
        """The rollout's row, if this caller may see it: what it may not see does not exist."""
        try:
            summary = await self._store.summary(rollout_id)
        except UnknownRollout:
            summary = None
        if summary is None or not (caller.admin or summary.caller == caller.name):
            raise UnknownRollout(f"unknown rollout_id: {rollout_id}")
        return summary

    async def messages(self, rollout_id: str, caller: Caller) -> Messages:
        """The agent's own transcript so far, in the shape of OpenCode's `GET /session/:id/message`."""
        summary = await self.visible(rollout_id, caller)
        entries = await self._store.read(rollout_id, kinds=KINDS)
        return Messages(
            rollout_id=rollout_id,
            status=STATUS[summary.stage],
            serve_session_id=summary.session or None,
            messages=transcript_of(entries),
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
