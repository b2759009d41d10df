"""What the server can do with groups, without any HTTP: start, wait, stop, hand over; capacity; pause and resume."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from rollcage.events import Queued
from rollcage.runner import StartOptions
from rollcage.runner.groups import key_of, new_id, seed_of
from rollcage.schema.errors import NotAllowed
from rollcage.schema.fingerprint import Conflict, check_same, fingerprint
from rollcage.schema.groups import (
    AbortedRollouts,
    Capacity,
    GatewayPause,
    GatewayResume,
    GatewayState,
    Group,
    GroupPage,
    GroupRequest,
    Until,
)
from rollcage.schema.nodes import Nodes
from rollcage.server.auth import Caller
from rollcage.trajectory import Sequence as TokenSequence

if TYPE_CHECKING:
    from rollcage.server.service import Service


class GroupService:
    """Groups for many callers: each sees its own, an admin everybody's."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._runner, self._store = service.runner, service.store

    async def start(self, request: GroupRequest, caller: Caller) -> Group:
        """Start n rollouts of one task; a repeated request joins the first, and starts what is missing of it."""
        key = request.idempotency_key
        if key and (first := await self._store.started(caller.name, key_of(key, 0))):
            event = (await self._store.read(first, limit=1))[0].event
            if isinstance(event, Queued):
                await anyio.to_thread.run_sync(check_same, request, event.arguments, first)
        elif request.group_id and await self._store.groups([request.group_id], caller.name):
            raise Conflict("names a group that is there already", argument="group_id", remedy="use a new name")
        self._service.check_going()
        group_id = request.group_id or new_id(caller.name, key)
        same = await anyio.to_thread.run_sync(fingerprint, request) if key else {}
        jobs, because = [], ""
        for index in range(request.n):
            mine = request.model_copy(update={"seed": seed_of(request.seed, index), "group_id": group_id})
            job, because = await self._service.understood(mine)
            jobs.append(job)
        options = StartOptions(caller.quota, key, same, resumable=not because, not_resumable_because=because)
        try:
            return await self._runner.groups.start_jobs(jobs, min_usable=request.min_usable, options=options)
        finally:
            self._service.forget_unused(jobs)

    async def get(self, group_id: str, caller: Caller) -> Group:
        """A group with its rollouts."""
        return await self._runner.groups.get(group_id, await self._whose([group_id], caller))

    async def wait(
        self, group_ids: Sequence[str], caller: Caller, *, until: Until, cursor: int, wait_s: float
    ) -> GroupPage:
        """What has ended since the cursor."""
        whose = await self._whose(group_ids, caller)
        return await self._runner.groups.wait(group_ids, until=until, cursor=cursor, wait_s=wait_s, caller=whose)

    async def abort(self, group_id: str, caller: Caller, reason: str = "") -> AbortedRollouts:
        """Stop a group."""
        whose = await self._whose([group_id], caller)
        stopped = await self._runner.groups.abort(group_id, reason=reason or "asked for by the caller", caller=whose)
        return AbortedRollouts(rollout_ids=tuple(stopped))

    async def abort_older(self, policy_version: str, caller: Caller, reason: str = "") -> AbortedRollouts:
        """Stop open rollouts of older weights: this caller's; an admin's: everybody's."""
        whose = None if caller.admin else caller.name
        stopped = await self._runner.groups.abort_older(policy_version, reason=reason, caller=whose)
        return AbortedRollouts(rollout_ids=tuple(stopped))

    async def sequences(
        self, group_id: str, caller: Caller, *, usable_only: bool, per_turn: bool
    ) -> tuple[Group, list[TokenSequence]]:
        """The ended rollouts of a group as sequences, and the group."""
        whose = await self._whose([group_id], caller)
        group = await self._runner.groups.get(group_id, whose)
        return group, await self._runner.groups.sequences(
            group_id, usable_only=usable_only, per_turn=per_turn, caller=whose
        )

    def capacity(self, caller: Caller) -> Capacity:
        """How much more of this caller can be started."""
        queue, gate, limits = self._runner.queue, self._runner.gateway.gate, self._service.limits
        at_once = min(queue.at_once, caller.at_once or queue.at_once)
        running, waiting = queue.count(caller.name)
        free = min(queue.at_once - queue.running - queue.waiting, at_once - running - waiting)
        return Capacity(
            at_once=at_once,
            running=queue.running,
            waiting=queue.waiting,
            mine=running + waiting,
            free=max(0, free),
            queue=limits.queue if caller.queue is None else caller.queue,
            paused=gate.paused,
            policy_version=gate.policy_version,
        )

    def nodes(self, caller: Caller) -> Nodes:
        """The machines that run the rollouts of all callers."""
        _check_admin(caller)
        return Nodes(nodes=tuple(self._runner.nodes))

    async def pause(self, asked: GatewayPause, caller: Caller) -> GatewayState:
        """Let no model call of any rollout begin, until `resume`."""
        _check_admin(caller)
        with anyio.move_on_after(asked.wait_s):
            await self._runner.gateway.gate.pause(asked.running, wait_s=asked.longest_s)
        return self._gateway()

    def resume(self, asked: GatewayResume, caller: Caller) -> GatewayState:
        """Let calls begin again."""
        _check_admin(caller)
        self._runner.gateway.resume(asked.policy_version)
        return self._gateway()

    def _gateway(self) -> GatewayState:
        gate = self._runner.gateway.gate
        return GatewayState(
            paused=gate.paused, running=gate.running, waiting=gate.waiting, policy_version=gate.policy_version
        )

    async def _whose(self, group_ids: Sequence[str], caller: Caller) -> str | None:
        """Whose rollouts these names mean: the caller's own; for an admin who has none of them, anybody's."""
        if caller.admin and not await self._store.groups(list(group_ids), caller.name):
            return None
        return caller.name


def _check_admin(caller: Caller) -> None:
    if not caller.admin:
        raise NotAllowed("only an admin's key may pause the gateway: it serves everybody's rollouts")
