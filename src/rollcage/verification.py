"""Judges what an agent left, where nothing the agent planted can decide: the VERIFY stage."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import PurePosixPath

import anyio

from rollcage.errors import ScoringError, VerifierHung
from rollcage.events import BoxOpened, Event, FilesCollected, Noticed
from rollcage.patches import BEFORE, TIMEOUT_S, patch_of, remember
from rollcage.sandboxes.base import PATH, Bare, Provider, Rewindable, Sandbox, Whole, run
from rollcage.sandboxes.files import Collected, NotCopied, collect, copy_path
from rollcage.sandboxes.saved import Saved, saved
from rollcage.scoring import reward_of, writes_parts, writes_reward
from rollcage.staging import run_commands
from rollcage.types import HOME, LOGS_DIR, TESTS_DIR, Job, Reward, Stage, Task, placed
from rollcage.verify_environment import environment_from

Log = Callable[[Event], Awaitable[object]]

REWARD_DIR = f"{LOGS_DIR}/verifier"
REWARD_FILE = f"{REWARD_DIR}/reward.txt"
REWARD_PARTS = f"{REWARD_DIR}/reward.json"
GRACE_S = 5
"""How much longer the whole may take than its commands, so that one that hangs is named and its output kept."""

COPY_S = 120.0
"""How long copying a folder to a fresh box may take; all of them together may take a third of the time there is."""
SPARE_MB = 64
"""How much larger than twice the agent's disk a fresh box's is."""

ENVIRONMENT = {
    "REWARD_FILE": REWARD_FILE,
    "TESTS_DIR": TESTS_DIR,
    # Compiled modules that the agent left in the workdir are not read, and none are written there.
    "PYTHONPYCACHEPREFIX": "/tmp/pycache",  # noqa: S108 - empty at the start of VERIFY
    # A repository in the workdir is the agent's: its hooks and its file monitor are programs of the agent's.
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
}
"""What verify commands get beside the plain environment of every command."""

DECIDERS = frozenset(
    "conftest.py pytest.ini tox.ini setup.cfg .pytest.ini pyproject.toml sitecustomize.py usercustomize.py "
    "pytest pytest.py _pytest Makefile .bashrc .envrc package.json jest.config.js vitest.config.ts".split()
)
"""Names that test runners and interpreters pick up by themselves; an agent that adds one to the workdir is noticed."""

# Whatever lies where the verifier will look is removed, links themselves and not what they point at.
_CLEAR = f"""
for path in "$HOME/logs" "$HOME/tests"; do
  if [ -L "$path" ] || {{ [ -e "$path" ] && [ ! -d "$path" ]; }}; then rm -f -- "$path"; fi
done
[ -d "$1" ] && [ ! -L "$1" ] || rm -f -- "$1"
mkdir -p -- "$1" && chmod u+rwx -- "$1" || exit 1
for path in {REWARD_DIR} {TESTS_DIR}; do
  [ ! -d "$path" ] || [ -L "$path" ] || chmod -R u+rwx -- "$path"
  rm -rf -- "$path" && mkdir -p -- "$path" || exit 1
