"""Statistics against closed forms and published tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean, stdev

import pytest

from rollcage.evaluation.estimates import Estimate, TaskScores, mean_over_tasks, paired, pass_at, t_quantile, wilson


def mean_of(tasks: Mapping[str, Sequence[float]]) -> Estimate | None:
    return mean_over_tasks([TaskScores.of(rewards) for rewards in tasks.values() if rewards])


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062047362), (2, 4.3026527297), (7, 2.3646242516), (30, 2.0422724563), (10**6, 1.95996)],
)
def test_quantiles_of_student_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-5)


@pytest.mark.parametrize("probability", [0.6, 0.75, 0.95, 0.995])
def test_the_quantile_of_one_and_two_degrees_is_the_closed_form(probability: float) -> None:
    assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)))
    x = 2 * probability - 1
    assert t_quantile(probability, 2) == pytest.approx(x * math.sqrt(2 / (1 - x * x)))


def test_one_number_per_task_gives_the_usual_interval() -> None:
    values = [0.2, 0.5, 0.9, 0.4]
    found = mean_of({str(n): [value] for n, value in enumerate(values)})
    assert found
    half = t_quantile(0.975, 3) * stdev(values) / 2
    assert found.mean == pytest.approx(0.5) and found.n == 4
    assert found.low == pytest.approx(max(0, 0.5 - half)) and found.high == pytest.approx(min(1, 0.5 + half))


def test_samples_of_one_task_do_not_make_an_interval_narrower_than_its_tasks_allow() -> None:
    tasks = {"a": 0.25, "b": 0.5, "c": 0.75}
    once = mean_of({task: [value] for task, value in tasks.items()})
    often = mean_of({task: [value] * 100 for task, value in tasks.items()})
    assert once and often and once.low == pytest.approx(often.low) and once.high == pytest.approx(often.high)


def test_a_share_has_wilsons_interval_which_has_a_width_even_where_all_pass() -> None:
    assert wilson(8, 8)[0] == pytest.approx(8 / (8 + 1.959964**2)) and wilson(8, 8)[1] == 1.0
    assert wilson(0, 8)[0] == 0.0
    low, high = wilson(1, 2)
    z = 1.959963985
    assert low + high == pytest.approx(1) and high - low == pytest.approx(z / math.sqrt(2 + z * z))
    found = mean_of({"a": [1.0] * 8})
    assert found and found.low == pytest.approx(wilson(8, 8)[0]) and found.high == 1.0


def test_too_little_gives_no_interval_and_nothing_gives_nothing() -> None:
    assert mean_of({}) is None and mean_of({"a": []}) is None
    found = mean_of({"a": [0.3]})
    assert found and (found.mean, found.low, found.high) == (0.3, None, None)


def test_numbers_that_are_all_alike_do_not_tell_how_far_others_may_be_off() -> None:
    found = mean_of({task: [0.1, 0.2, 0.3] for task in "abc"})
    assert found and found.mean == pytest.approx(0.2) and (found.low, found.high) == (None, None)
    changed = paired({"a": [0.3], "b": [0.1]}, {"a": [0.5], "b": [0.3]})
    assert changed and changed.difference.mean == pytest.approx(0.2)
    assert (changed.difference.low, changed.difference.high) == (None, None)


@pytest.mark.parametrize(("passed", "n", "k"), [(0, 5, 2), (2, 5, 2), (4, 5, 3), (5, 5, 5), (1, 8, 1), (3, 8, 4)])
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_pass(passed: int, n: int, k: int) -> None:
    samples = [True] * passed + [False] * (n - passed)
    expected = fmean(any(choice) for choice in combinations(samples, k))
    assert pass_at(k, {"a": (passed, n)}) == pytest.approx(expected)


def test_tasks_with_fewer_than_k_samples_say_nothing_of_pass_at_k() -> None:
    assert pass_at(4, {"a": (1, 4), "b": (2, 3)}) == 1.0
    assert pass_at(4, {"b": (2, 3)}) is None


def test_a_paired_difference_is_the_mean_over_tasks_with_its_own_spread() -> None:
    first = {"a": [0.0, 1.0], "b": [0.5], "c": [0.0], "alone": [1.0]}
    second = {"a": [1.0], "b": [0.5, 0.5], "c": [0.25], "other": [1.0]}
    found = paired(first, second)
    assert found and found.by_task == {"a": (0.5, 1.0), "b": (0.5, 0.5), "c": (0.0, 0.25)}
    changes = [0.5, 0.0, 0.25]
    half = t_quantile(0.975, 2) * stdev(changes) / math.sqrt(3)
    assert found.difference.mean == pytest.approx(0.25)
    assert found.difference.low == pytest.approx(0.25 - half) and found.difference.high == pytest.approx(0.25 + half)
    assert paired({"a": [1.0]}, {"b": [1.0]}) is None
