"""A verifier with a box of its own: it gets the artifacts of the agent's work, where the agent left them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollcage.errors import SandboxError
from rollcage.events import BoxOpened, Log, Suspicion
from rollcage.rollout.setup import run_commands
from rollcage.rollout.suspicions import is_within
from rollcage.rollout.users import acting_as, user_of
from rollcage.sandboxes.base import PATH, SHELL, Provider, Sandbox, run
from rollcage.sandboxes.files import NotCopied, copy_path
from rollcage.types import Job, Stage, Task, VerifierBox

COPY_S = 120.0
"""How long copying one artifact may take; all of them together may take a third of the time there is."""

_PREPARE = """
rm -rf -- "$1" && mkdir -p -- "$@"
"""
# Of the agent's links, those that lead out of what was copied: the verifier would read something of its own there.
_UNLINK = """
[ -e "$1" ] || exit 0
top=$(readlink -m -- "$1")
find "$1" -type l -print0 | while IFS= read -r -d '' link; do
  case "$(readlink -m -- "$link")/" in "$top"/*) ;; *) rm -f -- "$link" && printf '%s\\n' "$link" ;; esac
done
"""


async def collect_state(job: Job, box: Sandbox, log: Log) -> None:
    """Run the task's `collect` commands where the agent worked; one that fails is told of in the log, and no error."""
    for hook in job.task.collect:
        offline = job.model_copy(update={"sandbox": job.sandbox.model_copy(update={"verify_hosts": ()})})
        with acting_as(box, await user_of(box, hook.user)):
            await run_commands(box, offline, (hook.command,), stage=Stage.VERIFY, log=log, seconds=hook.timeout_s)


@asynccontextmanager
async def verifiers_box(
    job: Job, own: VerifierBox, agents: Sandbox, provider: Provider, log: Log, seconds: float
) -> AsyncIterator[tuple[Sandbox, Job]]:
    """The verifier's box with the artifacts in it, and the job as it is judged there."""
    task = job.task
    spec = job.sandbox.for_verifier(own)
    async with provider.open(spec) as box:
        await log(BoxOpened(sandbox_id=box.id, backend=provider.name, fresh=True, notes=box.notes))
        places = [task.reward_dir, task.tests_dir, own.workdir, f"{task.top.rstrip('/')}/logs/artifacts"]
        made = await _plain(box, _PREPARE, *places)
        if made:
            raise SandboxError(f"cannot prepare the verifier's box: {made}")
        for artifact in own.artifacts:
            timeout_s = min(COPY_S, seconds / 3 / len(own.artifacts))
            try:
                await copy_path(agents, box, artifact.source, timeout_s=timeout_s, exclude=artifact.exclude)
            except NotCopied:
                await _plain(box, 'rm -rf -- "$1"', artifact.source)
                what = "cannot be copied to the verifier's box, which does not see it"
                await log(Suspicion(code="not_copied", what=what, paths=(artifact.source,)))
            if links := (await _plain(box, _UNLINK, artifact.source)).splitlines():
                what = "a link that leads out of the artifact it is in; it was removed"
                await log(Suspicion(code="link_outside", what=what, paths=tuple(links[:20])))
        with acting_as(box, await user_of(box, task.verify_user)):
            yield box, job.model_copy(update={"sandbox": spec, "task": _judged_there(task, own)})


def _judged_there(task: Task, own: VerifierBox) -> Task:
    """The task as the verifier's box has it: its work is what was copied."""
    tests = {"tests_tree": None, "more_tests": ()} if own.has_tests else {}
    kept = tuple(artifact.source for artifact in own.artifacts if artifact.source != own.workdir)
    # Where it works among its tests, they are no work of the agent's.
    guards = task.guards and not is_within(own.workdir, [task.tests_dir])
    return task.model_copy(update={"workdir": own.workdir, "keep": kept, "guards": guards, **tests})


async def _plain(box: Sandbox, script: str, *words: str) -> str:
    """What a script of ours said; its complaints where it failed."""
    argv = [*SHELL, script, "verifier", *words]
    ended = await run(box, argv, env={"PATH": PATH}, inherit_image_env=False, cwd="/")
    return ended.stdout.text if not ended.code else ended.stderr.text.strip() or f"exit code {ended.code}"
