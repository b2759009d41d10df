"""Whose fault it is that a rollout has no reward: one table, in the code, in the docs, and in real rollouts."""

from __future__ import annotations

import pytest

from rollcage.errors import AgentError, ScoringError
from rollcage.events import EVENT, Ended
from rollcage.results.result import result_of
from rollcage.rollout.ending import ended_by
from rollcage.types import NO_MODEL, Blame, Outcome, SandboxSpec, Task
from support.paths import ROOT
from support.playing import Play


def test_every_outcome_without_a_reward_blames_somebody_and_the_docs_name_it() -> None:
    section = (ROOT / "docs" / "rollout.md").read_text().split("## Whose fault it is")[1].split("\n## ")[0]
    for outcome in Outcome:
        ended = Ended(outcome=outcome)
        expected = not outcome.scored and outcome is not Outcome.ABORTED
        assert (ended.blame is not None) == expected, outcome
        assert outcome.scored or f"`{outcome.value}`" in section, outcome


def test_an_ended_of_an_older_log_is_blamed_like_a_new_one() -> None:
    old = EVENT.validate_python({"kind": "ended", "outcome": "crashed", "error": "x", "error_code": "crashed"})
    assert isinstance(old, Ended) and old.blame is Blame.INFRASTRUCTURE


def test_an_error_that_knows_better_says_so() -> None:
    assert ended_by(ScoringError("x", blame="agent")).blame is Blame.AGENT
    assert ended_by(ScoringError("x")).blame is Blame.TASK
    assert ended_by(AgentError("x")).blame is Blame.INFRASTRUCTURE, "it never started"


@pytest.mark.parametrize(
    ("task", "hosts", "outcome", "blame"),
    [
        (Task(instruction="true", setup=("exit 3",)), (), "setup_failed", "task"),
        (Task(instruction="true", setup=("exit 3",)), ("example.com",), "setup_failed", "infrastructure"),
        (Task(instruction="true"), (), "finished", None),
        (Task(instruction="exit 1", verify=("false",)), (), "agent_failed", None),
        (Task(instruction="true", test_script="echo x > $REWARD_FILE"), (), "verify_failed", "agent"),
        (Task(instruction="true", test_script="echo x > $REWARD_FILE", isolate=True), (), "verify_failed", "task"),
        (
            Task(instruction="echo junk > answer", test_script="untrusted cat answer > $REWARD_FILE", isolate=True),
            (),
            "verify_failed",
            "agent",
        ),
    ],
)
async def test_a_rollout_tells_it(
    task: Task, hosts: tuple[str, ...], outcome: str, blame: str | None, play: Play
) -> None:
    rollout = await play(task, agent="shell", endpoint=NO_MODEL, sandbox=SandboxSpec(setup_hosts=hosts))
    result = result_of(rollout)
    assert (result.outcome, result.blame) == (outcome, blame)
    assert (result.trust is None) == (result.reward is None)
