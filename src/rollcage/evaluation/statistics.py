"""What rollouts of a batch came to, in numbers that are kept task by task: a batch of thousands is not counted anew
for one more row. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rollcage.evaluation.estimates import TaskScores, mean_over_tasks, pass_at
from rollcage.evaluation.rows import BatchRow
from rollcage.types import Standing, Value


class Statistics(Value):
    """What the rollouts of one task, one model, or one of both came to."""

    task: str = ""
    """Of this task; empty: of all."""
    model: str = ""
    """Of this model; empty: of all."""
    agent: str = ""
    """Of this agent; empty: of all."""
    total: int = 0
    """Rollouts that the batch plans of these."""
    done: int = 0
    """Those that have ended, and were not cut short from outside."""
    running: int = 0
    """Those that run now."""
    scored: int = 0
    """Those that count: with a reward, and those without one for which the agent is to blame (0)."""
    broken: int = 0
    """Those without a reward for which somebody else is to blame."""
    unscored: int = 0
    """Those with nothing to verify."""
    mean: float | None = None
    """The mean reward of those that count."""
    low: float | None = None
    """The 95% interval around it; None where there is too little to say."""
    high: float | None = None
    pass_at_1: float | None = None
    """The share that passes (a reward of 1 or more), mean over tasks."""
    pass_at_k: float | None = None
    """The chance that one of k passes, unbiased, mean over tasks that have k samples."""
    k: int = 1
    tokens: int = 0
    """Generated."""
    prompt_tokens: int = 0
    seconds: float | None = None
    """Mean time of a rollout, from its start to its end."""
    rewards: tuple[float, ...] = ()
    """What counts, one by one; for one task of one model only."""


class Tally(NamedTuple):
    """The numbers of one task's rollouts, of one model or of several; each row is the latest attempt of its cell."""

    scores: TaskScores
    passed: int
    ended: int
    running: int
    broken: int
    unscored: int
    tokens: int
    prompt_tokens: int
    took: float
    """Seconds of all that have ended."""

    @classmethod
    def of(cls, rows: Iterable[BatchRow]) -> Tally:
        """Count them."""
        scores: list[float] = []
        passed = ended = running = broken = unscored = tokens = prompt = 0
        took = 0.0
        for row in rows:
            score, standing = row.score, row.standing
            if score is not None:
                scores.append(score)
                passed += score >= 1
            running += standing is Standing.RUNNING
            broken += standing is Standing.BROKEN and score is None
            unscored += standing is Standing.UNSCORED
            tokens += row.tokens
            prompt += row.prompt_tokens
            if row.ended_at is not None:
                ended += 1
                took += row.ended_at - row.created_at
        return cls(TaskScores.of(scores), passed, ended, running, broken, unscored, tokens, prompt, took)


def statistics_of(
    tallies: Iterable[tuple[str, Tally]], *, k: int, total: int, rewards: bool = False, **names: str
) -> Statistics:
    """What these came to; each with the name of its task. Samples of one task are alike, whichever model made them."""
    tasks: dict[str, TaskScores] = {}
    passes: dict[str, tuple[int, int]] = {}
    ended = running = broken = unscored = tokens = prompt = 0
    took = 0.0
    for task, each in tallies:
        if each.scores.n:
            before = tasks.get(task)
            tasks[task] = each.scores if before is None else before.with_(each.scores)
            good, n = passes.get(task, (0, 0))
            passes[task] = (good + each.passed, n + each.scores.n)
        ended += each.ended
        running += each.running
        broken += each.broken
        unscored += each.unscored
        tokens += each.tokens
        prompt += each.prompt_tokens
        took += each.took
    estimate = mean_over_tasks(list(tasks.values()))
    return Statistics(
        **names,
        total=total,
        done=ended,
        running=running,
        scored=sum(each.n for each in tasks.values()),
        broken=broken,
        unscored=unscored,
        mean=estimate and estimate.mean,
        low=estimate and estimate.low,
        high=estimate and estimate.high,
        pass_at_1=pass_at(1, passes),
        pass_at_k=pass_at(k, passes),
        k=k,
        tokens=tokens,
        prompt_tokens=prompt,
        seconds=took / ended if ended else None,
        rewards=tuple(value for each in tasks.values() for value in each.values) if rewards else (),
    )
