"""Two batches, paired by task: what differs, and how sure that is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Literal

from rollcage.evaluation.batches import BatchView
from rollcage.evaluation.estimates import Paired, paired
from rollcage.evaluation.rows import BatchRow
from rollcage.types import JsonObject, Value


class TaskChange(Value):
    """One task in two batches."""

    task: str
    before: float
    after: float
    flipped: Literal["fixed", "broke", ""] = ""
    """`fixed`: less than half passed and now at least half does; `broke`: the other way round."""


class MeanDifference(Value):
    """What two batches differ by, over the tasks that count in both."""

    tasks: int = 0
    """Tasks that count in both."""
    before: float | None = None
    after: float | None = None
    difference: float | None = None
    """Mean over tasks of (second - first)."""
    low: float | None = None
    """Its 95% interval; None where there is too little to say."""
    high: float | None = None


class ModelChange(MeanDifference):
    """The same of one model and agent that both batches have."""

    model: str
    agent: str


class Comparison(MeanDifference):
    """Two batches, paired by task, all models and agents of each taken together."""

    first: str
    second: str
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Tasks that do not say the same in both: by digest."""
    by_task: tuple[TaskChange, ...] = ()
    by_model: tuple[ModelChange, ...] = ()
    """Each model and agent that both have; empty where each has but one."""
    tokens: tuple[float, float] = (0.0, 0.0)
    """Generated per rollout, in both."""
    seconds: tuple[float | None, float | None] = (None, None)
    """Per rollout, in both."""


def compare(first: BatchView, second: BatchView) -> Comparison:
    """What differs between two batches."""
    rows = [view.current for view in (first, second)]
    scores = [_scores(each) for each in rows]
    digests = [{task.id: task.digest for task in view.plan.tasks} for view in (first, second)]
    found = paired(scores[0], scores[1])
    means = found.by_task if found else {}
    stats = [view.report().overall for view in (first, second)]
    flips = {task: _flip(scores[0][task], scores[1][task]) for task in means}
    who = [dict.fromkeys((row.model, row.agent) for row in each) for each in rows]
    both = [each for each in who[0] if each in who[1]] if max(map(len, who)) > 1 else []
    shared = {each: paired(_scores(rows[0], each), _scores(rows[1], each)) for each in both}
    return Comparison(
        **_difference(found),
        first=first.plan.name,
        second=second.plan.name,
        only_first=tuple(task for task in scores[0] if task not in means),
        only_second=tuple(task for task in scores[1] if task not in means),
        changed=tuple(task for task, said in digests[0].items() if digests[1].get(task, said) != said),
        by_task=tuple(
            TaskChange(task=task, before=before, after=after, flipped=flips[task])
            for task, (before, after) in means.items()
        ),
        by_model=tuple(
            ModelChange(model=model, agent=agent, **_difference(each)) for (model, agent), each in shared.items()
        ),
        tokens=(stats[0].tokens / max(1, stats[0].done), stats[1].tokens / max(1, stats[1].done)),
        seconds=(stats[0].seconds, stats[1].seconds),
    )


def _difference(found: Paired | None) -> JsonObject:
    """The fields of a `MeanDifference`."""
    if found is None:
        return {}
    befores, afters = zip(*found.by_task.values(), strict=True)
    mean, low, high, tasks = found.difference
    names = {"tasks": tasks, "before": fmean(befores), "after": fmean(afters)}
    return {**names, "difference": mean, "low": low, "high": high}


def _scores(rows: Iterable[BatchRow], who: tuple[str, str] | None = None) -> dict[str, list[float]]:
    """What counts, by task; `who`: of this model and agent alone."""
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row.score is not None and who in (None, (row.model, row.agent)):
            scores.setdefault(row.task, []).append(row.score)
    return scores


def _flip(before: Sequence[float], after: Sequence[float]) -> Literal["fixed", "broke", ""]:
    was, now = (sum(value >= 1 for value in values) * 2 >= len(values) for values in (before, after))
    return "" if was == now else "fixed" if now else "broke"
