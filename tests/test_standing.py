"""How a rollout ended and what it earned are two things; the older word for the first is still understood."""

from __future__ import annotations

import pytest

from rollcage.events import Ended
from rollcage.types import Endpoint, Job, Outcome, Standing, Task

JOB = Job(task=Task(id="t1", instruction="Do it."), model=Endpoint(base_url="http://h/v1", model="m1", kind="vllm"))


@pytest.mark.parametrize(
    ("outcome", "reward", "standing"),
    [
        (None, None, "running"),
        (None, 1.0, "running"),
        ("finished", 1.0, "passed"),
        ("finished", 1.5, "passed"),
        ("finished", 0.999, "partial"),
        ("finished", 0.0, "failed"),
        ("finished", -1.0, "failed"),
        ("finished", None, "unscored"),
        ("agent_timeout", 1.0, "passed"),
        ("agent_failed", 0.0, "failed"),
        ("agent_failed", None, "broken"),
        ("setup_failed", None, "broken"),
        ("aborted", None, "broken"),
    ],
)
def test_the_reward_decides_where_there_is_one(outcome: str | None, reward: float | None, standing: str) -> None:
    assert Standing.of(Outcome(outcome) if outcome else None, reward) == standing


def test_the_older_word_is_read_and_never_written() -> None:
    assert Outcome("succeeded") is Outcome.FINISHED
    assert Ended.model_validate_json('{"outcome": "succeeded"}').model_dump(mode="json")["outcome"] == "finished"
    with pytest.raises(ValueError, match="banana"):
        Outcome("banana")
