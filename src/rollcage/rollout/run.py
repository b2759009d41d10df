"""Takes one rollout through its four stages: PROVISION, SETUP, AGENT, VERIFY. Read this first."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import anyio

from rollcage.agents.base import Agent, AgentContext, AgentExit, AsksNoModel, TaskBound
from rollcage.agents.purposes import classifier_of
from rollcage.environments.base import Environment, Environments, offered, ready
from rollcage.environments.in_box import tools_for
from rollcage.errors import (
    AgentError,
    EnvironmentFailed,
    EnvironmentLost,
    ModelUnreachable,
    ResetFailed,
    RollcageError,
    SandboxError,
    SandboxLost,
    ScoringError,
    SetupError,
    StoreError,
    UsageError,
    VerifierHung,
)
from rollcage.events import AgentEnded, BoxOpened, Ended, Event, Scored, StageEnded, StageStarted, TurnEnded
from rollcage.gateway import Gateway
from rollcage.gateway.lease import Lease
from rollcage.rollout.judge import refuse_undivided
from rollcage.rollout.opening import opened
from rollcage.rollout.reward import combined
from rollcage.rollout.setup import Trees, keep_trees, run_commands, stage_files, why_refused, with_uploaded_tests
from rollcage.rollout.steps import earned_by_steps, falls_short, steps_of
from rollcage.rollout.unseen import unseen_files
from rollcage.rollout.users import acting_as, user_of
from rollcage.rollout.verify import snapshot_for_verify, verify
from rollcage.rollout.work import WorkKeeper
from rollcage.sandboxes.base import BoxUser, InProcessSandbox, Provider, Sandbox
from rollcage.types import NO_MODEL, Blame, Job, Limits, Outcome, Reward, Stage, Task, Turn

GATEWAY_PORT = 7000
"""Where the agent finds its model, in every box."""

Log = Callable[[Event], Awaitable[object]]
"""Appends to the rollout's log; durable when it returns."""


class Failure(Exception):
    """The rollout ends here, with this outcome."""

    def __init__(self, outcome: Outcome, code: str, message: str, *, blame: Blame | None = None) -> None:
        super().__init__(message)
        self.ended = Ended(outcome=outcome, error=f"{outcome.value}: {message}", error_code=code, blame=blame)


@dataclass(frozen=True)
class RolloutDeps:
    """What a rollout is run with."""

    provider: Provider
    agent: Agent
    gateway: Gateway
    environments: Environments | None = None
    """Where the remote environment that the job names comes from."""
    work: WorkKeeper | None = None
    """Where the agent's work is kept."""
    generation: int | None = None
    """Which weights the gateway had when the rollout was started; None: those it has when the agent begins."""
    trees: Trees | None = None
    """Where files of tasks are kept."""


@dataclass
class Clock:
    """The one deadline of a rollout, and the reserve of it that only scoring may use."""

    limits: Limits
    started: float = field(default_factory=time.monotonic)

    def until_reserve(self) -> float:
        """Seconds left for everything before VERIFY."""
        return self.until_end() - self.limits.reserve_s

    def until_end(self) -> float:
        """Seconds left in all."""
        return max(0.0, self.started + self.limits.deadline_s - time.monotonic())


class Stages:
    """Logs where a rollout is: entering a stage ends the one before, so that they cannot overlap."""

    def __init__(self, log: Log) -> None:
        self._log, self._stage, self._entered = log, Stage.QUEUED, 0.0

    async def enter(self, stage: Stage) -> None:
        """The next stage begins."""
        await self.leave()
        self._stage, self._entered = stage, time.monotonic()
        await self._log(StageStarted(stage=stage))

    async def leave(self) -> None:
        """The stage is over, and all it started is dead."""
        if self._stage is not Stage.QUEUED:
            ended = StageEnded(stage=self._stage, seconds=time.monotonic() - self._entered)
            self._stage = Stage.QUEUED
            await self._log(ended)


async def run(job: Job, deps: RolloutDeps, log: Log, *, name: str = "") -> None:
    """Run one rollout to its end; the last thing it does is to log `Ended`. Only a broken log raises.

    `name`: what the gateway knows it by, for those who want to hear its model while it speaks.
    """
    stages = Stages(log)
    try:
        ended = await _rollout(job, deps, log, stages, name)
    except Failure as failure:
        ended = failure.ended
    except anyio.get_cancelled_exc_class():
        with anyio.CancelScope(shield=True):
            await stages.leave()
            await log(Ended(outcome=Outcome.ABORTED, error="aborted: stopped on request", error_code="aborted"))
        raise
    except Exception as error:  # noqa: BLE001 - the one place that catches everything
        ended = ended_by(error)
    with anyio.CancelScope(shield=True):
        await stages.leave()
        await log(ended)


