"""The tools for agents and programs: rollouts, groups, the gateway, batches. Each is declared once, by its function."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Literal

import anyio
from pydantic import Field

from rollcage.evaluation.batches import BatchReport
from rollcage.mcp.types import RESERVED
from rollcage.results.result import RolloutResult
from rollcage.schema.batches import BatchRequest
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
from rollcage.schema.request import RolloutRequest
from rollcage.schema.views import Aborted, EventPage, Messages, RolloutState, Started, unknown_state
from rollcage.server.auth import Caller
from rollcage.server.mcp_call import CallProgress, RolloutTool, ToolFailure
from rollcage.server.service import Service
from rollcage.trajectory import Sequence
from rollcage.types import Value


class RunArguments(RolloutRequest):
    """What `run_rollout` takes: a rollout, and what becomes of it if nobody waits for it any more."""

    on_disconnect: Literal["continue", "abort"] = "continue"
    """What happens when the caller goes away, cancels or runs out of time before the end: `continue` lets the rollout
    go on (an `idempotency_key` finds it again), `abort` stops it. Without meaning for `start_rollout`."""


class RolloutId(Value):
    """Names one rollout."""

    rollout_id: str = Field(max_length=200)
    """The id that `start_rollout` gave."""


class EventArguments(RolloutId):
    """Which part of a log is wanted."""

    after: int = Field(default=0, ge=0, lt=2**63)
    """Only events with a higher `seq` than this."""


class FinalizeArguments(RolloutId):
    """How long to wait for the end."""

    wait_s: float = Field(default=300, ge=0)
    """Seconds to wait for the end; after that the answer says how far it is, with `outcome` null."""


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


class BatchName(Value):
    """Names one batch."""

    name: str = Field(max_length=200)
    """The name that `start_batch` was given, or gave."""


async def run_rollout(service: Service, wanted: RunArguments, caller: Caller, progress: CallProgress) -> RolloutResult:
    """Run one rollout to its end: a coding agent works on the instruction in a box of its own, then its work is
    verified. Gives the reward, every model call with its tokens, and the files it left. Takes minutes."""
    started = await service.start(wanted, caller)
    progress.rollout_id = started.rollout_id
    try:
        if progress.wanted:
            async with aclosing(await service.follow(started.rollout_id, caller)) as entries:
                async for entry in entries:
                    progress.see(entry.event)
        return await service.finalize(started.rollout_id, caller)
    except anyio.get_cancelled_exc_class():
        # Whoever joined a rollout by its idempotency key is not the one to end it.
        if wanted.on_disconnect == "abort" and not started.joined:
            with anyio.CancelScope(shield=True):
                await service.abort(started.rollout_id, caller, reason="whoever asked for it went away")
        raise


async def start_rollout(service: Service, wanted: RunArguments, caller: Caller, progress: CallProgress) -> Started:
    """Start a rollout and return at once; the other tools follow it by its rollout_id."""
    return await service.start(wanted, caller)


async def get_state(service: Service, wanted: RolloutId, caller: Caller, progress: CallProgress) -> RolloutState:
    """Where a rollout is: queued, starting, running, verifying or done, and how many model calls it has made."""
    return await service.state(wanted.rollout_id, caller)


async def get_messages(service: Service, wanted: RolloutId, caller: Caller, progress: CallProgress) -> Messages:
    """The agent's own transcript so far, live: messages with their parts."""
    return await service.messages(wanted.rollout_id, caller)


async def subscribe_events(
    service: Service, wanted: EventArguments, caller: Caller, progress: CallProgress
) -> EventPage:
    """A page of a rollout's events after a given one, and the address that streams them as server-sent events."""
    return await service.events(wanted.rollout_id, caller, after=wanted.after)


async def abort_rollout(service: Service, wanted: RolloutId, caller: Caller, progress: CallProgress) -> Aborted:
    """Stop a rollout: the model call in flight is cut, the agent dies, the box is gone."""
    return await service.abort(wanted.rollout_id, caller, reason="asked for by abort_rollout")


async def finalize_rollout(
    service: Service, wanted: FinalizeArguments, caller: Caller, progress: CallProgress
) -> RolloutResult:
    """Wait for a rollout's end and get what it came to; asking again gives the same answer."""
    progress.rollout_id = wanted.rollout_id
    return await service.finalize(wanted.rollout_id, caller, wait_s=wanted.wait_s)


async def start_group(service: Service, wanted: GroupRequest, caller: Caller, progress: CallProgress) -> Group:
    """Start n rollouts of one task at once; with min_usable, the rest is stopped when so many are usable."""
    return await service.groups.start(wanted, caller)


