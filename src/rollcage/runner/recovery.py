"""Ends what dead processes left open, or leaves it to a server that may run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio

from rollcage.events import Ended, Entry, Event, Queued
from rollcage.runner.owners import Owners
from rollcage.store import Store, Summary
from rollcage.types import Outcome, Stage

BEFORE_AGENT = (Stage.QUEUED, Stage.PROVISION, Stage.SETUP)
"""Stages in which nothing was sampled yet: a rollout that dies there can begin anew."""
TOGETHER = 1000
"""Rollouts of dead processes that are looked at together."""
_DIED = "the process that ran it died before it ended"

EventListener = Callable[[str, Event], None]
"""Gets every event that this process logs, with the rollout's id, once it is on the disk."""


def ignore(rollout_id: str, event: Event) -> None:
    """Listens to nothing."""


async def recover(store: Store, owners: Owners, on_event: EventListener = ignore) -> list[str]:
    """End every open rollout whose process is dead; its boxes died with it. Returns their ids, and tells `on_event`.

    Those that a server may resume are left to it, unless somebody asked for them to stop.
    """
    ended = []
    dead = await _of_dead_owners(store, owners)
    for at in range(0, len(dead), TOGETHER):
        over = await _endings(store, dead[at : at + TOGETHER])
        for (rollout_id, event), result in zip(over, await store.append_all(over), strict=True):
            if isinstance(result, Entry):  # else another process was quicker
                ended.append(rollout_id)
                on_event(rollout_id, event)
    return ended


async def orphans(store: Store, owners: Owners) -> list[Summary]:
    """The rollouts whose process is dead and that a server may resume, oldest first."""
    return [each for each in reversed(await _of_dead_owners(store, owners)) if _waits_for_a_server(each)]


async def _of_dead_owners(store: Store, owners: Owners) -> list[Summary]:
    found = await store.list(limit=1_000_000, open_only=True)
    dead = {owner for owner in {each.owner for each in found} if not owners.alive(owner)}
    return [each for each in found if each.owner in dead]


async def _endings(store: Store, dead: Sequence[Summary]) -> list[tuple[str, Ended]]:
    """How the rollouts of dead processes end, those that a server may resume left out."""
    waiting = {each.id for each in dead if _waits_for_a_server(each)}
    stopped = {entry.rollout_id for entry in await store.read_all(tuple(waiting), "abort_requested")}
    early = [each.id for each in dead if each.id not in waiting and each.stage in BEFORE_AGENT]
    why = {
        entry.rollout_id: f"{entry.event.not_resumable_because}; "
        for entry in await store.read_all(early, "queued")
        if isinstance(entry.event, Queued) and entry.event.not_resumable_because
    }
    aborted = Ended(outcome=Outcome.ABORTED, error=f"aborted: stopped on request; {_DIED}", error_code="aborted")
    return [(each.id, aborted) for each in dead if each.id in stopped] + [
        (each.id, crashed(f"{why.get(each.id, '')}start it again")) for each in dead if each.id not in waiting
    ]


def crashed(why: str) -> Ended:
    """The end of a rollout whose process died. `why`: what to do, or why no server may run it."""
    return Ended(outcome=Outcome.CRASHED, error=f"crashed: {_DIED}; {why}", error_code="crashed")


def _waits_for_a_server(summary: Summary) -> bool:
    return summary.resumable and summary.stage in BEFORE_AGENT


async def end_if_owner_dies(store: Store, rollout_id: str) -> None:
    """Wait until a rollout has ended; if the process that runs it dies first, end it, or leave it to a server."""
    owners = Owners.beside(store)
    while True:
        summary = await store.summary(rollout_id)
        if summary.outcome is not None:
            return
        if not owners.alive(summary.owner):
            await recover(store, owners)
        await anyio.sleep(1)
