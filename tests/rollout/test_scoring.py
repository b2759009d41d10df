"""The reward: what counts as one, and what never does."""

from __future__ import annotations

import pytest

from rollcage.errors import ScoringError
from rollcage.rollout.reward import decided, reward_of
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


def test_half_characters_in_names_are_replaced() -> None:
    reward = reward_of([], None, b'{"reward": 1, "\\ud800": 1}')
    assert reward is not None and reward.parts == {"reward": 1, "?": 1}


@pytest.mark.parametrize("text", [b"banana", b"", b"nan", b"inf", b"1 2", b"1" * 4000, b"\xff\xfe", b"[1]"])
def test_what_is_no_number_is_a_broken_verifier_and_not_zero(text: bytes) -> None:
    with pytest.raises(ScoringError, match="reward file says"):
        reward_of([command(0)], text, None)


@pytest.mark.parametrize("text", [b"{", b"{}", b"[]", b'{"a": "x"}', b'{"a": true}', b'{"a": NaN}', b"null", b"true"])
def test_a_json_file_that_is_no_reward_is_a_broken_verifier(text: bytes) -> None:
    with pytest.raises(ScoringError, match=r"reward\.json"):
        reward_of([command(0)], None, text)


TEXT, PARTS = "reward.txt", "reward.json"
BY_COMMANDS = Task(instruction="x", verify=("a", "b"))
BY_SCRIPT = Task(instruction="x", test_script="a")


@pytest.mark.parametrize(
    ("task", "codes", "left", "total", "ignored"),
    [
        (BY_COMMANDS, (0, 0), {TEXT: b"0.0"}, 0, ()),
        (BY_COMMANDS, (0, 0), {TEXT: b"0.7"}, 0.7, ()),
        (BY_COMMANDS, (0, 1), {TEXT: b"0.5"}, 0.5, ()),
        (BY_COMMANDS, (0, 0), {PARTS: b'{"a": 0.25}'}, 0.25, ()),
        (BY_COMMANDS, (0, 0), {TEXT: b"0.5", PARTS: b'{"a": 1, "b": 0}'}, 0.5, ()),
        (BY_COMMANDS, (0, 0), {}, 1, ()),
        (BY_COMMANDS, (1, 0), {}, 0.5, ()),
        (BY_COMMANDS, (0, 0), {TEXT: b"-1"}, -1, ()),
        (BY_SCRIPT, (0,), {TEXT: b"3"}, 3, ()),
        (BY_SCRIPT, (1,), {TEXT: b"0"}, 0, ()),
        (BY_SCRIPT.model_copy(update={"reward_from": TEXT}), (1,), {TEXT: b"3"}, 3, ()),
        (BY_SCRIPT, (0,), {TEXT: b"0.5", PARTS: b"junk"}, 0.5, (PARTS,)),
        # Spoiled to be spared a zero: it stays one.
        (BY_COMMANDS, (1, 1), {TEXT: b"junk"}, 0, (TEXT,)),
        (BY_COMMANDS, (1, 1), {TEXT: None}, 0, (TEXT,)),
        (BY_COMMANDS, (0, 0), {TEXT: None, PARTS: b"0"}, 0, (TEXT,)),
        # Where the task says whose number counts, nothing else does.
        (BY_COMMANDS.model_copy(update={"reward_from": "commands"}), (1, 1), {TEXT: b"1"}, 0, (TEXT,)),
        (BY_COMMANDS.model_copy(update={"reward_from": TEXT}), (1, 1), {TEXT: b"5"}, 5, ()),
        (BY_COMMANDS.model_copy(update={"reward_from": TEXT}), (1, 1), {TEXT: b"5", PARTS: None}, 5, (PARTS,)),
        (BY_COMMANDS.model_copy(update={"reward_from": PARTS}), (0, 0), {TEXT: b"1", PARTS: b"0"}, 0, (TEXT,)),
        (BY_COMMANDS.model_copy(update={"isolate": True}), (1, 1), {TEXT: b"5"}, 5, ()),
    ],
)
def test_a_number_counts_where_nothing_else_says_less(
    task: Task, codes: tuple[int, ...], left: dict[str, bytes | None], total: float, ignored: tuple[str, ...]
) -> None:
    reward, foreign = decided(task, [command(code) for code in codes], left)
    assert reward is not None
    assert (reward.total, foreign) == (total, ignored)


@pytest.mark.parametrize(
    ("task", "codes", "left"),
    [
        (BY_COMMANDS, (1, 1), {TEXT: b"0.5"}),
        (BY_COMMANDS, (0, 1), {TEXT: b"1"}),
        (BY_COMMANDS, (0, 0), {TEXT: b"1.5"}),
        (BY_COMMANDS, (0, 0), {TEXT: b"1", PARTS: b'{"tests": 0}'}),
        (BY_SCRIPT, (0,), {TEXT: b"1", PARTS: b'{"reward": 0}'}),
        (BY_SCRIPT, (1,), {TEXT: b"1"}),
    ],
)
def test_a_number_that_cannot_be_told_from_a_forged_one_is_none(
    task: Task, codes: tuple[int, ...], left: dict[str, bytes | None]
) -> None:
    with pytest.raises(ScoringError, match="cannot be told") as raised:
        decided(task, [command(code) for code in codes], left)
    assert raised.value.blame == "agent" and "reward_from" in str(raised.value)


@pytest.mark.parametrize("left", [{TEXT: b"junk"}, {TEXT: None}, {PARTS: b"{"}, {TEXT: None, PARTS: b"1"}])
def test_what_is_spoiled_beside_more_than_a_zero_is_no_reward(left: dict[str, bytes | None]) -> None:
    with pytest.raises(ScoringError):
        decided(BY_COMMANDS, [command(0), command(0)], left)


def test_a_source_that_the_task_names_must_speak() -> None:
    with pytest.raises(ScoringError, match=r"wrote no reward\.json"):
        decided(BY_COMMANDS.model_copy(update={"reward_from": PARTS}), [command(0)], {TEXT: b"1"})
    for wrong in ({"reward_from": "commands"}, {"reward_from": "commands", "test_script": "x"}, {"reward_from": TEXT}):
        with pytest.raises(ValueError, match="reward_from"):
            Task(instruction="x", **wrong)
