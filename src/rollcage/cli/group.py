"""`rollcage run -n`: n rollouts of one task as a group, a line for each as it ends."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import Any, NamedTuple

import anyio

from rollcage.cli import codes
from rollcage.cli.interrupts import Interrupts, cancelling
from rollcage.cli.output import write_json
from rollcage.cli.prepare import prepare
from rollcage.cli.text import one_line
from rollcage.errors import UsageError
from rollcage.jobs import job_of, opened_model
from rollcage.results.fold import Rollout
from rollcage.runner import Runner
from rollcage.schema.groups import Group, check_group
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.tasks import TaskFile
from rollcage.types import Job
from rollcage.wiring import opened_runner


class GroupSize(NamedTuple):
    """How many rollouts, and how many usable ones are enough."""

    n: int
    min_usable: int


def group_size(options: dict[str, Any]) -> GroupSize | None:
    """What the options say of a group, which they then do not hold any more; None: it is one rollout."""
    size = GroupSize(options.pop("n") or 1, options.pop("min_usable") or 0)
    try:
        check_group(*size, options.get("mode") or "")
    except ValueError as error:
        raise UsageError(str(error), argument="min_usable") from None
    return size if size != (1, 0) else None


class _Shown:
    """What is shown: to people on stdout; beside a JSON document, on stderr."""

    def __init__(self, as_json: bool) -> None:
        self._file = sys.stderr if as_json else sys.stdout

    def note(self, message: str) -> None:
        print(f"rollcage: {message}", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """There is nothing to give back."""

    def ended(self, rollout: Rollout, place: int, n: int) -> None:
        reward = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
        outcome = rollout.outcome.value if rollout.outcome else ""
        why = f"  {one_line(rollout.error, 80)}" if rollout.error else ""
        print(f"{place}/{n}  {rollout.id}  {outcome}  {reward}{why}", file=self._file, flush=True)


async def run_group(settings: Settings, task: TaskFile, size: GroupSize, as_json: bool, require: float | None) -> int:
    """Run a group to its end and show what came of it; the exit code."""
    lines = _Shown(as_json)
    interrupts = Interrupts(lines)
    group: Group | None = None
    with anyio.CancelScope() as everything:
        interrupts.stop = cancelling(everything)
        async with anyio.create_task_group() as tasks:
            await tasks.start(interrupts.listen)
            async with (
                opened_model(task, settings) as endpoint,
                Store.open(settings.log_path) as store,
                opened_runner(settings, store) as runner,
            ):
                job = job_of(task, endpoint)
                if job.sandbox.backend == "local":
                    await prepare(settings, job.agent.name)
                group = await _played(runner, job, size, lines)
            tasks.cancel_scope.cancel()
    if group is None:
        lines.note("interrupted; what still ran was aborted")
        return interrupts.code or codes.INTERRUPTED
    rewards = [member.reward for member in group.rollouts if member.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    if as_json:
        write_json(group)
    else:
        told = "none" if mean is None else f"{mean:.3g}"
        print(f"group {group.group_id}: {group.scored} of {group.n} scored, {group.usable} usable, mean reward {told}")
    return _exit_code(group, mean, require)


async def _played(runner: Runner, job: Job, size: GroupSize, lines: _Shown) -> Group:
    group = await runner.groups.start(job, size.n, min_usable=size.min_usable)
    seen = set()
    async with aclosing(runner.groups.ended([group.group_id])) as ends:
        async for rollout in ends:
            seen.add(rollout.id)
            lines.ended(rollout, len(seen), size.n)
    # What is not needed any more is stopped, and belongs to the group all the same.
    for member in group.rollouts:
        if member.rollout_id not in seen:
            seen.add(member.rollout_id)
            lines.ended(await runner.wait(member.rollout_id), len(seen), size.n)
    return await runner.groups.get(group.group_id)


def _exit_code(group: Group, mean: float | None, require: float | None) -> int:
    enough = group.usable >= group.min_usable if group.min_usable else group.scored == group.n
    if not enough and any(member.blame for member in group.rollouts):
        return codes.BROKEN
    return codes.BELOW if require is not None and (mean is None or mean < require) else codes.OK
