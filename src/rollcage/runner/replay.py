"""Plays a recorded rollout again: the same task in a new box, the model's recorded answers; or forks it at a turn.

What a replay found is not noted anywhere: it is the difference between two logs, and is made from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rollcage.errors import UsageError
from rollcage.results.fold import Rollout
from rollcage.runner.reverify import Correction
from rollcage.runner.runner import Runner, StartOptions
from rollcage.simulators.recorded import OnDifference, Record, RecordedModel, asked, difference
from rollcage.types import NO_MODEL, Endpoint, JsonObject, Origin, Turn, Value


class TurnDifference(Value):
    """Where a replay asked something else."""

    turn: int
    """The turn of the original, from 1; one more than it has where the replay asked further."""
    what: str
    """The first difference, in words."""


class ReplayReport(Value):
    """A replay beside its original."""

    original: str
    replay: str
    reward_before: float | None
    reward: float | None
    outcome_before: str | None
    outcome: str | None
    requests: int
    """Model calls of the original."""
    same: int
    """Those that the replay made letter by letter."""
    alike: int
    """Those that differ in dates, durations and ids alone."""
    differences: tuple[TurnDifference, ...] = ()

    @property
    def same_reward(self) -> bool:
        """Whether it earned the same."""
        return self.reward == self.reward_before

    @property
    def same_requests(self) -> bool:
        """Whether the agent asked the same, but for dates, durations and ids."""
        return not self.differences


def report_of(original: Rollout, replay: Rollout) -> ReplayReport:
    """What a replay did otherwise, and a fork before its turn: out of the two logs."""
    left = list(replay.turns)
    same = alike = 0
    odd: list[Turn] = []
    fork_turn = replay.origin.turn if replay.origin else None
    turns = original.turns if fork_turn is None else [turn for turn in original.turns if turn.index < fork_turn - 1]
    for turn in turns:
        twin = next((each for each in left if asked(each.request) == asked(turn.request)), None)
        if twin is not None:
            same += 1
        else:
            twin = next((each for each in left if difference(turn.request, each.request) is None), None)
            alike += twin is not None
        if twin is None:
            odd.append(turn)
        else:
            left.remove(twin)
    found = []
    for turn in odd:
        other = left.pop(0) if left else None
        what = str(difference(turn.request, other.request)) if other else "the agent did not ask"
        found.append(TurnDifference(turn=turn.index + 1, what=what))
    if fork_turn is None:
        after = len(original.turns) + 1
        found += [TurnDifference(turn=after, what="the agent asked once more") for _ in left]
    return ReplayReport(
        original=original.id,
        replay=replay.id,
        reward_before=original.reward,
        reward=replay.reward,
        outcome_before=original.outcome,
        outcome=replay.outcome,
        requests=len(turns),
        same=same,
        alike=alike,
        differences=tuple(found),
    )


async def replay(
    runner: Runner,
    original: Rollout,
    *,
    on_difference: OnDifference = "stop",
    live: Endpoint | None = None,
    correction: Correction | None = None,
) -> tuple[Rollout, ReplayReport]:
    """Run it again with the recorded answers, to the end. `correction`: the task as it is now, and its box."""
    _check(original)
    if on_difference == "live" and live is None:
        raise UsageError("no model is named to hand over to", argument="model", remedy="give one: {model}")
    record = Record(original.turns, on_difference, live=live if on_difference == "live" else None)
    origin = Origin(rollout_id=original.id, how="replay")
    (played,) = await _played(runner, original, [record], origin, correction=correction)
    return played, report_of(original, played)


async def fork(
    runner: Runner,
    original: Rollout,
    *,
    at: int,
    live: Endpoint,
    n: int = 1,
    edit: JsonObject | None = None,
    on_difference: OnDifference = "stop",
) -> list[Rollout]:
    """`n` rollouts that share the turns before `at` (from 1) and go on live; `edit`: the answer of that turn.

    `on_difference`: what is done where the agent asks something else before that turn.
    """
    _check(original)
    if not 1 <= at <= len(original.turns):
        raise UsageError(f"there is no turn {at}: it has {len(original.turns)}", argument="at")
    group = f"fork:{original.id}:{at}"
    before, later = ([turn for turn in original.turns if (turn.index < at - 1) is first] for first in (True, False))
    records = [Record(before, on_difference, later=later, edited=edit, live=live) for _ in range(n)]
    origin = Origin(rollout_id=original.id, how="fork", turn=at, edited=edit is not None)
    return await _played(runner, original, records, origin, group)


def _check(original: Rollout) -> None:
    if not original.ended:
        raise UsageError(f"{original.id} has not ended", remedy="wait for its end")
    if original.reverifies:
        raise UsageError(f"{original.id} is a re-verification", remedy=f"name the rollout: {original.reverifies}")
    if original.job.mode == "black_box":
        raise UsageError(f"{original.id} was not recorded: its mode is black_box")


async def _played(
    runner: Runner,
    original: Rollout,
    records: Sequence[Record],
    origin: Origin,
    group: str = "",
    correction: Correction | None = None,
) -> list[Rollout]:
    from contextlib import AsyncExitStack

    async with AsyncExitStack() as stack:
        ids = []
        for record in records:
            job = original.job.model_copy(update={"group_id": group or original.job.group_id})
            if correction:
                job = job.model_copy(update={"task": correction.task, "sandbox": correction.sandbox or job.sandbox})
            if job.model.kind != NO_MODEL.kind:
                server = await stack.enter_async_context(RecordedModel(record, model=job.model.model))
                job = job.model_copy(update={"model": server.endpoint(job.model)})
            ids.append(await runner.start(job, StartOptions(origin=origin)))
            if origin.how == "fork":  # what does not get to its turn is no fork, and earns nothing
                record.stop = partial(runner.abort, ids[-1])
        return [await runner.wait(rollout_id) for rollout_id in ids]
