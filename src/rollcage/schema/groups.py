"""Groups, n rollouts of one task: what callers ask for, and what they are told. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollcage.errors import UsageError
from rollcage.schema.option import Option
from rollcage.schema.request import RolloutRequest
from rollcage.schema.views import Status
from rollcage.types import Blame, Identifier, Outcome, Value

MOST = 1024
"""Rollouts of one group."""
GROUPS_AT_ONCE = 1000
"""Groups that one request may ask for."""

Until = Literal["any", "all"]
"""`any`: some rollout has ended that the cursor has not passed. `all`: every group is done."""


class GroupRequest(RolloutRequest):
    """n rollouts of one task: the arguments of a rollout, and how many.

    With a `seed` each rollout gets one of its own that follows from it; without, each is left to the engine. With an
    `idempotency_key` a repeated request joins what the first one started, and starts what is missing of it.
    """

    n: Annotated[int, Option("-n")] = Field(default=1, ge=1, le=MOST)
    """How many rollouts."""
    min_usable: Annotated[int, Option()] = Field(default=0, ge=0, le=MOST)
    """The group is done with so many usable ones, scored and with tokens to train on, and the rest is stopped; 0: all
    run to their end."""

    @model_validator(mode="after")
    def _can_be_had(self) -> GroupRequest:
        check_group(self.n, self.min_usable, self.mode)
        return self


def check_group(n: int, min_usable: int, mode: str) -> None:
    """ValueError where a group can never have what is asked of it."""
    if min_usable > n:
        raise ValueError(f"min_usable is {min_usable}, and n is {n}: no more than n can be usable")
    if min_usable and mode == "black_box":
        raise ValueError("min_usable counts recorded tokens, and mode black_box records none")


class GroupMember(Value):
    """One rollout of a group."""

    rollout_id: str
    """Names it."""
    group_id: str = ""
    """The group."""
    index: int = 0
    """Its number in the group, from 0."""
    status: Status
    """Where it is."""
    outcome: Outcome | None = None
    """How it ended; null while it runs."""
    reward: float | None = None
    """What it earned; null where nothing was scored, which is not 0."""
    usable: bool = False
    """It is scored, and has tokens to train on."""
    blame: Blame | None = None
    """Whose fault it is that an ended one has no reward; null where nobody's, or where it has one."""
    error: str | None = None
    """What broke."""
    turns: int = 0
    """Model calls so far."""
    trainable_tokens: int = 0
    """Sampled tokens that can be trained on."""
    policy_version: str = ""
    """The weights of its first turn; before that, those it was started with."""


class GroupState(Value):
    """Where a group is: counted from its rollouts."""

    group_id: str
    """Names it."""
    task_id: str = ""
    """The caller's own name for the task."""
    n: int = 0
    """Rollouts that were asked for."""
    min_usable: int = 0
    """How many usable ones are enough; 0: all run to their end."""
    open: int = 0
    """Rollouts that wait or run."""
    ended: int = 0
    """Rollouts that have ended."""
    scored: int = 0
    """Those of them that have a reward."""
    usable: int = 0
    """Those of them that have tokens to train on, too."""
    done: bool = False
    """Nothing more is to be waited for: all have ended, or there are `min_usable` usable ones."""


class Group(GroupState):
    """A group with its rollouts."""

    joined: bool = False
    """Of a start: the idempotency key named a group that was there already, whole."""
    rollouts: tuple[GroupMember, ...] = ()
    """In the order of their numbers."""

    @property
    def state(self) -> GroupState:
        """The same without the rollouts."""
        return GroupState.model_construct(None, **{name: getattr(self, name) for name in GroupState.model_fields})


class GroupPage(Value):
    """What has ended in some groups since the cursor."""

    groups: tuple[GroupState, ...] = ()
    """Where each of them is."""
    ended: tuple[GroupMember, ...] = ()
    """Rollouts that ended after the cursor, in the order of their ends."""
    cursor: int = 0
    """Give it with the next request to get what ends after these."""
    done: bool = False
    """Whether every group is done."""


class AbortedRollouts(Value):
    """Rollouts were asked to stop."""

    rollout_ids: tuple[str, ...] = ()
    """Those that had not ended."""


class Capacity(Value):
    """How much more can be started, for callers that keep a number of rollouts in flight."""

    at_once: int
    """Rollouts that run at the same time: this caller's, where its key has a number of its own."""
    running: int
    """Rollouts that have a place, of all callers."""
    waiting: int
    """Rollouts that wait for one, of all callers."""
    mine: int
    """This caller's among both."""
    free: int
    """How many more of this caller would begin at once."""
    queue: int | None = None
    """How many may wait; null: any number."""
    paused: bool = False
    """Whether model calls wait."""
    policy_version: str = ""
    """What calls are stamped with since the last resume; empty: what each rollout was started with."""


class GatewayPause(Value):
    """How to pause."""

    running: Literal["finish", "cut"] = "finish"
    """Model calls that run: `finish` waits for their ends, `cut` breaks them off. A cut call is in the log as broken
    and is never trained; it is asked again after the pause, by the gateway where the agent has heard nothing of the
    answer, else by the agent."""
    wait_s: float = Field(default=600, ge=0, le=3600)
    """How long to wait for the running ones. After that the answer says how many are left, and the pause goes on."""
    longest_s: float = Field(default=600, gt=0, le=86400)
    """How long a new call waits for the resume; after that it has failed, and its rollout has no reward."""


class GatewayResume(Value):
    """How to go on."""

    policy_version: Identifier = ""
    """The weights that calls ask from now on, for every rollout that was started before; empty: as before."""


class GatewayState(Value):
    """Where the gateway is."""

    paused: bool
    """Whether new calls wait."""
    running: int = 0
    """Calls that run."""
    waiting: int = 0
    """Calls that wait."""
    policy_version: str = ""
    """The weights that the last resume named."""


def group_of(group_id: str, members: Iterable[GroupMember], *, n: int, min_usable: int, task_id: str) -> Group:
    """The fold of a group's rollouts."""
    members = tuple(sorted(members, key=lambda member: member.index))
    ended = [member for member in members if member.outcome is not None]
    usable = sum(member.usable for member in ended)
    return Group(
        group_id=group_id,
        task_id=task_id,
        n=n,
        min_usable=min_usable,
        open=len(members) - len(ended),
        ended=len(ended),
        scored=sum(member.reward is not None for member in ended),
        usable=usable,
        done=len(ended) == len(members) or 0 < min_usable <= usable,
        rollouts=members,
    )


_NUMBERS = re.compile(r"(\d+)")


def is_older(version: str, than: str) -> bool:
    """Whether a policy version comes before another: numbers in it count as numbers (`step-9` before `step-10`), the
    rest as text. One without a name is never older.
    """
    return bool(version) and _parts(version) < _parts(than)


def _parts(version: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBERS.split(version) if part]


def check_version(version: str) -> str:
    """UsageError where there is no version to compare with."""
    if not version:
        raise UsageError("is empty", argument="policy_version_below", remedy="name the first version to keep")
    return version