done
"""


@asynccontextmanager
async def remembered(job: Job, box: Sandbox, own: Sequence[str]) -> AsyncIterator[Saved | None]:
    """Remember what setup left, so that verification can start from it: the last thing SETUP does.

    A box that cannot be rewound, or is not to be used again, gives what verification needs of its home as an archive.
    `own`: paths where the agent program keeps its own state.
    """
    if isinstance(box, Bare):
        yield None
        return
    task = job.task
    patchable = await remember(box, task.workdir)
    async with AsyncExitStack() as stack:
        archive: Saved | None = None
        limit = (2 * job.sandbox.disk_mb) << 20  # what the box's image brings is on no disk of its own
        if task.verify_in == "fresh":
            if patchable:
                archive = await stack.enter_async_context(saved(box, only=(BEFORE,), limit=limit))
        elif isinstance(box, Rewindable):
            await box.checkpoint()
        else:
            # The agent's own folders can be large, and BEFORE lies in one of them.
            without = [task.workdir, *task.keep, *(path for path in own if not BEFORE.startswith(f"{path}/"))]
            archive = await stack.enter_async_context(saved(box, without=without, limit=limit))
        yield archive


async def verify(
    job: Job,
    box: Sandbox,
    provider: Provider,
    log: Log,
    *,
    seconds: float,
    own: Sequence[str] = (),
    archive: Saved | None = None,
) -> Reward | None:
    """Rewind or replace the box, stage the tests, run them in fresh processes; the reward they gave, if any.

    `own`: paths where the agent program keeps its own state; changes there are not worth a notice. `archive`: what
    `remembered` gave.
    """
    if isinstance(box, Bare):
        return None
    deadline = time.monotonic() + seconds
    try:
        with anyio.fail_after(seconds + GRACE_S):
            if job.task.verify_in == "box" and isinstance(box, Rewindable):
                await _rewind(job.task, box, log, own)
                place: AbstractAsyncContextManager[Sandbox] = nullcontext(box)
            else:
                # What the agent made must not use up the verifier's time; removing half a copy takes as long again.
                share = seconds / 3 / (1 + len(job.task.keep))
                place = _second_box(job, partial(copy_path, box, timeout_s=min(COPY_S, share)), provider, log, archive)
            async with place as clean:
                collected = await collect(clean, job.task.workdir, before=_CLEAR)
                # The agent's files decide how long this takes; the verifier must have time left whatever they are.
                patch = await patch_of(clean, job.task.workdir, timeout_s=min(TIMEOUT_S, seconds / 4))
                await log(
                    FilesCollected(
                        files=collected.files,
                        extra=tuple(collected.extra),
                        why=collected.extra,
                        patch=patch.text if patch else None,
                        patch_truncated=bool(patch and patch.truncated),
                    )
                )
                await _notice_deciders(job.task, collected, log)
                return await _judge(job, clean, log, deadline)
    except TimeoutError:
        raise VerifierHung(f"verification had not ended after {seconds:g} s") from None


async def _rewind(task: Task, box: Rewindable, log: Log, own: Sequence[str]) -> None:
    changed = [path for path in await box.rewind((task.workdir, *task.keep)) if not _within(path, own)]
    if changed:
        await log(Noticed(what="changed outside the workdir; verification does not see it", paths=tuple(changed)))


@asynccontextmanager
async def _second_box(
    job: Job, copy: Callable[[Sandbox, str], Awaitable[None]], provider: Provider, log: Log, archive: Saved | None
) -> AsyncIterator[Sandbox]:
    # Room for all that the agent may have written, what its image had brought, and the verifier's own files: whoever
    # fills a disk up to its last inode must not keep the verifier from working.
    spec = job.sandbox.model_copy(update={"disk_mb": 2 * job.sandbox.disk_mb + SPARE_MB})
    async with provider.open(spec) as fresh:
        await log(BoxOpened(sandbox_id=fresh.id, backend=provider.name, fresh=True, notes=fresh.notes))
        if isinstance(fresh, Rewindable):
            await fresh.checkpoint()
        if archive is not None:
            await archive.unpack(fresh)
        for path in (job.task.workdir, *job.task.keep):
            try:
                await copy(fresh, path)
            except NotCopied:
                # The agent made it so. It is judged without it: an error would be a way around a zero.
                await run(fresh, ["rm", "-rf", "--", path], env=Whole(PATH=PATH))
                await log(Noticed(what="cannot be copied to a fresh box; verification does not see it", paths=(path,)))
        if isinstance(fresh, Rewindable):
            # All of it stays; but where a disk is only watched, what was copied does not count as the verifier's.
            await fresh.rewind((HOME,))
        yield fresh


def _within(path: str, folders: Sequence[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


async def _notice_deciders(task: Task, left: Collected, log: Log) -> None:
    staged = {placed(path, task.workdir): text for path, text in task.files.items()}
    found: dict[str, str | None] = {**dict.fromkeys(left.extra), **left.files}
    untouched = {
        path for path, text in found.items() if text is not None and staged.get(f"{task.workdir}/{path}") == text
    }
    planted = sorted(path for path in found if _decides(path) and path not in untouched)
    if planted:
        await log(Noticed(what="added to the workdir, where test runners read it by themselves", paths=tuple(planted)))


def _decides(path: str) -> bool:
    """Whether an interpreter or a test runner would pick this file of the workdir up by itself."""
    first, name = PurePosixPath(path).parts[0], PurePosixPath(path).name
    return name in DECIDERS or first in DECIDERS or first.removesuffix(".py") in sys.stdlib_module_names


async def _judge(job: Job, box: Sandbox, log: Log, deadline: float) -> Reward | None:
    task = job.task
    for path, text in task.tests.items():
        await box.write(placed(path, TESTS_DIR), text.encode())
    commands = list(task.verify)
    if task.test_script:
        await box.write(f"{TESTS_DIR}/test.sh", task.test_script.encode(), mode=0o755)
        commands.append(f"bash {TESTS_DIR}/test.sh")
    results = []

    async def noted(event: Event) -> None:
        await log(event)
        if event.kind == "command_ended":
            results.append(event.result)

    given, lost = await environment_from(box, (task.workdir, *task.keep))
    if lost:
        what = "the image sets it to what lies in the agent's work; verify commands do not get it, or not all of it"
        await log(Noticed(what=what, paths=lost))
    hung = await run_commands(
        box,
        job,
        commands,
        stage=Stage.VERIFY,
        log=noted,
        seconds=deadline - time.monotonic(),
        env=Whole({**given, **ENVIRONMENT}),
    )
    if hung:
        raise VerifierHung(f"verify command {hung.command!r} ran out of time")
    left = await _left(box)
    spoken_of = {path for path, speaks in ((REWARD_FILE, writes_reward), (REWARD_PARTS, writes_parts)) if speaks(task)}
    if strange := tuple(sorted(left.keys() - spoken_of)):
        await log(Noticed(what="a reward the verifier did not write; it was ignored", paths=strange))
    total, parts = [
        await _plain(box, path, left[path]) if path in left and path in spoken_of else None
        for path in (REWARD_FILE, REWARD_PARTS)
    ]
    counted = results if not task.test_script else results[:-1]
    reward = reward_of(counted, total, parts)
    # A script that broke has judged nothing, whatever the commands beside it say.
    silent = total is None and parts is None
    if task.test_script and silent and (reward is None or results[-1].exit_code):
        raise ScoringError(f"the test script wrote no reward to {REWARD_FILE} (exit code {results[-1].exit_code})")
    return reward


async def _left(box: Sandbox) -> dict[str, str]:
    """Which of reward.txt and reward.json are there, and of what kind and mode."""
    names = ["(", "-name", PurePosixPath(REWARD_FILE).name, "-o", "-name", PurePosixPath(REWARD_PARTS).name, ")"]
    # By name: what else the code under test has put there, and however it is called, is nobody's business.
    look = ["find", REWARD_DIR, "-mindepth", "1", "-maxdepth", "1", *names, "-printf", r"%y %m %p\n"]
    # An image's PATH may begin below home, where the code under test could have put a `find` of its own.
    listed = await run(box, look, env=Whole(PATH=PATH))
    rows = [line.split(" ", 2) for line in listed.stdout.text.splitlines()]
    return {path: f"{kind} {mode}" for kind, mode, path in rows}


async def _plain(box: Sandbox, path: str, shape: str) -> bytes:
    """A verifier leaves plain files that it could write again; the code that it tests might leave something else, to
    keep the verifier from writing."""
    kind, mode = shape.split(" ")
    if kind != "f" or not int(mode, 8) & 0o200:
        raise ScoringError(f"{path} is no plain file that can be written; the code under test may have made it")
    return await box.read(path, limit=64 << 10)
