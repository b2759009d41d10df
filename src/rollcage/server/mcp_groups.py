"""The tools for groups: names, arguments, answers. No transport, as the rollout tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rollcage.schema.groups import (
    GROUPS_AT_ONCE,
    AbortedRollouts,
    GatewayPause,
    GatewayResume,
    GatewayState,
    Group,
    GroupPage,
    GroupRequest,
    Until,
)
from rollcage.server.auth import Caller
from rollcage.trajectory import Sequence
from rollcage.types import Value

if TYPE_CHECKING:
    from rollcage.server.service import Service


class GroupName(Value):
    """Names one group."""

    group_id: str = Field(max_length=200)
    """The id that `start_group` gave."""


class WaitArguments(Value):
    """For what to wait, and how long."""

    group_ids: tuple[str, ...] = Field(min_length=1, max_length=GROUPS_AT_ONCE)
    """The groups."""
    cursor: int = Field(default=0, ge=0, lt=2**53)
    """What the last answer said."""
    until: Until = "any"
    """Answer when a rollout has ended since the cursor, or when every group is done."""
    wait_s: float = Field(default=300, ge=0, le=3600)
    """Answer at the latest after so many seconds."""


class AbortArguments(Value):
    """What to stop: one of the two."""

    group_id: str = Field(default="", max_length=200)
    """What still runs of a group."""
    policy_version_below: str = Field(default="", max_length=200)
    """All open rollouts of older weights: `step-9` is older than `step-10`."""


class SequenceArguments(GroupName):
    """What is wanted of a group."""

    usable_only: bool = False
    """Leave out what was not scored."""
    per_turn: bool = False
    """One sequence per turn."""


class GroupSequences(Value):
    """A group as a trainer takes it."""

    group: Group
    """Where it is."""
    sequences: tuple[Sequence, ...] = ()
    """Its ended rollouts, merged."""


async def start(service: Service, request: GroupRequest, caller: Caller, progress: object) -> Group:
    """Start n rollouts of one task."""
    return await service.groups.start(request, caller)


async def wait(service: Service, wanted: WaitArguments, caller: Caller, progress: object) -> GroupPage:
    """What has ended since the cursor."""
    return await service.groups.wait(
        wanted.group_ids, caller, until=wanted.until, cursor=wanted.cursor, wait_s=wanted.wait_s
    )


async def abort(service: Service, wanted: AbortArguments, caller: Caller, progress: object) -> AbortedRollouts:
    """Stop a group, or what older weights began."""
    if wanted.group_id:
        return await service.groups.abort(wanted.group_id, caller)
    return await service.groups.abort_older(wanted.policy_version_below, caller)


async def sequences(service: Service, wanted: SequenceArguments, caller: Caller, progress: object) -> GroupSequences:
    """The merged sequences of a group."""
    group, rows = await service.groups.sequences(
        wanted.group_id, caller, usable_only=wanted.usable_only, per_turn=wanted.per_turn
    )
    return GroupSequences.model_construct(None, group=group, sequences=tuple(rows))


async def pause(service: Service, wanted: GatewayPause, caller: Caller, progress: object) -> GatewayState:
    """Let no model call begin."""
    return await service.groups.pause(wanted, caller)


async def resume(service: Service, wanted: GatewayResume, caller: Caller, progress: object) -> GatewayState:
    """Let calls begin again."""
    return service.groups.resume(wanted, caller)
