"""What the agent left where verification does not look: told where a verify command failed, which may be the reason."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from rollcage.errors import SandboxError
from rollcage.events import CommandEnded, Event, Log, Suspicion
from rollcage.sandboxes.base import PATH, InProcessSandbox, Sandbox, Traced, run
from rollcage.types import HOME, Job, Stage

MOST = 20
"""How many paths are named at most."""
_TIMEOUT_S = 10
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - in the box


@asynccontextmanager
async def unseen_files(job: Job, box: Sandbox, own: Sequence[str], log: Log, *, since: float) -> AsyncIterator[Log]:
    """The log for verification, which is the block.

    `own`: where the agent program keeps its own state. `since`: when it started.
    """
    task = job.task
    wanted = (task.verify or task.test_script) and not isinstance(box, InProcessSandbox)
    left = await _left(box, (task.workdir, *task.keep, *own, task.reward_dir, task.tests_dir), since) if wanted else []
    failed = False

    async def watched(event: Event) -> None:
        nonlocal failed
        if isinstance(event, CommandEnded) and event.stage is Stage.VERIFY and event.result.exit_code != 0:
            failed = True
        await log(event)

    try:
        yield watched
    finally:
        if failed and left:
            rest = f" and {len(left) - MOST} more" if len(left) > MOST else ""
            what = f"left where verification does not look{rest}; it sees the workdir, and what `keep` names"
            with anyio.CancelScope(shield=True):
                await log(Suspicion(code="unseen_files", what=what, paths=tuple(left[:MOST])))


async def _left(box: Sandbox, seen: Sequence[str], since: float) -> list[str]:
    """Files made or changed since then, outside these folders, by name. They are only told of: whatever is wrong with
    the box, verification meets it."""
    if isinstance(box, Traced):
        try:
            left = await box.written(since, seen)
        except SandboxError:
            return []
        if left is not None:
            return list(left)
    skipped = [word for path in seen for word in ("-path", path, "-o")][:-1]
    # In /tmp, what is hidden is the programs' own: sockets, libraries that they unpacked.
    hidden = [word for place in _SCRATCH for word in ("-o", "-path", f"{place}/.*")]
    look = ["find", HOME, *_SCRATCH, "(", *skipped, *hidden, ")", "-prune", "-o"]
    look += ["-type", "f", "-newerct", f"@{since:.3f}", "-printf", r"%p\n"]
    try:
        found = await run(box, look, env={"PATH": PATH}, cwd="/", inherit_image_env=False, timeout_s=_TIMEOUT_S)
    except SandboxError:
        return []
    return sorted(found.stdout.text.splitlines())
