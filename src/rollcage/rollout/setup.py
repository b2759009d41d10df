"""Puts a task's files and commands into a box: what SETUP and VERIFY have in common."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import PurePosixPath
from typing import Protocol

from rollcage.errors import UsageError
from rollcage.events import CommandEnded, CommandStarted, Event
from rollcage.sandboxes.base import Exit, Sandbox, run, sh
from rollcage.sandboxes.files import unpack_archive
from rollcage.sandboxes.mirrors import PACKAGES, setup_network
from rollcage.tasks.trees import packed
from rollcage.types import CommandResult, FileTree, Job, Stage, Task, resolve_box_path

_MOST_HOSTS, _LONGEST_HOST = 20, 253


class Trees(Protocol):
    """Where archives of files are kept, each once."""

    def __contains__(self, name: str) -> bool:
        """Whether the one of this digest is there."""

    def put(self, chunks: AsyncIterable[bytes]) -> Awaitable[tuple[str, int]]:
        """Keep one; its digest and its size."""

    def get(self, name: str) -> AsyncGenerator[bytes, None]:
        """One of them, by its digest; StoreError where it is not there."""


async def keep_trees(task: Task, trees: Trees | None) -> None:
    """See to it that every archive of a task is kept; UsageError where its files are not what they were."""
    for tree in task.all_trees:
        if trees is None:
            raise UsageError("this task brings files by reference, and there is no place to keep them here")
        if tree.digest not in trees:
            digest, _ = await trees.put(packed(tree.path))
            if digest != tree.digest:
                raise UsageError(f"{tree.path or 'its files'}: changed since the task was read", remedy="read it again")


async def stage_files(box: Sandbox, task: Task, trees: Trees | None = None) -> None:
    """Make the workdir, and the logs that an agent may write to, and write the task's files."""
    logs = [f"{task.top}logs/{name}" for name in ("agent", "artifacts", "verifier")] if task.paths == "system" else []
    made = await run(box, ["mkdir", "-p", "--", task.workdir, *logs])
    if made.code:
        raise UsageError(f"workdir {task.workdir}: {made.stderr.text.strip()}")
    for folder, tree in task.trees.items():
        await stage_tree(box, tree, str(PurePosixPath(task.workdir, folder)), trees)
    for path, text in task.files.items():
        await box.write(resolve_box_path(path, task.workdir, top=task.top), text.encode())


async def stage_tree(box: Sandbox, tree: FileTree, folder: str, trees: Trees | None) -> None:
    """Unpack one archive."""
    assert trees is not None  # `keep_trees` said so
    async with aclosing(trees.get(tree.digest)) as chunks:
        await unpack_archive(box, folder, chunks)


async def run_commands(
    box: Sandbox,
    job: Job,
    commands: Sequence[str],
    *,
    stage: Stage,
    log: Callable[[Event], Awaitable[object]],
    seconds: float,
    env: Callable[[], Mapping[str, str]] = dict,
    inherit_image_env: bool = True,
) -> CommandResult | None:
    """Run shell commands in order, each logged. In SETUP the first failure ends it; anywhere, running out of time does.

    `env` is asked anew for each command.

    Returns the command that ended it early, or None.
    """
    deadline = time.monotonic() + seconds
    async with AsyncExitStack() as stack:
        proxy: Mapping[str, str] = {}
        refused: dict[str, None] = {}

        def note(host: str) -> None:
            if len(refused) < _MOST_HOSTS:
                refused[host[:_LONGEST_HOST]] = None

        if commands and (stage is Stage.SETUP or job.sandbox.verify_hosts):
            # In SETUP with no hosts, too: a proxy that refuses everything knows what a command would have needed.
            hosts = job.sandbox.setup_hosts if stage is Stage.SETUP else job.sandbox.verify_hosts
            proxy = await stack.enter_async_context(setup_network(box, hosts, note))
        for command in commands:
            refused.clear()
            await log(CommandStarted(stage=stage, command=command))
            left = max(0.0, deadline - time.monotonic())
            ended = await sh(
                box,
                command,
                env={**env(), **proxy},
                cwd=job.task.workdir,
                inherit_image_env=inherit_image_env,
                timeout_s=left,
            )
            result = _result(command, ended, tuple(refused))
            await log(CommandEnded(stage=stage, result=result))
            if result.timed_out or (stage is Stage.SETUP and result.exit_code != 0):
                return result
    return None


def with_uploaded_tests(job: Job) -> Job:
    """The job with those of the task's files among its tests that lie in the tests folder, which VERIFY empties."""
    task = job.task
    folder = task.tests_dir
    placed = {
        PurePosixPath(resolve_box_path(path, task.workdir, top=task.top)): text for path, text in task.files.items()
    }
    tests = {str(path.relative_to(folder)): text for path, text in placed.items() if path.is_relative_to(folder)}
    if not tests:
        return job
    return job.model_copy(update={"task": task.model_copy(update={"tests": {**tests, **task.tests}})})


def why_refused(job: Job, hosts: Sequence[str]) -> str:
    """What to tell of a setup command that failed after it was refused these hosts."""
    if not hosts:
        return ""
    named, allowed = ", ".join(hosts), job.sandbox.setup_hosts
    what = f"setup may not reach {named}" if allowed else f"the box has no network, and it asked for {named}"
    remedy = f"allow that: setup_hosts={json.dumps([*allowed, *hosts])}"
    if PACKAGES not in allowed:
        remedy += f', or the package indexes of this machine: setup_hosts=["{PACKAGES}"]'
    return f"{what}; {remedy}"


def _result(command: str, ended: Exit, refused: tuple[str, ...]) -> CommandResult:
    return CommandResult(
        command=command,
        exit_code=ended.code,
        stdout=ended.stdout.text,
        stderr=ended.stderr.text,
        seconds=ended.seconds,
        truncated=ended.stdout.truncated or ended.stderr.truncated,
        timed_out=ended.timed_out,
        refused_hosts=refused,
    )
