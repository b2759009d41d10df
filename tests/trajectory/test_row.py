"""One row per rollout: which sequence it is, where it ends, and what it leaves out."""

from __future__ import annotations

import pytest

from rollcage.trajectory import Sequence
from rollcage.trajectory.row import Row, row_of


def sequence(mask: str, *, turns: tuple[int, ...] = (0,), prompt: int = 2) -> Sequence:
    """`mask` of the response, by the digits of a string."""
    values = (*[0] * prompt, *map(int, mask))
    return Sequence(
        input_ids=tuple(range(10, 10 + len(values))),
        loss_mask=values,
        logprobs=tuple(-0.5 * each for each in values),
        turns=turns,
        prompt_length=prompt,
    )


def test_the_row_is_the_sequence_that_trains_most_and_counts_the_others() -> None:
    short, long, equal = sequence("11", turns=(0,)), sequence("1101", turns=(1, 2)), sequence("111", turns=(3,))
    row = row_of([short, long, equal])
    assert (row.turns, row.trained_tokens) == ((3,), 3)
    assert (row.dropped_sequences, row.dropped_tokens) == (2, 5)
    assert (row.prompt_ids, row.response_ids) == ((10, 11), (12, 13, 14))
    assert row.response_logprobs == (-0.5, -0.5, -0.5)
    assert row_of([long, short], keep="last").turns == (1, 2)
    assert row_of([equal, short], keep="last").turns == (3,)


@pytest.mark.parametrize(("most", "kept"), [(9, "110011"), (6, "110011"), (5, "11"), (4, "11"), (2, "11"), (1, "1")])
def test_a_row_that_is_too_long_ends_with_an_answer_and_never_with_what_a_tool_said(most: int, kept: str) -> None:
    row = row_of([sequence("110011")], most=most)
    assert row.response_mask == tuple(map(int, kept))
    assert len(row.response_ids) == len(row.response_logprobs) == len(kept)
    assert row.truncated is (len(kept) < 6)
    assert row.dropped_tokens == 4 - sum(map(int, kept))


def test_nothing_to_train_is_an_empty_row_that_can_be_masked() -> None:
    row = row_of([sequence("00")])
    assert (row.trained_tokens, row.dropped_sequences) == (0, 1)
    assert row_of([]) == Row()
    masked = row_of([]).masked(7)
    assert (masked.prompt_ids, masked.response_ids, masked.response_mask) == ((7,), (7,), (0,))
    whole = row_of([sequence("11")]).masked(7)
    assert (whole.prompt_ids, whole.response_ids, whole.trained_tokens) == ((10, 11), (7,), 0)
