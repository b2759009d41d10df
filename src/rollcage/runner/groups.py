"""Groups: n rollouts of one task that are started, waited for, stopped and handed to a trainer together.

A group is a fold of its rollouts' logs. Each says, with its first event, how many they are and how many usable ones are
enough; so whoever runs one of them after a crash knows when to stop it.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
from anyio import to_thread
from anyio.abc import TaskStatus

from rollcage.errors import AlreadyStarted, StoreError, UnknownGroup, UsageError
from rollcage.results.fold import Rollout
from rollcage.schema.groups import (
    Group,
    GroupMember,
    GroupPage,
    Until,
    check_group,
    check_version,
    group_of,
    is_older,
)
from rollcage.schema.views import STATUS
from rollcage.store import Store, Summary
from rollcage.trajectory import sequences
from rollcage.trajectory.sequence import Sequence as TokenSequence
from rollcage.types import GroupPlace, Job

if TYPE_CHECKING:
    from rollcage.runner.runner import Runner, StartOptions

LOOK_S = 5.0
"""How often those who wait look whether a process that runs some of it has died."""
TRAINED_KINDS = ("queued", "turn_ended", "scored", "ended")
"""The events that sequences are made of."""


class Groups:
    """The groups in a runner's log. Any number of tasks may use it at once."""

    def __init__(self, runner: Runner, store: Store) -> None:
        """Use `Runner.groups`."""
        self._runner, self._store = runner, store

    async def start(self, job: Job, n: int, *, min_usable: int = 0, options: StartOptions | None = None) -> Group:
        """Start n rollouts of one job. All of them are in the log when this returns.

        `min_usable`: done with so many that are scored and have tokens to train on; the rest is stopped. A job without
        `group_id` gets one. Its sampling seed, if it has one, becomes n seeds that follow from it; None stays None: the
        engine's own.
        """
        jobs = [_member(job, index) for index in range(n)]
        return await self.start_jobs(jobs, min_usable=min_usable, options=options)

    async def start_jobs(
        self, jobs: Sequence[Job], *, min_usable: int = 0, options: StartOptions | None = None
    ) -> Group:
        """As `start`, for jobs that differ in more than their seeds: in their scripted models, say."""
        from rollcage.runner.runner import StartOptions

        options = options or StartOptions()
        try:
            check_group(len(jobs), min_usable, jobs[0].mode if jobs else "")
        except ValueError as error:
            raise UsageError(str(error), argument="min_usable") from None
        if not jobs:
            raise UsageError("must be at least 1", argument="n")
        key, caller = options.idempotency_key, options.quota.caller
        group_id = jobs[0].group_id or new_id(caller, key)
        if await self._store.groups([group_id], caller) and not (
            key and await self._store.started(caller, key_of(key, 0))
        ):
            raise UsageError(f"{group_id!r} has rollouts already", argument="group_id", remedy="use a new name")
        starts = []
        for index, job in enumerate(jobs):
            place = GroupPlace(index=index, size=len(jobs), min_usable=min_usable)
            mine = replace(options, idempotency_key=key_of(key, index), group=place)
            starts.append((job.model_copy(update={"group_id": group_id}), mine))
        begun = await self._runner.start_all(starts)
        joined = all(isinstance(each, AlreadyStarted) for each in begun)
        return (await self.get(group_id, caller)).model_copy(update={"joined": joined})

    async def get(self, group_id: str, caller: str | None = None) -> Group:
        """A group with its rollouts; UnknownGroup where there is none. `caller`: only its own rollouts."""
        return (await self._groups([group_id], caller))[0][0]

    async def wait(
        self,
        group_ids: Sequence[str],
        *,
        until: Until = "all",
        cursor: int = 0,
        wait_s: float | None = None,
        caller: str | None = None,
    ) -> GroupPage:
        """What has ended in these groups since the cursor. `until` says when to answer, `wait_s` when at the latest.

        Waiting for `any` also ends when every group is done: then nothing more is worth waiting for.
        """
        news = self._store.watch_kind("ended")
        page = GroupPage()
        with anyio.move_on_after(wait_s):
            while True:
                news.take()
                page = await self._page(group_ids, cursor, caller)
                if page.done or (until == "any" and page.ended):
                    return page
                with anyio.move_on_after(LOOK_S) as patience:
                    await news.wait()
                if patience.cancelled_caught:
                    await self._runner.recover()
        return page if page.groups else await self._page(group_ids, cursor, caller)

    async def ended(self, group_ids: Sequence[str], *, cursor: int = 0) -> AsyncGenerator[Rollout, None]:
        """Each rollout of these groups as it ends, until every group is done. Use `aclosing`."""
        done = False
        while not done:
            page = await self.wait(group_ids, until="any", cursor=cursor)
            for member in page.ended:
                yield await self._store.rollout(member.rollout_id)
            cursor, done = page.cursor, page.done

    async def abort(self, group_id: str, *, reason: str = "", caller: str | None = None) -> list[str]:
        """Stop what still runs of a group; the ids of those that had not ended."""
        members = (await self.get(group_id, caller)).rollouts
        return await self._stop([each.rollout_id for each in members if each.outcome is None], reason)

    async def abort_older(self, policy_version: str, *, reason: str = "", caller: str | None = None) -> list[str]:
        """Stop all open rollouts whose policy version is older than this one (see `is_older`); their ids."""
        check_version(policy_version)
        found = await self._store.list(limit=1_000_000, open_only=True)
        old = [
            each.id for each in found if is_older(each.policy_version, policy_version) and caller in (None, each.caller)
        ]
        return await self._stop(old, reason or f"its policy version is older than {policy_version}")

    async def sequences(
        self, group_id: str, *, per_turn: bool = False, usable_only: bool = False, caller: str | None = None
    ) -> list[TokenSequence]:
        """The ended rollouts of a group as merged sequences, in the order of their numbers.

        A rollout without reward has `reward` None, and `blame`; `usable_only` leaves it out.
        """
        found: list[TokenSequence] = []
        for member in (await self.get(group_id, caller)).rollouts:
            if member.outcome is None or (usable_only and not member.usable):
                continue
            rollout = Rollout.fold(await self._store.read(member.rollout_id, kinds=TRAINED_KINDS))
            found += await to_thread.run_sync(lambda: sequences(rollout, per_turn=per_turn))  # noqa: B023
        return found

    async def stop_when_enough(self, *, task_status: TaskStatus[None]) -> None:
        """Stop what this runner runs of each group that has as many usable rollouts as it wants."""
        async with aclosing(self._store.follow_kind("ended")) as ends:
            task_status.started()
            async for entry in ends:
                with suppress(StoreError):  # a full disk, say: the next end is looked at again
                    await self.settle(await self._store.summary(entry.rollout_id))

    async def settle(self, member: Summary) -> None:
        """Stop what this runner runs of a rollout's group, if the group has enough."""
        if not member.min_usable:
            return
        group = await self.get(member.group_id, member.caller)
        if group.usable >= group.min_usable:
            mine = set(self._runner.open_ids)
            rest = [each.rollout_id for each in group.rollouts if each.outcome is None and each.rollout_id in mine]
            await self._stop(rest, f"its group has the {group.min_usable} usable rollouts that it wants")

    async def _stop(self, rollout_ids: Sequence[str], reason: str) -> list[str]:
        return [each for each in rollout_ids if await self._runner.abort(each, reason)]

    async def _page(self, group_ids: Sequence[str], cursor: int, caller: str | None) -> GroupPage:
        found = await self._groups(group_ids, caller)
        ended = [
            (at, member)
            for group, ends in found
            for member in group.rollouts
            if (at := ends.get(member.rollout_id, 0)) > cursor
        ]
        ended.sort(key=lambda each: each[0])
        return GroupPage(
            groups=tuple(group.state for group, _ in found),
            ended=tuple(member for _, member in ended),
            cursor=ended[-1][0] if ended else cursor,
            done=all(group.done for group, _ in found),
        )

    async def _groups(self, group_ids: Sequence[str], caller: str | None) -> list[tuple[Group, Mapping[str, int]]]:
        """Groups in the order they were asked for, and where in the log each of their rollouts ended."""
        rows: dict[str, list[tuple[Summary, int | None]]] = {each: [] for each in group_ids}
        for summary, ended in await self._store.groups(list(rows), caller):
            rows[summary.group_id].append((summary, ended))
        found: list[tuple[Group, Mapping[str, int]]] = []
        for group_id, members in rows.items():
            if not members:
                raise UnknownGroup(f"no group {group_id!r}")
            first = members[0][0]
            group = group_of(
                group_id,
                [member_of(summary) for summary, _ in members],
                n=max(first.group_size, len(members)),
                min_usable=first.min_usable,
                task_id=first.task_id,
            )
            found.append((group, {summary.id: ended for summary, ended in members if ended is not None}))
        return found


