"""Takes one rollout through its four stages: PROVISION, SETUP, AGENT, VERIFY. Read this first."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import anyio

from rollcage.agents.base import Agent, AgentContext, AgentExit, AsksNoModel, TaskBound
from rollcage.agents.purposes import classifier_of
from rollcage.environments.base import Environment, Environments, offered, ready
from rollcage.environments.in_box import tools_for
from rollcage.errors import UsageError, VerifierHung
from rollcage.events import AgentEnded, BoxOpened, Ended, Log, Scored, StageEnded, StageStarted, TurnEnded
from rollcage.gateway import Gateway
from rollcage.gateway.lease import Lease
from rollcage.rollout.ending import Failure, ended_by, mute, verdict_of
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

Place = tuple[Sandbox, Environment | None]
"""Where an agent works: its box, and the remote environment whose tools it has."""

GATEWAY_PORT = 7000
"""Where the agent finds its model, in every box."""


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
        """The next stage begins, unless it is the one that goes on."""
        if stage is self._stage:
            return
        await self.leave()
        self._stage, self._entered = stage, time.monotonic()
        await self._log(StageStarted(stage=stage))

    async def leave(self) -> None:
        """The stage is over, and all it started is dead."""
        if self._stage is not Stage.QUEUED:
            ended = StageEnded(stage=self._stage, seconds=time.monotonic() - self._entered)
            self._stage = Stage.QUEUED
            await self._log(ended)


@dataclass(frozen=True)
class RolloutContext:
    """One rollout under way: what its stages share."""

    job: Job
    deps: RolloutDeps
    log: Log
    name: str
    stages: Stages
    clock: Clock
    before_agent: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """Ends a rollout whose agent has not begun in time; without a deadline from then on."""


class StepDone(NamedTuple):
    """One step, worked on and judged."""

    ended: Ended
    """How the agent's work ended."""
    reward: Reward | None
    lease: Lease
    """What the gateway lent it; the next step's counts on from there."""
    worked_s: float


async def run(job: Job, deps: RolloutDeps, log: Log, *, name: str = "") -> None:
    """Run one rollout to its end; the last thing it does is to log `Ended`. Only a broken log raises.

    `name`: what the gateway knows it by, for those who want to hear its model while it speaks.
    """
    stages = Stages(log)
    try:
        ended = await _rollout(RolloutContext(job, deps, log, name, stages, Clock(job.task.limits)))
        with anyio.CancelScope(shield=True):
            await stages.leave()
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


async def _rollout(context: RolloutContext) -> Ended:
    job, deps, log, stages = context.job, context.deps, context.log, context.stages
    context.before_agent.deadline = anyio.current_time() + context.clock.until_reserve()
    with context.before_agent:
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
            return await _in_steps(context, (box, environment))
    message = f"the agent had not started when {job.task.limits.deadline_s:g} s less the scoring reserve were up"
    raise Failure(Outcome.TIMED_OUT, "timed_out", f"{message}; raise timeout_s")


async def _in_steps(context: RolloutContext, place: Place) -> Ended:
    """What follows once the box is set up: the agent works and is judged, once or step by step."""
    (box, environment), task, clock = place, context.job.task, context.clock
    steps, left_s = steps_of(context.job), task.limits.agent_timeout_s
    ended, done, stopped, earned = Ended(outcome=Outcome.FINISHED), None, "", list[tuple[str, Reward]]()
    await refuse_undivided([step.job for step in steps], box)
    for step in steps:
        last = step is steps[-1]
        if step is not steps[0]:
            # Not SETUP again: a rollout in that stage has sampled nothing, and may be begun anew after a crash.
            await context.stages.enter(Stage.AGENT)
        if step.job is not context.job:
            await set_up(step.job, box, context.log, context.deps.trees)
        done = await _step(context, step.job, place, most_s=left_s, before=done, goes_on=not last)
        left_s -= done.worked_s
        if done.reward:
            earned.append((step.name, done.reward))
        ended = done.ended if ended.outcome is Outcome.FINISHED else ended
        stopped = "" if last else falls_short(done.reward, step.min_reward)
        if stopped or done.ended.outcome is Outcome.LIMIT_REACHED:
            break
    own_reward = earned_by_steps(earned, task.step_reward, stopped) if task.steps else done and done.reward
    if reward := combined(await judged(context.job, environment, clock.until_end()), own_reward):
        await context.log(Scored(reward=reward))
    return ended


async def _step(
    context: RolloutContext, job: Job, place: Place, *, most_s: float, before: StepDone | None, goes_on: bool
) -> StepDone:
    """AGENT and VERIFY of one step. `most_s`: how long the agent may work, beside its task's own limits."""
    deps, log, clock, task, box = context.deps, context.log, context.clock, job.task, place[0]
    if task is not context.job.task and isinstance(deps.agent, TaskBound):
        deps = replace(deps, agent=deps.agent.bound_to(task))
    own = deps.agent.own_paths
    # Now: later, the agent may have changed who is who.
    agents_user, judge = await users(task, box)
    async with snapshot_for_verify(job, box, own) as snapshot:
        context.before_agent.deadline = math.inf
        await context.stages.enter(Stage.AGENT)
        began, started = time.time(), time.monotonic()
        seconds = min(task.limits.agent_timeout_s, most_s, clock.until_reserve())
        latest = anyio.current_time() + clock.until_reserve()
        with acting_as(box, agents_user, own_home=False):
            after = before and before.lease
            ended, lease = await work(
                job, deps, place, log, seconds=seconds, latest=latest, name=context.name, after=after
            )
        worked_s = time.monotonic() - started
        await context.stages.enter(Stage.VERIFY)
        async with unseen_files(job, box, own, log, since=began) as watched:
            with acting_as(box, judge):
                reward = await verify(
                    with_uploaded_tests(job),
                    box,
                    deps.provider,
                    watched,
                    seconds=min(task.limits.verify_timeout_s, clock.until_end()),
                    own=own,
                    snapshot=snapshot,
                    keeper=deps.work,
                    trees=deps.trees,
                    goes_on=goes_on,
                )
    return StepDone(ended, reward, lease, worked_s)


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
    if not remembered or job.task.files or job.task.trees or job.task.setup or job.task.paths == "system":
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
    place: Place,
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
    if unasked and ending is not None:
        raise Failure(Outcome.AGENT_FAILED, "no_model_call", mute(ending, tail), blame=Blame.INFRASTRUCTURE)
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
