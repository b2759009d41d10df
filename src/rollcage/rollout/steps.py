"""Tasks of several steps: which jobs they come to, whether the next step may begin, and what all earned together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rollcage.rollout.reward import reward_of_parts
from rollcage.types import Job, Reward


class StepJob(NamedTuple):
    """One step as a job of its own, in the box of the whole."""

    name: str
    """Empty for a task that has no steps: all of it is one."""
    job: Job
    min_reward: Mapping[str, float] = {}


def steps_of(job: Job) -> list[StepJob]:
    """The steps of a job; the job itself where its task has none. What was asked for the whole holds for each."""
    whole = job.task
    found = []
    for step in whole.steps:
        task = step.task
        caps = {name: getattr(whole.limits, name) for name in ("max_tokens_cap", "max_turns", "token_budget")}
        held = {
            "keep": whole.keep,
            "isolate": whole.isolate,
            "guards": whole.guards,
            "verify": (*task.verify, *whole.verify),
        }
        limits = task.limits.model_copy(update=caps)
        task = task.model_copy(update={**held, "limits": limits})
        found.append(StepJob(step.name, job.model_copy(update={"task": task}), step.min_reward))
    return found or [StepJob("", job)]


def named(reward: Reward) -> dict[str, float]:
    """What was earned, by name."""
    return reward.parts or {"reward": reward.total}


def falls_short(reward: Reward | None, least: Mapping[str, float]) -> str:
    """Why the next step does not begin, in words; empty where it does."""
    earned = named(reward) if reward else {}
    for name, bound in least.items():
        if name not in earned or earned[name] < bound:
            return f"{name} is {earned[name]:g}, less than {bound:g}" if name in earned else f"there is no {name}"
    return ""


def earned_by_steps(steps: Sequence[tuple[str, Reward]], how: str, stopped: str = "") -> Reward | None:
    """By Harbor's rules: the mean of each name over the steps that were judged, a missing one as 0; or the last step's.

    Each step's own stands beside them as `STEP.NAME`. `stopped`: why there were no more steps.
    """
    if not steps:
        return None
    counted = steps[-1:] if how == "final" else steps
    names = dict.fromkeys(name for _, reward in counted for name in named(reward))
    means = {name: sum(named(reward).get(name, 0) for _, reward in counted) / len(counted) for name in names}
    total, notice = reward_of_parts(means)
    own = {f"{step}.{name}": value for step, reward in steps for name, value in named(reward).items()}
    notice = "; ".join(filter(None, (notice, stopped and f"stopped after step {steps[-1][0]}: {stopped}")))
    return steps[-1][1].model_copy(update={"total": total, "parts": {**means, **own}, "notice": notice})
