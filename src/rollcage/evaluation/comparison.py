"""Two batches, paired by task: what differs, and how sure that is. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rollcage.evaluation.batches import BatchView
from rollcage.evaluation.estimates import paired
from rollcage.evaluation.rows import BatchRow
from rollcage.types import Value


class TaskChange(Value):
    """One task in two batches."""

    task: str
    before: float
    after: float
    flipped: Literal["fixed", "broke", ""] = ""
    """`fixed`: less than half passed and now at least half does; `broke`: the other way round."""


class Comparison(Value):
    """Two batches, paired by task."""

    first: str
    second: str
    tasks: int
    """Tasks that count in both."""
    only_first: tuple[str, ...] = ()
    only_second: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Tasks that do not say the same in both: by digest."""
    before: float | None = None
    after: float | None = None
    difference: float | None = None
    """Mean over tasks of (second - first)."""
    low: float | None = None
    high: float | None = None
    by_task: tuple[TaskChange, ...] = ()
    tokens: tuple[float, float] = (0.0, 0.0)
    """Generated per rollout, in both."""
    seconds: tuple[float | None, float | None] = (None, None)
    """Per rollout, in both."""


def compare(first: BatchView, second: BatchView) -> Comparison:
    """What differs between two batches, all models and agents of each taken together."""
    scores = [_scores(view.current) for view in (first, second)]
    digests = [{task.id: task.digest for task in view.plan.tasks} for view in (first, second)]
    found = paired(scores[0], scores[1])
    means = found.by_task if found else {}
    stats = [view.report().overall for view in (first, second)]
    flips = {task: _flip(scores[0][task], scores[1][task]) for task in means}
    return Comparison(
        first=first.plan.name,
        second=second.plan.name,
        tasks=len(means),
        only_first=tuple(task for task in scores[0] if task not in means),
        only_second=tuple(task for task in scores[1] if task not in means),
        changed=tuple(task for task, said in digests[0].items() if digests[1].get(task, said) != said),
        before=sum(before for before, _ in means.values()) / len(means) if means else None,
        after=sum(after for _, after in means.values()) / len(means) if means else None,
        difference=found.difference.mean if found else None,
        low=found.difference.low if found else None,
        high=found.difference.high if found else None,
        by_task=tuple(
            TaskChange(task=task, before=before, after=after, flipped=flips[task])
            for task, (before, after) in means.items()
        ),
        tokens=(stats[0].tokens / max(1, stats[0].done), stats[1].tokens / max(1, stats[1].done)),
        seconds=(stats[0].seconds, stats[1].seconds),
    )


def _scores(rows: Iterable[BatchRow]) -> dict[str, list[float]]:
    scores: dict[str, list[float]] = {}
    for row in rows:
        if row.score is not None:
            scores.setdefault(row.task, []).append(row.score)
    return scores


def _flip(before: Sequence[float], after: Sequence[float]) -> Literal["fixed", "broke", ""]:
    was, now = (sum(value >= 1 for value in values) * 2 >= len(values) for values in (before, after))
    return "" if was == now else "fixed" if now else "broke"
