"""Estimates from rewards, as honest as their number allows: means with intervals, pass@k, paired differences. Pure.

Samples of one task are alike, so an interval over several tasks counts tasks and not samples (cluster-robust). Where
every reward is 0 or 1 and tasks do not repeat, it is Wilson's, which has a width even when all are alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist, fmean
from typing import NamedTuple

CONFIDENCE = 0.95
_NOTHING = 1e-12
"""A spread below this is that of sums of floats: numbers that are all alike do not tell how far others may be off."""


class Estimate(NamedTuple):
    """A mean and the interval around it."""

    mean: float
    low: float | None
    """None where there is too little to say."""
    high: float | None
    n: int
    """How many numbers it is the mean of."""


class TaskScores(NamedTuple):
    """The numbers of one task, and what a mean over many tasks needs of them."""

    n: int
    total: float
    binary: bool
    """Whether all are 0 or 1."""
    unit: bool
    """Whether all are from 0 to 1."""
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> TaskScores:
        """Count them."""
        binary = all(value in (0.0, 1.0) for value in values)
        unit = binary or all(0 <= value <= 1 for value in values)
        return cls(len(values), math.fsum(values), binary, unit, tuple(values))

    def with_(self, other: TaskScores) -> TaskScores:
        """Both together."""
        return TaskScores.of(self.values + other.values)


def mean_over_tasks(tasks: Sequence[TaskScores], confidence: float = CONFIDENCE) -> Estimate | None:
    """The mean of all numbers with its confidence interval, clustered by task; no task is without numbers."""
    n = sum(each.n for each in tasks)
    if not n:
        return None
    mean = math.fsum(each.total for each in tasks) / n
    binary = all(each.binary for each in tasks)
    if binary and (len(tasks) == 1 or len(tasks) == n):
        return Estimate(mean, *wilson(mean * n, n, confidence), n)
    if len(tasks) == 1:  # one task: its samples are all there is
        tasks = [TaskScores.of((value,)) for value in tasks[0].values]
    if len(tasks) < 2:
        return Estimate(mean, None, None, n)
    spread = math.fsum((each.total - each.n * mean) ** 2 for each in tasks)
    error = math.sqrt(spread * len(tasks) / (len(tasks) - 1)) / n
    if error < _NOTHING:
        if not binary:
            return Estimate(mean, None, None, n)
        return Estimate(mean, *wilson(mean * len(tasks), len(tasks), confidence), n)
    half = t_quantile((1 + confidence) / 2, len(tasks) - 1) * error
    low, high = mean - half, mean + half
    if all(each.unit for each in tasks):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean, low, high, n)


def wilson(passed: float, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's interval for a share."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, scale = passed / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    # A share of 0 or 1 is an end of its interval; sums of floats miss it by a hair.
    return (0.0 if share == 0 else max(0.0, middle - half)), (1.0 if share == 1 else min(1.0, middle + half))


def pass_at(k: int, groups: Mapping[str, tuple[int, int]]) -> float | None:
    """The unbiased pass@k: the chance that of k samples of a task one passes, mean over tasks.

    `groups`: by task, how many passed and how many there are; tasks with fewer than k say nothing.
    """
    each = [1 - math.comb(n - passed, k) / math.comb(n, k) for passed, n in groups.values() if n >= k]
    return fmean(each) if each else None


class Paired(NamedTuple):
    """What two batches differ by, task by task."""

    difference: Estimate
    """Mean over tasks of (second - first)."""
    by_task: dict[str, tuple[float, float]]
    """The mean of each task in both."""


def paired(
    first: Mapping[str, Sequence[float]], second: Mapping[str, Sequence[float]], confidence: float = CONFIDENCE
) -> Paired | None:
    """The mean difference over the tasks that both have, with its interval; None where they share none."""
    common = [task for task, values in first.items() if values and second.get(task)]
    if not common:
        return None
    means = {task: (fmean(first[task]), fmean(second[task])) for task in common}
    changes = [after - before for before, after in means.values()]
    mean, n = fmean(changes), len(changes)
    if n < 2:
        return Paired(Estimate(mean, None, None, n), means)
    error = math.sqrt(math.fsum((change - mean) ** 2 for change in changes) / (n - 1) / n)
    if error < _NOTHING:
        return Paired(Estimate(mean, None, None, n), means)
    half = t_quantile((1 + confidence) / 2, n - 1) * error
    return Paired(Estimate(mean, mean - half, mean + half, n), means)


def t_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t, for probabilities above one half."""
    if freedom > 100_000:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, 1.0
    while _t_cdf(high, freedom) < probability:
        low, high = high, high * 2
    for _ in range(200):
        middle = (low + high) / 2
        if _t_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
        if high - low <= 1e-12 * high:
            break
    return (low + high) / 2


def _t_cdf(t: float, freedom: int) -> float:
    return 1 - _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by Lentz's continued fraction."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    tiny = 1e-300
    c, d = 1.0, 1 / ((1 - (a + b) * x / (a + 1)) or tiny)
    fraction = d
    for m in range(1, 1000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / ((1 + term * d) or tiny)
            c = (1 + term / c) or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a