async def _rollout(job: Job, deps: RolloutDeps, log: Log, stages: Stages, name: str) -> Ended:
    clock = Clock(job.task.limits)
    with anyio.CancelScope(deadline=anyio.current_time() + clock.until_reserve()) as before_agent:
        await stages.enter(Stage.PROVISION)
        await keep_trees(job.task, deps.trees)
        if job.model.kind != NO_MODEL.kind:
            await deps.gateway.check(job.model)
        async with (
            remote(job, deps, log) as environment,
            opened(deps.provider.open(job.sandbox, deps.agent.layers()), log) as box,
        ):
            await log(BoxOpened(sandbox_id=box.id, backend=deps.provider.name, notes=box.notes))
            await stages.enter(Stage.SETUP)
            await set_up(job, box, log, deps.trees, remembered=True)
            return await _in_steps(job, deps, (box, environment), log, stages, (clock, before_agent), name)
    message = f"the agent had not started when {clock.limits.deadline_s:g} s less the scoring reserve were up"
    raise Failure(Outcome.TIMED_OUT, "timed_out", f"{message}; raise timeout_s")


async def _in_steps(
    job: Job,
    deps: RolloutDeps,
    place: tuple[Sandbox, Environment | None],
    log: Log,
    stages: Stages,
    time_left: tuple[Clock, anyio.CancelScope],
    name: str,
) -> Ended:
    """What follows once the box is set up: the agent works and is judged, once or step by step."""
    box, environment = place
    clock, before_agent = time_left
    steps, own, trees = steps_of(job), deps.agent.own_paths, deps.trees
    agents_s, ended, stopped, lease = job.task.limits.agent_timeout_s, Ended(outcome=Outcome.FINISHED), "", None
    earned: list[tuple[str, Reward]] = []
    await refuse_undivided([step.job for step in steps], box)
    for step in steps:
        task = step.job.task
        if step.job is not job:
            # Not SETUP again: a rollout in that stage has sampled nothing, and may be begun anew after a crash.
            if step is not steps[0]:
                await stages.enter(Stage.AGENT)
            await set_up(step.job, box, log, trees)
            if isinstance(deps.agent, TaskBound):
                deps = replace(deps, agent=deps.agent.bound_to(task))
        # Now: later, the agent may have changed who is who.
        agents_user, judge = await users(task, box)
        async with snapshot_for_verify(step.job, box, own) as snapshot:
            before_agent.deadline = math.inf
            if step is steps[0]:
                await stages.enter(Stage.AGENT)
            began, started = time.time(), time.monotonic()
            seconds = min(task.limits.agent_timeout_s, agents_s, clock.until_reserve())
            latest = anyio.current_time() + clock.until_reserve()
            with acting_as(box, agents_user, own_home=False):
                verdict, lease = await work(
                    step.job, deps, place, log, seconds=seconds, latest=latest, name=name, after=lease
                )
            agents_s -= time.monotonic() - started
            await stages.enter(Stage.VERIFY)
            seconds = min(task.limits.verify_timeout_s, clock.until_end())
            async with unseen_files(step.job, box, own, log, since=began) as watched:
                with acting_as(box, judge):
                    found = await verify(
                        with_uploaded_tests(step.job),
                        box,
                        deps.provider,
                        watched,
                        seconds=seconds,
                        own=own,
                        snapshot=snapshot,
                        keeper=deps.work,
                        trees=trees,
                        goes_on=step is not steps[-1],
                    )
        if found:
            earned.append((step.name, found))
        ended = verdict if ended.outcome is Outcome.FINISHED else ended
        stopped = falls_short(found, step.min_reward) if step is not steps[-1] else ""
        if stopped or verdict.outcome is Outcome.LIMIT_REACHED:
            break
    own_reward = earned_by_steps(earned, job.task.step_reward, stopped) if job.task.steps else found
    if reward := combined(await judged(job, environment, clock.until_end()), own_reward):
        await log(Scored(reward=reward))
    return ended


async def users(task: Task, box: Sandbox) -> tuple[BoxUser | None, BoxUser | None]:
    """Whom agent and verifier see themselves as; None: as the box has it."""
    try:
        judge = None if task.verifier_box else await user_of(box, task.verify_user)
        return await user_of(box, task.agent_user), judge
    except UsageError as error:
        raise Failure(Outcome.SETUP_FAILED, "setup_failed", str(error), blame=Blame.TASK) from error