def member_of(summary: Summary) -> GroupMember:
    """A rollout's row as a member of its group."""
    return GroupMember(
        rollout_id=summary.id,
        group_id=summary.group_id,
        index=summary.group_index,
        status=STATUS[summary.stage],
        outcome=summary.outcome,
        # Before the end it may still be lost: nothing is scored until then.
        reward=summary.reward if summary.outcome else None,
        usable=summary.outcome is not None and summary.reward is not None and summary.trainable_tokens > 0,
        blame=summary.blame,
        error=summary.error,
        turns=summary.turns,
        trainable_tokens=summary.trainable_tokens,
        policy_version=summary.policy_version,
    )


def seed_of(seed: int | None, index: int) -> int | None:
    """The sampling seed of one rollout of a group: never that of another one; None stays None."""
    if seed is None:
        return None
    start = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    return (start + index) % 2**31  # what every engine takes


def key_of(idempotency_key: str, index: int) -> str:
    """The idempotency key of one rollout of a group."""
    return f"{idempotency_key}#{index}" if idempotency_key else ""


def new_id(caller: str, idempotency_key: str) -> str:
    """A name for a group; the same for the same key, so that a repeated start finds it."""
    if not idempotency_key:
        return secrets.token_hex(8)
    return hashlib.blake2b(f"{caller}\0{idempotency_key}".encode(), digest_size=8).hexdigest()


def _member(job: Job, index: int) -> Job:
    sampling = job.model.sampling
    own = sampling.model_copy(update={"seed": seed_of(sampling.seed, index)})
    return job.model_copy(update={"model": job.model.model_copy(update={"sampling": own})})
