"""Judges what an agent left, where nothing the agent planted can decide: the VERIFY stage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import PurePosixPath
from typing import NamedTuple

import anyio

from rollcage.errors import SandboxError, SandboxLost, ScoringError, VerifierHung
from rollcage.events import BoxOpened, FilesCollected, Log, Suspicion, WorkStored
from rollcage.rollout.judge import judge
from rollcage.rollout.patch import (
    BEFORE,
    TIMEOUT_S,
    Patch,
    Remembered,
    changed_since,
    listing_of,
    patch_of,
    snapshot_workdir,
)
from rollcage.rollout.plain import packed, plain_work
from rollcage.rollout.restore import Saved, restored_paths, saved_for_later
from rollcage.rollout.separate import collect_state, verifiers_box
from rollcage.rollout.setup import Trees
from rollcage.rollout.suspicions import is_within, notice_suspicions
from rollcage.rollout.work import TIMEOUT_S as WORK_TIMEOUT_S
from rollcage.rollout.work import WorkKeeper, packed_in_box, store_work
from rollcage.sandboxes.base import PATH, InProcessSandbox, Provider, Rewindable, Sandbox, run
from rollcage.sandboxes.files import Collected, NotCopied, collect, copy_path
from rollcage.sandboxes.home_archive import HomeArchive, archived_home
from rollcage.types import HOME, Job, Reward, Task

GRACE_S = 5
"""How much longer the whole may take than its commands, so that one that hangs is named and its output kept."""

COLLECT_S = 30.0
"""How long clearing the workdir and reading its files may take."""
COPY_S = 120.0
"""How long copying a folder to a fresh box may take; all of them together may take a third of the time there is."""
SPARE_MB = 64
"""How much larger than twice the agent's disk a fresh box's is."""

# Whatever lies where the verifier will look is removed, links themselves and not what they point at. Programs are
# started only where there is something to remove or to change: usually there is not.
_CLEAR = """
for path in {logs} {tests}; do
  if [ -L "$path" ] || {{ [ -e "$path" ] && [ ! -d "$path" ]; }}; then rm -f -- "$path"; fi
done
[ -d "$1" ] && [ ! -L "$1" ] || rm -f -- "$1"
for path in {reward} {tests}; do
  [ -e "$path" ] || [ -L "$path" ] || continue
  [ ! -d "$path" ] || [ -L "$path" ] || chmod -R u+rwx -- "$path"
  rm -rf -- "$path" || exit 1
