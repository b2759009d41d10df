"""Judges what an agent left, where nothing the agent planted can decide: the VERIFY stage."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import PurePosixPath

import anyio

from rollcage.errors import ScoringError, VerifierHung
from rollcage.events import BoxOpened, Event, FilesCollected, Noticed, Scored
from rollcage.patches import BEFORE, patch_of, remember
from rollcage.sandboxes.base import PATH, Provider, Rewindable, Sandbox, run
from rollcage.sandboxes.files import Collected, collect, copy_path
from rollcage.sandboxes.saved import Saved, saved
from rollcage.scoring import reward_of, writes_parts, writes_reward
from rollcage.staging import run_commands
from rollcage.types import LOGS_DIR, TESTS_DIR, Job, Stage, Task, placed

Log = Callable[[Event], Awaitable[object]]

REWARD_DIR = f"{LOGS_DIR}/verifier"
REWARD_FILE = f"{REWARD_DIR}/reward.txt"
REWARD_PARTS = f"{REWARD_DIR}/reward.json"
GRACE_S = 5
"""How much longer the whole may take than its commands, so that one that hangs is named and its output kept."""

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
) -> None:
    """Rewind or replace the box, stage the tests, run them in fresh processes, read the reward.

    `own`: paths where the agent program keeps its own state; changes there are not worth a notice. `archive`: what
    `remembered` gave.
    """
    deadline = time.monotonic() + seconds
    try:
        with anyio.fail_after(seconds + GRACE_S):
            async with _clean_box(job, box, provider, log, own, archive) as clean:
                collected = await collect(clean, job.task.workdir, before=_CLEAR)
                patch = await patch_of(clean, job.task.workdir)
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
                await _judge(job, clean, log, deadline)
    except TimeoutError:
        raise VerifierHung(f"verification had not ended after {seconds:g} s") from None


@asynccontextmanager
async def _clean_box(
    job: Job, box: Sandbox, provider: Provider, log: Log, own: Sequence[str], archive: Saved | None
) -> AsyncIterator[Sandbox]:
    task = job.task
    if task.verify_in == "box" and isinstance(box, Rewindable):
        changed = [path for path in await box.rewind((task.workdir, *task.keep)) if not _within(path, own)]
        if changed:
            await log(Noticed(what="changed outside the workdir; verification does not see it", paths=tuple(changed)))
        yield box
        return
    async with provider.open(job.sandbox) as fresh:
        await log(BoxOpened(sandbox_id=fresh.id, backend=provider.name, fresh=True, notes=fresh.notes))
        if archive is not None:
            await archive.unpack(fresh)
        for path in (task.workdir, *task.keep):
            await copy_path(box, fresh, path)
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


async def _judge(job: Job, box: Sandbox, log: Log, deadline: float) -> None:
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

    hung = await run_commands(
        box,
        job,
        commands,
        stage=Stage.VERIFY,
        log=noted,
        seconds=deadline - time.monotonic(),
        env=ENVIRONMENT,
    )
    if hung:
        raise VerifierHung(f"verify command {hung.command!r} ran out of time")
    total, parts = await _left(box)
    if total is not None and not writes_reward(task):
        await log(Noticed(what="a reward the verifier did not write; it was ignored", paths=(REWARD_FILE,)))
        total = None
    if parts is not None and not writes_parts(task):
        await log(Noticed(what="a reward the verifier did not write; it was ignored", paths=(REWARD_PARTS,)))
        parts = None
    counted = results if not task.test_script else results[:-1]
    reward = reward_of(counted, total, parts)
    if reward is None and task.test_script:
        raise ScoringError(f"the test script wrote no reward to {REWARD_FILE} (exit code {results[-1].exit_code})")
    if reward is not None:
        await log(Scored(reward=reward))


async def _left(box: Sandbox) -> tuple[bytes | None, bytes | None]:
    """What is in reward.txt and reward.json.

    A verifier leaves plain files that it could write again; the code that it tests might leave something else, to keep
    the verifier from writing.
    """
    look = ["find", REWARD_DIR, "-mindepth", "1", "-maxdepth", "1", "-printf", r"%y %m %p\n"]
    # An image's PATH may begin below home, where the code under test could have put a `find` of its own.
    listed = await run(box, look, env={"PATH": PATH})
    found: dict[str, bytes] = {}
    for line in listed.stdout.text.splitlines():
        kind, mode, path = line.split(" ", 2)
        if path in (REWARD_FILE, REWARD_PARTS):
            if kind != "f" or not int(mode, 8) & 0o200:
                raise ScoringError(f"{path} is no plain file that can be written; the code under test may have made it")
            found[path] = await box.read(path, limit=64 << 10)
    return found.get(REWARD_FILE), found.get(REWARD_PARTS)