@asynccontextmanager
async def remote(job: Job, deps: RolloutDeps, log: Log) -> AsyncIterator[Environment | None]:
    """The remote environment that the job names, at its start; released at the end of the block."""
    if deps.environments is None:
        yield None
    else:
        async with ready(deps.environments, job.environment, job.task, log) as environment:
            yield environment


async def judged(job: Job, environment: Environment | None, seconds: float) -> float | None:
    """What the remote environment says the agent earned; None where there is none, or it judges nothing."""
    if environment is None:
        return None
    seconds = min(job.task.limits.verify_timeout_s, seconds)
    try:
        with anyio.fail_after(seconds):
            return await environment.reward(job.task)
    except TimeoutError:
        raise VerifierHung(f"{job.environment} had not judged the agent's work after {seconds:g} s") from None


async def set_up(job: Job, box: Sandbox, log: Log, trees: Trees | None = None, *, remembered: bool = False) -> None:
    """The workdir, the task's files and commands. `remembered`: a snapshot follows, which makes an empty workdir."""
    if isinstance(box, InProcessSandbox):
        return
    if not remembered or job.task.files or job.task.trees or job.task.setup:
        await stage_files(box, job.task, trees)
    seconds = job.task.limits.setup_timeout_s
    failed = await run_commands(box, job, job.task.setup, stage=Stage.SETUP, log=log, seconds=seconds)
    if failed:
        code = "setup_timeout" if failed.timed_out else "setup_failed"
        said = failed.stderr.strip().splitlines()[-1:] or [""]
        how = "ran out of time" if failed.timed_out else f"ended with exit code {failed.exit_code}"
        why = why_refused(job, failed.refused_hosts)
        # What fetches something fails for reasons that lie elsewhere; what may not be fetched fails every time.
        blame = Blame.INFRASTRUCTURE if job.sandbox.setup_hosts and not why else Blame.TASK
        message = ". ".join(part for part in (f"setup command {failed.command!r} {how}", why, said[0]) if part)
        raise Failure(Outcome.SETUP_FAILED, code, message, blame=blame)


async def work(
    job: Job,
    deps: RolloutDeps,
    place: tuple[Sandbox, Environment | None],
    log: Log,
    *,
    seconds: float,
    latest: float = math.inf,
    name: str,
    after: Lease | None = None,
) -> tuple[Ended, Lease]:
    """The agent works, the gateway records. When this returns its processes are dead, its key and its tools void.

    Its `seconds` stand still while the gateway is paused and it waits for its model, but not beyond `latest`.
    """
    ending: AgentExit | None = None
    box, environment = place

    async def record(turn: Turn) -> None:
        await log(TurnEnded(turn=turn))

    async with (
        box.listen(GATEWAY_PORT) as sock,
        deps.gateway.lend(
            job.model,
            sock,
            limits=job.task.limits,
            mode=job.mode,
            record=record,
            name=name,
            policy_version=job.policy_version,
            generation=deps.generation,
            classify=classifier_of(deps.agent),
            after=after,
        ) as lease,
        tools_for(job.task, box, environment) as tools,
        offered(tools, box, log) as tools_url,
    ):
        with anyio.move_on_after(max(0.0, seconds)) as scope:
            lease.on_pause = stopwatch(scope, latest)
            own_server = next((server.url for server in job.task.mcp_servers if server.url), "")
            context = AgentContext(lease.endpoint, tools_url or own_server)
            ending = await deps.agent.solve(
                box, job.task.instruction, context, job.agent, workdir=job.task.workdir, emit=log
            )
    tail = await deps.agent.log_tail(box)
    if ending is None:
        await log(AgentEnded(exit_code=None, timed_out=True, log_tail=tail))
    else:
        await log(AgentEnded(exit_code=ending.code, error=ending.error, log_tail=tail))
    silent = lease.turns > 0 and not lease.heard
    unasked = lease.turns == 0 and not lease.limit_reached and not isinstance(deps.agent, AsksNoModel)
    if unasked and ending is not None and ending.code == 0:
        raise Failure(Outcome.AGENT_FAILED, "no_model_call", _mute(ending, tail), blame=Blame.INFRASTRUCTURE)
    return verdict_of(ending, lease.last_failure, limit=lease.limit_reached, silent=silent), lease


