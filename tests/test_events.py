"""The fold: what each event does to the state of a rollout."""

from __future__ import annotations

import pytest

from rollcage.events import (
    EVENT,
    AbortRequested,
    AgentEmitted,
    AgentEnded,
    AgentStarted,
    BoxOpened,
    CommandEnded,
    CommandStarted,
    Ended,
    Entry,
    Event,
    FilesCollected,
    Queued,
    Scored,
    StageEnded,
    StageStarted,
    Suspicion,
    TurnEnded,
)
from rollcage.results.fold import Rollout
from rollcage.types import CommandResult, Endpoint, Job, Outcome, Reward, Stage, Task, Token, Turn

JOB = Job(task=Task(instruction="do it"), model=Endpoint(base_url="http://127.0.0.1:1/v1", model="tiny"))


def folded(*events: Event) -> Rollout:
    """The state after `queued` at time 100 and these events, one second apart."""
    log: list[Event] = [Queued(job=JOB, owner="me"), *events]
    return Rollout.fold(
        Entry(rollout_id="r", seq=number, time=99.0 + number, event=event) for number, event in enumerate(log, 1)
    )


def test_a_queued_rollout_has_a_job_and_nothing_else() -> None:
    assert folded() == Rollout(id="r", job=JOB, owner="me", created_at=100.0, last_seq=1)
    assert not folded().ended


def test_an_empty_log_is_no_rollout() -> None:
    with pytest.raises(ValueError, match="queued"):
        Rollout.fold([])


def test_the_stage_is_the_one_that_started_last() -> None:
    rollout = folded(StageStarted(stage=Stage.PROVISION), StageEnded(stage=Stage.PROVISION, seconds=0.5))
    assert (rollout.stage, rollout.last_seq) == (Stage.PROVISION, 3)
    assert folded(StageStarted(stage=Stage.SETUP), StageStarted(stage=Stage.AGENT)).stage is Stage.AGENT


def test_timings_are_the_seconds_of_each_stage_and_at_the_end_of_all() -> None:
    stages = [StageEnded(stage=Stage.SETUP, seconds=1.5), StageEnded(stage=Stage.AGENT, seconds=2.5)]
    assert folded(*stages).timings == {"setup": 1.5, "agent": 2.5}
    assert folded(*stages, Ended(outcome=Outcome.FINISHED)).timings == {"setup": 1.5, "agent": 2.5, "total": 3.0}


def test_the_first_box_is_the_rollouts_box() -> None:
    first = BoxOpened(sandbox_id="one", backend="local", notes=("no cgroups",))
    rollout = folded(first, BoxOpened(sandbox_id="two", backend="local", fresh=True))
    assert (rollout.sandbox_id, rollout.notes) == ("one", ("no cgroups",))


def test_commands_are_kept_by_their_stage() -> None:
    setup, verify = CommandResult(command="a", exit_code=0), CommandResult(command="b", exit_code=1)
    rollout = folded(
        CommandStarted(stage=Stage.SETUP, command="a"),
        CommandEnded(stage=Stage.SETUP, result=setup),
        CommandEnded(stage=Stage.VERIFY, result=verify),
        CommandEnded(stage=Stage.VERIFY, result=setup),
    )
    assert (rollout.setup, rollout.verify) == ((setup,), (verify, setup))


def test_what_the_agent_said_and_how_it_ended_is_kept() -> None:
    rollout = folded(
        AgentStarted(agent="opencode", version="1"),
        AgentEmitted(raw={"n": 1}),
        AgentEmitted(raw={"n": 2}),
        AgentEnded(exit_code=3, error="no", log_tail="bye"),
    )
    assert rollout.agent_raw == [{"n": 1}, {"n": 2}]
    assert (rollout.agent_exit_code, rollout.agent_error, rollout.agent_stderr_tail) == (3, "no", "bye")


def test_turns_suspicions_files_and_an_abort_are_kept() -> None:
    turns = [Turn(index=index, request={}, tokens=(Token("a", 1, -0.5),)) for index in range(2)]
    suspicion = Suspicion(what="a planted conftest", paths=("/x",))
    rollout = folded(
        *(TurnEnded(turn=turn) for turn in turns),
        suspicion,
        FilesCollected(files={"a": "b"}, extra=("big",)),
        AbortRequested(reason="enough"),
    )
    assert rollout.turns == tuple(turns)
    assert (rollout.suspicions, rollout.files, rollout.files_extra) == ((suspicion,), {"a": "b"}, ("big",))
    assert rollout.abort_requested and not rollout.ended


@pytest.mark.parametrize("outcome", Outcome)
def test_only_a_scored_outcome_keeps_its_reward(outcome: Outcome) -> None:
    reward = Reward(total=1.0, parts={"a": 1.0})
    rollout = folded(Scored(reward=reward), Ended(outcome=outcome, error="E: x", error_code="x"))
    scored = outcome in ("finished", "agent_timeout", "agent_failed", "limit_reached")
    assert rollout.score == (reward if scored else None)
    assert (rollout.reward, rollout.reward_parts) == ((1.0, {"a": 1.0}) if scored else (None, {}))
    assert rollout.ended and rollout.stage is Stage.ENDED
    assert (rollout.outcome, rollout.error, rollout.error_code, rollout.ended_at) == (outcome, "E: x", "x", 102.0)


def test_a_rollout_that_was_not_scored_has_no_reward_and_not_zero() -> None:
    assert folded(Ended(outcome=Outcome.FINISHED)).reward is None
    assert folded(Scored(reward=Reward(total=0.0)), Ended(outcome=Outcome.FINISHED)).reward == 0.0


def test_a_fold_is_a_value_like_any_other() -> None:
    rollout = folded(TurnEnded(turn=Turn(index=0, request={"a": 1})), Ended(outcome=Outcome.FINISHED))
    assert Rollout.model_validate_json(rollout.model_dump_json()) == rollout


def test_events_are_told_apart_by_their_kind() -> None:
    event = AgentEnded(exit_code=None, timed_out=True)
    assert EVENT.validate_python(event.model_dump(mode="json")) == event
    with pytest.raises(ValueError, match="kind"):
        EVENT.validate_python({"kind": "nonsense"})
