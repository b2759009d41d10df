"""Judges the stored work of ended rollouts again, by the same verifier or a corrected one. Nothing is sampled again.

Each re-verification is a rollout of its own: setup runs again in a new box, the stored work is put where it was, and
VERIFY is the same code as ever. Its log says what it judges again; the log of the first rollout stays as it is.
"""

from __future__ import annotations

from rollcage.errors import UsageError
from rollcage.results.fold import Rollout, Verdict
from rollcage.runner.runner import Runner, StartOptions
from rollcage.types import NO_MODEL, AgentSpec, Job, SandboxSpec, Task, Value


class Correction(Value):
    """A task as it is now, for rollouts of the task as it was."""

    task: Task
    """The corrected task; to judge stored work again, its workdir must be what it was."""
    sandbox: SandboxSpec | None = None
    """The box it wants; None: as it was."""


def reverify_job(rollout: Rollout, correction: Correction | None = None) -> Job:
    """The job that judges a rollout's stored work again; UsageError where that cannot be."""
    job, work = rollout.job, rollout.work
    if not rollout.ended:
        raise UsageError(f"{rollout.id} has not ended", remedy="wait for its end")
    if rollout.reverifies:
        raise UsageError(f"{rollout.id} is a re-verification", remedy=f"name the rollout itself: {rollout.reverifies}")
    if job.environment:
        raise UsageError(f"{rollout.id} was judged by the remote environment {job.environment}, whose state is gone")
    if work is None or not work.digest:
        why = work.why_not if work and work.why_not else "verification was never reached"
        raise UsageError(f"the work of {rollout.id} was not kept: {why}")
    task = correction.task if correction else job.task
    if task.workdir != job.task.workdir:
        raise UsageError(f"the work of {rollout.id} lies in {job.task.workdir}, and the task says {task.workdir}")
    return Job(
        task=task,
        model=NO_MODEL,
        agent=AgentSpec(name="stored-work", config={"digest": work.digest, "paths": list(work.paths)}),
        sandbox=(correction.sandbox if correction else None) or job.sandbox,
        policy_version=job.policy_version,
    )


async def reverify(runner: Runner, rollout: Rollout, correction: Correction | None = None) -> Verdict:
    """Judge a rollout's stored work again; the verdict, which its `verdicts` have from now on."""
    job = reverify_job(rollout, correction)
    record = await runner.wait(await runner.start(job, StartOptions(reverifies=rollout.id)))
    return Verdict.of(record, rollout.job.task)
