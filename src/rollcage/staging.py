"""Puts a task's files and commands into a box: what SETUP and VERIFY have in common."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from rollcage.errors import UsageError
from rollcage.events import CommandEnded, CommandStarted, Event
from rollcage.sandboxes.base import Exit, Sandbox, run, sh
from rollcage.sandboxes.egress import egress
from rollcage.types import CommandResult, Job, Stage, Task, placed


async def stage_files(box: Sandbox, task: Task) -> None:
    """Make the workdir and write the task's files."""
    made = await run(box, ["mkdir", "-p", "--", task.workdir])
    if made.code:
        raise UsageError(f"workdir {task.workdir}: {made.stderr.text.strip()}")
    for path, text in task.files.items():
        await box.write(placed(path, task.workdir), text.encode())


async def run_commands(
    box: Sandbox,
    job: Job,
    commands: Sequence[str],
    *,
    stage: Stage,
    log: Callable[[Event], Awaitable[object]],
    seconds: float,
    env: Mapping[str, str] | None = None,
) -> CommandResult | None:
    """Run shell commands in order, each logged. In SETUP the first failure ends it; anywhere, running out of time does.

    Returns the command that ended it early, or None.
    """
    deadline = time.monotonic() + seconds
    async with AsyncExitStack() as stack:
        environment = {} if env is None else env
        if stage is Stage.SETUP and commands and job.sandbox.setup_hosts:
            environment = {**environment, **await stack.enter_async_context(egress(box, job.sandbox.setup_hosts))}
        for command in commands:
            await log(CommandStarted(stage=stage, command=command))
            left = max(0.0, deadline - time.monotonic())
            result = _result(command, await sh(box, command, env=environment, cwd=job.task.workdir, timeout_s=left))
            await log(CommandEnded(stage=stage, result=result))
            if result.timed_out or (stage is Stage.SETUP and result.exit_code != 0):
                return result
    return None


def _result(command: str, ended: Exit) -> CommandResult:
    return CommandResult(
        command=command,
        exit_code=ended.code,
        stdout=ended.stdout.text,
        stderr=ended.stderr.text,
        seconds=ended.seconds,
        truncated=ended.stdout.truncated or ended.stderr.truncated,
        timed_out=ended.timed_out,
    )
