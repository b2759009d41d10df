"""Judges work as a rollout does, with nothing but a box: setup, a shell script in the agent's place, VERIFY."""

from __future__ import annotations

from typing import NamedTuple

from rollcage.errors import ScoringError
from rollcage.events import CommandEnded, Event, Suspicion
from rollcage.rollout.setup import run_commands, stage_files
from rollcage.rollout.verify import snapshot_for_verify, verify
from rollcage.sandboxes.base import Provider, sh
from rollcage.types import CommandResult, Endpoint, Job, Reward, SandboxSpec, Stage, Task


class Verdict(NamedTuple):
    """What a verification came to."""

    reward: Reward | None
    error: ScoringError | None
    commands: tuple[CommandResult, ...]
    suspicions: tuple[Suspicion, ...]

    @property
    def total(self) -> float | None:
        """The number, if there is one."""
        return self.reward.total if self.reward else None


async def judged(provider: Provider, task: Task, spec: SandboxSpec | None = None, *, seconds: float = 60) -> Verdict:
    """Run a task whose instruction is the agent's shell script."""
    job = Job(task=task, model=Endpoint(base_url="http://nowhere", model="none"), sandbox=spec or SandboxSpec())
    log: list[Event] = []

    async def noted(event: Event) -> None:
        log.append(event)

    reward, error = None, None
    async with provider.open(job.sandbox) as box:
        await stage_files(box, task)
        failed = await run_commands(box, job, task.setup, stage=Stage.SETUP, log=noted, seconds=60)
        assert failed is None, failed
        async with snapshot_for_verify(job, box, ()) as snapshot:
            await sh(box, task.instruction, cwd=task.workdir)
            try:
                reward = await verify(job, box, provider, noted, seconds=seconds, snapshot=snapshot)
            except ScoringError as raised:
                error = raised
    commands = tuple(e.result for e in log if isinstance(e, CommandEnded) and e.stage is Stage.VERIFY)
    return Verdict(reward, error, commands, tuple(event for event in log if isinstance(event, Suspicion)))
