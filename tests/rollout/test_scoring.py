"""The reward: what counts as one, and what never does."""

from __future__ import annotations

import pytest

from rollcage.errors import ScoringError
from rollcage.rollout.reward import reward_of, writes_reward
from rollcage.types import CommandResult, Task


def command(exit_code: int) -> CommandResult:
    return CommandResult(command="true", exit_code=exit_code)


def test_no_verifier_at_all_is_no_reward_and_not_zero() -> None:
    assert reward_of([], None, None) is None


def test_commands_that_pass_are_counted() -> None:
    reward = reward_of([command(0), command(1), command(0), command(2)], None, None)
    assert reward is not None
    assert (reward.total, reward.source) == (0.5, "commands")


def test_a_number_in_the_reward_file_wins_over_the_commands() -> None:
    reward = reward_of([command(1)], b" 0.75\n", None)
    assert reward is not None
    assert (reward.total, reward.source) == (0.75, "reward_file")


def test_named_parts_come_from_the_json_file() -> None:
    reward = reward_of([], b"0.5", b'{"style": 1, "tests": 0}')
    assert reward is not None
    assert (reward.total, reward.parts) == (0.5, {"style": 1.0, "tests": 0.0})


@pytest.mark.parametrize(
    ("text", "total"), [(b"0.25", 0.25), (b'{"reward": 0.5, "speed": 9}', 0.5), (b'{"a": 0.5, "b": 0.25}', 0.75)]
)
def test_the_json_file_alone_gives_the_total(text: bytes, total: float) -> None:
    reward = reward_of([command(1)], None, text)
    assert reward is not None
    assert (reward.total, reward.source) == (total, "reward_json")


@pytest.mark.parametrize("text", [b"banana", b"", b"nan", b"inf", b"1 2", b"1" * 4000, b"\xff\xfe", b"[1]"])
def test_what_is_no_number_is_a_broken_verifier_and_not_zero(text: bytes) -> None:
    with pytest.raises(ScoringError, match="reward file says"):
        reward_of([command(0)], text, None)


@pytest.mark.parametrize("text", [b"{", b"{}", b"[]", b'{"a": "x"}', b'{"a": true}', b'{"a": NaN}', b"null", b"true"])
def test_a_json_file_that_is_no_reward_is_a_broken_verifier(text: bytes) -> None:
    with pytest.raises(ScoringError, match=r"reward\.json"):
        reward_of([command(0)], None, text)


def test_only_a_verifier_that_speaks_of_a_reward_can_have_written_one() -> None:
    assert not writes_reward(Task(instruction="x", verify=("python3 -m unittest",)))
    assert writes_reward(Task(instruction="x", verify=('echo 1 > "$REWARD_FILE"',)))
    assert writes_reward(Task(instruction="x", tests={"check.py": "open('logs/verifier/reward.txt')"}))