async def wait_groups(service: Service, wanted: WaitArguments, caller: Caller, progress: CallProgress) -> GroupPage:
    """Wait until rollouts of some groups end; tells which ended since the cursor, with reward or blame."""
    return await service.groups.wait(
        wanted.group_ids, caller, until=wanted.until, cursor=wanted.cursor, wait_s=wanted.wait_s
    )


async def abort_group(
    service: Service, wanted: AbortArguments, caller: Caller, progress: CallProgress
) -> AbortedRollouts:
    """Stop what still runs of a group, or all open rollouts of older weights."""
    if wanted.group_id:
        return await service.groups.abort(wanted.group_id, caller)
    return await service.groups.abort_older(wanted.policy_version_below, caller)


async def get_group_sequences(
    service: Service, wanted: SequenceArguments, caller: Caller, progress: CallProgress
) -> GroupSequences:
    """The ended rollouts of a group as merged token sequences, for training."""
    group, rows = await service.groups.sequences(
        wanted.group_id, caller, usable_only=wanted.usable_only, per_turn=wanted.per_turn
    )
    return GroupSequences.model_construct(None, group=group, sequences=tuple(rows))


async def pause_gateway(service: Service, wanted: GatewayPause, caller: Caller, progress: CallProgress) -> GatewayState:
    """Let no model call begin while weights are changed; returns when none runs. For admins."""
    return await service.groups.pause(wanted, caller)


async def resume_gateway(
    service: Service, wanted: GatewayResume, caller: Caller, progress: CallProgress
) -> GatewayState:
    """Let model calls begin again, with the weights that are named. For admins."""
    return service.groups.resume(wanted, caller)


async def start_batch(service: Service, wanted: BatchRequest, caller: Caller, progress: CallProgress) -> BatchReport:
    """Run every task x model x agent n times, as one batch, and return at once; the same again goes on with it."""
    return (await service.batches.start(wanted, caller))[0]


async def get_batch(service: Service, wanted: BatchName, caller: Caller, progress: CallProgress) -> BatchReport:
    """What a batch came to so far: where it is, means with intervals and pass@k by model and by task, what broke."""
    return await service.batches.report(wanted.name, caller)


def _no_result(rollout_id: str) -> RolloutResult:
    error = f"unknown rollout_id: {rollout_id}"
    return RolloutResult(task_id="", rollout_id=rollout_id, error=error, error_code="unknown_rollout")


def _no_messages(rollout_id: str) -> Messages:
    return Messages(rollout_id=rollout_id, status="unknown")


def _no_events(rollout_id: str) -> EventPage:
    return EventPage(rollout_id=rollout_id, status="unknown", ended=True)


def _not_aborted(rollout_id: str) -> Aborted:
    return Aborted(rollout_id=rollout_id, aborted=False, reason=f"unknown rollout_id: {rollout_id}")


_ROLLOUTS = (
    RolloutTool(run_rollout, is_slow=True),
    RolloutTool(start_rollout, is_brief=True),
    RolloutTool(get_state, unknown_state, reads_only=True, is_brief=True),
    RolloutTool(get_messages, _no_messages, reads_only=True),
    RolloutTool(subscribe_events, _no_events, reads_only=True),
    RolloutTool(abort_rollout, _not_aborted, is_brief=True),
    RolloutTool(finalize_rollout, _no_result, reads_only=True),
)
_GROUPS_AND_BATCHES = (
    RolloutTool(start_group),
    RolloutTool(wait_groups, reads_only=True),
    RolloutTool(abort_group, is_brief=True),
    RolloutTool(get_group_sequences, reads_only=True),
    RolloutTool(pause_gateway, is_brief=True),
    RolloutTool(resume_gateway, is_brief=True),
    RolloutTool(start_batch),
    RolloutTool(get_batch, reads_only=True),
)

TOOLS = {tool.name: tool for tool in _ROLLOUTS}
"""What the OpenEnv environment offers, by name: rollouts."""
EVERY_TOOL = TOOLS | {tool.name: tool for tool in _GROUPS_AND_BATCHES}
"""What the MCP endpoint offers: groups, the gateway, and batches, beside them."""

if RESERVED & EVERY_TOOL.keys():
    raise AssertionError(f"reserved tool names: {RESERVED & EVERY_TOOL.keys()}")


def find(name: object, known: Mapping[str, RolloutTool] = TOOLS) -> RolloutTool:
    """The tool of that name; ToolFailure where there is none."""
    if isinstance(name, str) and name in known:
        return known[name]
    raise ToolFailure(f"unknown tool {name!r}; known are {', '.join(known)}", "unknown_tool")