def stopwatch(scope: anyio.CancelScope, latest: float) -> Callable[[bool], None]:
    """Stops the time of a scope while it is told so; `latest` holds all the same."""
    left = 0.0

    def tell(waits: bool) -> None:
        nonlocal left
        if waits:
            left, scope.deadline = scope.deadline - anyio.current_time(), latest
        else:
            scope.deadline = min(latest, anyio.current_time() + left)

    return tell


def _mute(ending: AgentExit, tail: str) -> str:
    """Why an agent that ended well without its model has not ended well: its reward would be that of no work."""
    words = ending.last_words or "".join(tail.strip().splitlines()[-1:])
    said = f"its last words: {words[-500:]}" if words else "it said nothing"
    return f"the agent ended with exit code 0 and never called its model; {said}"


def verdict_of(ending: AgentExit | None, last: Turn | None, *, limit: str, silent: bool) -> Ended:
    """How the AGENT stage ended; raises where its work must not be scored.

    `ending`: None is an agent whose time ran out. `last`: the model's last failure, if no good answer came after it;
    calls that the agent itself broke off are none. `silent`: the model was asked and never said a word; one that
    speaks and is slow has used up the agent's time, and what there is is scored.
    """
    if ending is None and last is None and silent:
        raise Failure(Outcome.MODEL_UNREACHABLE, "model_unreachable", "the model was asked and never answered in time")
    if last is not None and _model_broke(last) and (ending is None or ending.code != 0):
        status = f"HTTP {last.status}" if last.status else "none"
        message = f"the model's last answer was {status}. {last.error or ''}".strip()
        raise Failure(Outcome.MODEL_UNREACHABLE, "model_unreachable", message)
    if ending is None:
        outcome, message = Outcome.AGENT_TIMEOUT, "the agent's time ran out"
    elif limit:
        outcome, message = Outcome.LIMIT_REACHED, limit
    elif ending.code != 0:
        outcome, message = Outcome.AGENT_FAILED, f"exit code {ending.code}. {ending.error or ''}".strip()
    else:
        return Ended(outcome=Outcome.FINISHED)
    return Ended(outcome=outcome, error=f"{outcome.value}: {message}", error_code=outcome.value)


def _whole(turn: Turn) -> bool:
    return turn.status == 200 and turn.error is None


def _model_broke(turn: Turn) -> bool:
    """Whether it was the model's side that failed, and not what the agent asked for."""
    return not _whole(turn) and (turn.status in (0, 200, 401, 403, 404, 408, 429) or turn.status >= 500)


_OUTCOMES: tuple[tuple[type[Exception], Outcome, str], ...] = (
    (SandboxLost, Outcome.SANDBOX_LOST, "sandbox_lost"),
    (SetupError, Outcome.SANDBOX_FAILED, "machine_not_ready"),
    (SandboxError, Outcome.SANDBOX_FAILED, "sandbox_failed"),
    (ModelUnreachable, Outcome.MODEL_UNREACHABLE, "model_unreachable"),
    (EnvironmentLost, Outcome.ENVIRONMENT_FAILED, "environment_lost"),
    (ResetFailed, Outcome.ENVIRONMENT_FAILED, "reset_failed"),
    (EnvironmentFailed, Outcome.ENVIRONMENT_FAILED, "environment_failed"),
    (AgentError, Outcome.AGENT_FAILED, "agent_not_started"),
    (VerifierHung, Outcome.VERIFY_FAILED, "verify_timeout"),
    (ScoringError, Outcome.VERIFY_FAILED, "bad_reward"),
    (StoreError, Outcome.INTERNAL_ERROR, "log_failed"),
    (RollcageError, Outcome.INTERNAL_ERROR, "internal_error"),
)


def _causes(error: Exception) -> Iterator[Exception]:
    """What went wrong, out of the groups that concurrent tasks wrap it in."""
    if isinstance(error, ExceptionGroup):
        for inner in error.exceptions:
            yield from _causes(inner)
    else:
        yield error


def ended_by(error: Exception) -> Ended:
    """How a rollout ends that this error came out of."""
    causes = list(_causes(error))
    for kind, outcome, code in _OUTCOMES:
        for cause in causes:
            if isinstance(cause, kind):
                blame = Blame(cause.blame) if isinstance(cause, RollcageError) and cause.blame else None
                return Ended(outcome=outcome, error=f"{outcome.value}: {cause}", error_code=code, blame=blame)
    error = causes[0]
    message = f"{Outcome.INTERNAL_ERROR.value}: {type(error).__name__}: {error}"
    return Ended(outcome=Outcome.INTERNAL_ERROR, error=message, error_code="internal_error")
