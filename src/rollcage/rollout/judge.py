"""The judge of a rollout: runs the task's verifier apart from the code it judges, and takes down its verdict."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from rollcage.errors import SandboxError, SandboxLost, ScoringError, VerifierHung
from rollcage.events import Event, Log, Suspicion
from rollcage.rollout.checks import Sides, run_checks
from rollcage.rollout.guards import guards
from rollcage.rollout.reward import PARTS, TEXT, decided, with_checks
from rollcage.rollout.setup import Trees, run_commands, stage_tree
from rollcage.rollout.verify_env import environment_from
from rollcage.sandboxes.base import PATH, InProcessSandbox, Judged, Listed, Sandbox, Separable, Separation, run
from rollcage.types import CommandResult, Job, Reward, Stage, Task, resolve_box_path

_MOST_REWARD = 64 << 10
_SIGNALS = range(129, 193)
"""Exit codes that tell of death by a signal."""

_SHARED = "this sandbox cannot keep code under test apart from its verifier"

ENVIRONMENT = {
    # A repository in the workdir is the agent's: its hooks and its file monitor are programs of the agent's.
    "GIT_CONFIG_COUNT": "2",
    "GIT_CONFIG_KEY_0": "core.fsmonitor",
    "GIT_CONFIG_VALUE_0": "false",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
    # An .npmrc in the workdir could name another shell for npm's scripts, and options that load code into node.
    "npm_config_script_shell": "/bin/sh",
    "npm_config_node_options": " ",
}
"""What verify commands get beside the plain environment of every command."""
WITHHELD = ("REWARD_FILE", "TESTS_DIR", "GIT_CONFIG_*", "npm_config_*")
"""What they do not hand on to the code that they launch."""


async def judge(
    job: Job,
    box: Sandbox,
    log: Log,
    deadline: float,
    trees: Trees | None = None,
    changed: Collection[str] | None = None,
) -> Reward | None:
    """Stage the tests, run the verifier, and read its verdict; None where the task has no verifier.

    `changed`: the files of the workdir that the agent made or changed, where that is known.
    """
    task = job.task
    for tree in (task.tests_tree, *task.more_tests):
        if tree:
            await stage_tree(box, tree, task.tests_dir, trees)
    for path, text in task.tests.items():
        await box.write(resolve_box_path(path, task.tests_dir, top=task.top), text.encode())
    commands = list(task.verify)
    if task.test_script:
        await box.write(f"{task.tests_dir}/test.sh", task.test_script.encode(), mode=0o755)
        commands.append(f"bash {task.tests_dir}/test.sh")
    if not commands and not task.checks:
        return None
    given, lost = await environment_from(box, None if "/" in task.keep else task.work_paths)
    if lost:
        what = "the image sets it to what lies in the agent's work; verify commands do not get it, or not all of it"
        await log(Suspicion(code="environment_variable", what=what, paths=lost))
    judged = None
    try:
        async with divided(task, box, log, changed) as judged:
            env = {**given, **_environment(task), **(_tools(judged, given) if judged else {})}
            checked = None
            if judged and task.checks:
                sides = Sides(box, judged, env, given)
                checked = await run_checks(task, sides, log, seconds=deadline - time.monotonic())
            results = await _run(job, box, log, commands, env, deadline)
            reward = await _verdict(task, box, log, results)
    except ScoringError as error:
        # Where the verifier saw the agent's work, or what it does, that may have brought this about, to spare a zero.
        alone = task.isolate and not task.checks and not (judged and judged.launched)
        error.blame = error.blame or ("task" if alone else "agent")
        raise
    if reward:
        # Where all is kept, the judge's own programs are the agent's.
        apart = task.isolate and "/" not in task.keep
        reward = reward.model_copy(update={"trust": "isolated" if apart else "shared"})
    if not checked:
        return reward
    return with_checks(reward, checked.parts, checked.scores, checked.trust, commands=len(results))


@asynccontextmanager
async def divided(
    task: Task, box: Sandbox, log: Log, changed: Collection[str] | None = None
) -> AsyncIterator[Judged | None]:
    """Keep the judged apart in a box; None where that cannot be done and the task does not rely on it."""
    shared = task.work_paths
    separation = Separation(
        shared,
        sealed=(task.tests_dir,) if task.seal_tests else (),
        hidden=(task.reward_dir,),
        covered=shared if task.isolate else (),
        removed=(task.tests_dir,) if task.verifier_box and task.verifier_box.has_tests else (),
        # Tests of proxied checks may look at files of the work: a link that their code makes would show them the tests.
        unlinked=bool(task.checks) and not (task.verify or task.test_script),
        needs_launcher=launches(task) or (task.isolate and task.paths == "system"),
        # A script that guards launch had them before it was launched.
        withheld=(*WITHHELD, *(task.verify_env if launches(task) else ())),
        guards=guards(task, changed, launches=launches(task)),
    )
    async with AsyncExitStack() as stack:
        cause: SandboxError | None = None
        if isinstance(box, Separable):
            try:
                judged = await stack.enter_async_context(box.separate(separation))
            except SandboxLost:
                raise
            except SandboxError as error:
                cause = error
            else:
                yield judged
                return
        if relies_on_separation(task):
            raise _not_apart(str(cause or "")) from cause
        await log(Suspicion(code="not_separated", what=f"{_SHARED}, nor seal the tests"))
        yield None


async def refuse_undivided(jobs: Sequence[Job], box: Sandbox) -> None:
    """SandboxError where a task relies on what its box is known not to do: now, before an agent has worked for it."""
    apart = [job for job in jobs if relies_on_separation(job.task) and not job.task.verifier_box]
    if not apart or isinstance(box, InProcessSandbox):
        return
    why = box.indivisible if isinstance(box, Separable) else "it is of a kind that does not try"
    if not why and any(launches(job.task) and job.sandbox.template for job in apart):
        found = await run(box, ["sh", "-c", "command -v python3"], env={"PATH": PATH})
        why = "the image has no python3, which `untrusted` runs with" if found.code else ""
    if why:
        raise _not_apart(why)


def _not_apart(why: str) -> SandboxError:
    because = f" ({why})" if why else ""
    remedy = "use a sandbox that can: `rollcage doctor` tells"
    return SandboxError(f"{_SHARED}{because}, and the task relies on that", remedy=remedy)


def relies_on_separation(task: Task) -> bool:
    """Whether the task may be judged only where judge and judged are kept apart."""
    return task.isolate or bool(task.checks) or launches(task)


def launches(task: Task) -> bool:
    """Whether the verifier speaks of `untrusted`: where there is none it is refused, not told so by a shell."""
    texts = (*task.verify, task.test_script, *task.tests.values())
    return any(re.search(r"\buntrusted\b", text) for text in texts)


def _environment(task: Task) -> dict[str, str]:
    places = {"REWARD_FILE": f"{task.reward_dir}/{TEXT}", "TESTS_DIR": task.tests_dir}
    return {**places, **ENVIRONMENT, **task.verify_env}


def _tools(judged: Judged, given: Mapping[str, str]) -> dict[str, str]:
    modules = ":".join(filter(None, (given.get("PYTHONPATH", ""), judged.tools)))
    return {"PATH": f"{judged.tools}:{given.get('PATH', PATH)}", "PYTHONPATH": modules}


async def _run(
    job: Job, box: Sandbox, log: Log, commands: list[str], env: Mapping[str, str], deadline: float
) -> list[CommandResult]:
    results: list[CommandResult] = []
    vouched: dict[str, bytes] = {}

    async def noted(event: Event) -> None:
        await log(event)
        if event.kind != "command_ended":
            return
        results.append(event.result)
        if event.result.exit_code in _SIGNALS:
            await _take_back(job.task, box, vouched)
        elif len(results) < len(commands):
            vouched.update(await _written(job.task, box))

    hung = await run_commands(
        box,
        job,
        commands,
        stage=Stage.VERIFY,
        log=noted,
        seconds=deadline - time.monotonic(),
        # Compiled modules that the agent left in the workdir are not read, nor those that an earlier command made.
        env=lambda: {**env, "PYTHONPYCACHEPREFIX": f"/tmp/pycache-{secrets.token_hex(8)}"},  # noqa: S108
        inherit_image_env=False,
    )
    if hung:
        raise VerifierHung(f"verify command {hung.command!r} ran out of time")
    return results


async def _written(task: Task, box: Sandbox) -> dict[str, bytes]:
    read = {path: await _read(box, path) for path in _places(task, (TEXT, PARTS))}
    return {path: data for path, data in read.items() if data is not None}


async def _read(box: Sandbox, path: str) -> bytes | None:
    """What a reward file says; None where nothing can be read, whatever was made of it: that is for the verdict."""
    try:
        return await box.read(path, limit=_MOST_REWARD)
    except SandboxLost:
        raise
    except SandboxError:
        return None


async def _take_back(task: Task, box: Sandbox, vouched: Mapping[str, bytes]) -> None:
    """A command that a signal killed vouches for nothing: rewards are again what they were before it."""
    remove = ["rm", "-rf", "--", *_places(task, (TEXT, PARTS))]
    await run(box, remove, env={"PATH": PATH}, inherit_image_env=False)
    try:
        for path, text in vouched.items():
            await box.write(path, text)
    except SandboxLost:
        raise
    except SandboxError as error:
        raise ScoringError(f"what was written before a command was killed cannot be put back: {error}") from error


async def _verdict(task: Task, box: Sandbox, log: Log, results: list[CommandResult]) -> Reward | None:
    left = await _left(task, box)
    try:
        reward, ignored = decided(task, results, left)
    except ScoringError as error:
        if left and not task.isolate:
            what = f"there is no telling whose reward this is: {error.message}"
            await log(Suspicion(code="foreign_reward", what=what, paths=_places(task, left)))
        raise
    if ignored:
        what = "not the verifier's reward; it was ignored"
        await log(Suspicion(code="foreign_reward", what=what, paths=_places(task, ignored)))
    # A script that broke has judged nothing, whatever the commands beside it say.
    silent = reward is None or reward.source == "commands"
    if task.test_script and silent and (reward is None or results[-1].exit_code):
        raise ScoringError(
            f"the test script wrote no reward to {task.reward_dir}/{TEXT} (exit code {results[-1].exit_code})"
        )
    return reward


def _places(task: Task, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{task.reward_dir}/{name}" for name in names)


async def _left(task: Task, box: Sandbox) -> dict[str, bytes | None]:
    """What lies at reward.txt and reward.json, by name; None for what is no plain file that could be written again.

    Under `isolate` the verifier alone writes there, and may well have left a file that only is to be read.
    """
    if isinstance(box, Listed) and not task.test_script:  # a script usually leaves one, and a command has to look
        with suppress(SandboxError):
            there = await box.names_in(task.reward_dir)
            if there is not None and not {TEXT, PARTS}.intersection(there):
                return {}
    names = ["(", "-name", TEXT, "-o", "-name", PARTS, ")"]
    # By name: what else the code under test has put there, and however it is called, is nobody's business.
    look = ["find", task.reward_dir, "-mindepth", "1", "-maxdepth", "1", *names, "-printf", r"%y %m %f\n"]
    # An image's PATH may begin below home, where the code under test could have put a `find` of its own.
    listed = await run(box, look, env={"PATH": PATH}, inherit_image_env=False)
    found: dict[str, bytes | None] = {}
    for kind, mode, name in (line.split(" ", 2) for line in listed.stdout.text.splitlines()):
        plain = kind == "f" and (task.isolate or bool(int(mode, 8) & 0o200))
        found[name] = await _read(box, f"{task.reward_dir}/{name}") if plain else None
    return found