done
mkdir -p -- "$1" {reward} {tests} || exit 1
{{ [ -r "$1" ] && [ -w "$1" ] && [ -x "$1" ]; }} || chmod u+rwx -- "$1" || exit 1
cd -- "$1" || exit 1
# Links of the agent's to where tests and rewards will lie: nobody honest needs them.
mapfile -d '' -t links < <(find . -type l -print0)
if [ ${{#links[@]}} -gt 0 ]; then
  mapfile -d '' -t ends < <(printf '%s\\0' "${{links[@]}}" | xargs -0 readlink -mz --)
  for i in "${{!links[@]}}"; do
    case "${{ends[i]}}/" in {tests}/* | {logs}/*) printf '%s\\0' "${{links[i]}}" ;; esac
  done | xargs -0 rm -f --
fi
# git would wait for whoever writes to a pipe that it takes for one of its files.
[ ! -d .git ] || find -L .git -maxdepth 2 -type p -delete 2>/dev/null
# Files that git was told to pass over are looked at again.
if [ -f .git/index ] && [ "$(git config --get core.sparseCheckout)" != true ]; then
  for flag in assume-unchanged skip-worktree; do
    git -c core.fsmonitor=false ls-files -v -z | sed -zn 's/^[a-zS] //p' |
      git -c core.fsmonitor=false -c core.hooksPath=/dev/null update-index -z --no-$flag --stdin
  done
fi >/dev/null 2>&1
"""


class Snapshot(NamedTuple):
    """What setup left, as far as a second box needs it."""

    archive: HomeArchive | None = None
    """What it starts from."""
    saved: Saved = Saved()
    """What of the workdir is put back there."""
    workdir: Remembered = Remembered()
    """What the workdir was."""


NOTHING = Snapshot()


@asynccontextmanager
async def snapshot_for_verify(job: Job, box: Sandbox, own: Sequence[str]) -> AsyncIterator[Snapshot]:
    """Remember what setup left, so that verification can start from it: the last thing SETUP does.

    A box that cannot be rewound, or is not to be used again, gives what verification needs of its home as an archive.
    `own`: paths where the agent program keeps its own state.
    """
    if isinstance(box, InProcessSandbox):
        yield Snapshot()
        return
    task = job.task
    workdir = await snapshot_workdir(box, task.workdir)
    async with AsyncExitStack() as stack:
        archive: HomeArchive | None = None
        saved = Saved()
        limit = (2 * job.sandbox.disk_mb) << 20  # what the box's image brings is on no disk of its own
        if task.verify_in == "fresh":
            if workdir is not None and not workdir.empty:
                archive = await stack.enter_async_context(archived_home(box, only=(BEFORE,), limit=limit))
        elif isinstance(box, Rewindable):
            workdir = workdir or Remembered(listing=await listing_of(box, task.workdir))
            await box.checkpoint()
        else:
            # The agent's own folders can be large, and BEFORE lies in one of them.
            without = [task.workdir, *task.keep, *(path for path in own if not BEFORE.startswith(f"{path}/"))]
            archive = await stack.enter_async_context(archived_home(box, without=without, limit=limit))
        workdir = workdir or Remembered()
        if task.verify_in == "fresh" or not isinstance(box, Rewindable):
            saved = await stack.enter_async_context(saved_for_later(box, restored_paths(task, workdir.tests), limit))
        yield Snapshot(archive, saved, workdir)


async def verify(
    job: Job,
    box: Sandbox,
    provider: Provider,
    log: Log,
    *,
    seconds: float,
    own: Sequence[str] = (),
    snapshot: Snapshot = NOTHING,
    keeper: WorkKeeper | None = None,
    trees: Trees | None = None,
    goes_on: bool = False,
) -> Reward | None:
    """Rewind or replace the box, stage the tests, run them in fresh processes; the reward they gave, if any.

    `own`: paths where the agent program keeps its own state; changes there are not worth a notice. `snapshot`:
    what `snapshot_for_verify` gave. `trees`: where the task's files are. `keeper`: where the work is stored,
    as it is before anything judges it. `goes_on`: the agent will work in the box again; what
    verification did is undone.
    """
    if isinstance(box, InProcessSandbox):
        return None
    deadline = time.monotonic() + seconds
    own_box = job.task.verifier_box
    try:
        with anyio.fail_after(seconds + GRACE_S):
            if own_box:
                await _take_stock(job.task, box, log, keeper, seconds / 4, snapshot.workdir)
                await collect_state(job, box, log)
                async with verifiers_box(job, own_box, box, provider, log, seconds) as (clean, own_job):
                    return await judge(own_job, clean, log, deadline, trees)
            if job.task.verify_in == "box" and isinstance(box, Rewindable):
                await _rewind(job.task, box, log, own, snapshot.workdir.tests)
                place: AbstractAsyncContextManager[Sandbox] = nullcontext(box)
            else:
                # What the agent made must not use up the verifier's time; removing half a copy takes as long again.
                share = seconds / 3 / (1 + len(job.task.keep))
                place = _second_box(job, partial(copy_path, box, timeout_s=min(COPY_S, share)), provider, log, snapshot)
            async with place as clean:
                began = time.monotonic()
                changed = await _take_stock(job.task, clean, log, keeper, seconds / 4, snapshot.workdir)
                slow = time.monotonic() - began > seconds / 4
                await collect_state(job, clean, log)
                async with _undone(clean) if goes_on else nullcontext():
                    try:
                        return await judge(job, clean, log, deadline, trees, changed)
                    except VerifierHung as error:
                        if slow:  # by what the agent left
                            error.blame = "agent"
                        raise
    except TimeoutError:
        raise VerifierHung(f"verification had not ended after {seconds:g} s", blame="agent") from None


async def _take_stock(
    task: Task, box: Sandbox, log: Log, keeper: WorkKeeper | None, seconds: float, before: Remembered
) -> frozenset[str] | None:
    """Log what the agent left, and store it: as it is before anything judges it. Returns which files it changed."""
    plain = await plain_work(task, box) if before.empty else None
    if plain is None:
        collected, patch, stored = await _looked_at(task, box, keeper, seconds, before)
    else:
        collected, patch, stored = plain.collected, plain.patch, None
        if keeper is not None:
            stored = await store_work((task.workdir,), keeper, packed(task.workdir, plain.entries))
    await log(
        FilesCollected(
            files=collected.files,
            extra=tuple(collected.extra),
            why=collected.extra,
            patch=patch.text if patch else None,
            patch_truncated=bool(patch and patch.truncated),
        )
    )
    changed = patch.changed if patch else None
    if before.listing is not None and (now := await listing_of(box, task.workdir)) is not None:
        changed = changed_since(before.listing, now)
    await notice_suspicions(task, box, collected, patch, changed, before.tests, log)
    if stored is not None:
        await log(stored)
    return changed


async def _looked_at(
    task: Task, box: Sandbox, keeper: WorkKeeper | None, seconds: float, before: Remembered
) -> tuple[Collected, Patch | None, WorkStored | None]:
    """What the agent left, by commands in the box.

    The agent's files decide how long that takes; the verifier must have time left whatever they are.
    """
    places = {"logs": str(PurePosixPath(task.reward_dir).parent), "tests": task.tests_dir, "reward": task.reward_dir}
    cleared = anyio.Event()
    patches, work, unseen = list[Patch | None](), list[WorkStored](), list[SandboxError]()

    async def compare() -> None:
        limit = min(TIMEOUT_S, seconds)
        patches.append(await patch_of(box, task.workdir, before, after=cleared, timeout_s=limit))

    async def keep(keeper: WorkKeeper) -> None:
        if task.paths == "system":
            work.append(WorkStored(why_not="the task's work is a whole system"))
            return
        paths = (task.workdir, *task.keep)
        packing = packed_in_box(box, paths, cleared)
        work.append(await store_work(paths, keeper, packing, timeout_s=min(WORK_TIMEOUT_S, seconds)))

    # All begin at once, which takes most of their time, and look once what might mislead them is out of the way.
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(compare)
        if keeper is not None:
            tasks.start_soon(keep, keeper)
        try:
            clear, limit = _CLEAR.format(**places), min(COLLECT_S, seconds)
            collected = await collect(box, task.workdir, before=clear, begun=cleared, timeout_s=limit)
        except SandboxError as error:
            unseen.append(error)
            tasks.cancel_scope.cancel()
    for why in unseen:
        if isinstance(why, SandboxLost):
            raise why
        # What is in there decides how long that takes, and where all is kept the programs that look are the agent's.
        raise ScoringError(f"the agent's work cannot be looked at: {why}", blame="agent") from why
    return collected, patches[0], work[0] if work else None


@asynccontextmanager
async def _undone(box: Sandbox) -> AsyncIterator[None]:
    """What is done to a box in the block is gone after it: tests, rewards, the division between judge and judged."""
    assert isinstance(box, Rewindable)  # boxes whose system can be written are
    await box.checkpoint()
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await box.rewind(())


async def _rewind(task: Task, box: Rewindable, log: Log, own: Sequence[str], tests: Sequence[str]) -> None:
    whole = "/" in task.keep
    # Where all is kept, what is the judge's own is not: it is put back from outside, by no program of the agent's.
    back = (task.tests_dir, task.reward_dir) if whole else restored_paths(task, tests)
    changed = [path for path in await box.rewind((task.workdir, *task.keep), back) if not is_within(path, own)]
    if not changed:
        return
    if whole:
        what = "changed outside the workdir, and verification uses it as it is"
        await log(Suspicion(code="changed_system", what=what, paths=tuple(changed)))
    else:
        what = "changed outside the workdir; verification does not see it"
        await log(Suspicion(code="changed_outside", what=what, paths=tuple(changed)))


@asynccontextmanager
async def _second_box(
    job: Job, copy: Callable[[Sandbox, str], Awaitable[None]], provider: Provider, log: Log, snapshot: Snapshot
) -> AsyncIterator[Sandbox]:
    # Room for all that the agent may have written, what its image had brought, and the verifier's own files: whoever
    # fills a disk up to its last inode must not keep the verifier from working.
    spec = job.sandbox.model_copy(update={"disk_mb": 2 * job.sandbox.disk_mb + SPARE_MB})
    async with provider.open(spec) as fresh:
        await log(BoxOpened(sandbox_id=fresh.id, backend=provider.name, fresh=True, notes=fresh.notes))
        if isinstance(fresh, Rewindable):
            await fresh.checkpoint()
        if snapshot.archive is not None:
            await snapshot.archive.unpack(fresh)
        for path in (job.task.workdir, *job.task.keep):
            try:
                await copy(fresh, path)
            except NotCopied:
                # The agent made it so. It is judged without it: an error would be a way around a zero.
                await run(fresh, ["rm", "-rf", "--", path], env={"PATH": PATH}, inherit_image_env=False)
                what = "cannot be copied to a fresh box; verification does not see it"
                await log(Suspicion(code="not_copied", what=what, paths=(path,)))
        await snapshot.saved.put_back(fresh)
        if isinstance(fresh, Rewindable):
            # All of it stays; but where a disk is only watched, what was copied does not count as the verifier's.
            await fresh.rewind((HOME,))
        yield fresh
