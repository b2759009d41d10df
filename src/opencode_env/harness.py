"""The harness primitive: sessions that run an agent in a box, in this process, with no server. Sync, as published."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, Literal

import anyio
from anyio.abc import TaskStatus
from openenv.core.env_server.mcp_types import Tool
from openenv.core.harness import (
    HarnessAdapter,
    HarnessRolloutResult,
    HarnessRunLimits,
    Message,
    ModelStep,
    ResourceSession,
    ResourceSessionFactory,
    ToolResult,
    TraceEntry,
    TrainingTrace,
    VerifyResult,
)

from opencode_env._loop import loop
from opencode_env.config import OpenCodeConfig
from opencode_env.paths import AGENT_LOG, INSTRUCTION_PATH, PROXY_LOG
from opencode_env.sandbox.base import SandboxBackend, SandboxHandle
from opencode_env.sandbox.boxes import BoxHandle, backend_of
from opencode_env.serve_client import ServeClient
from opencode_env.task import OpenCodeTask
from opencode_env.traces import trace_entries, training_trace
from rollcage.agents.opencode.transcript import messages_of, session_of
from rollcage.errors import SandboxError
from rollcage.events import AgentEmitted, AgentEnded, Event, TurnEnded
from rollcage.results.fold import Rollout
from rollcage.rollout.ending import Failure
from rollcage.rollout.run import RolloutDeps, set_up, work
from rollcage.sandboxes.base import Provider
from rollcage.trajectory import Sequence, sequences
from rollcage.types import HOME, Job, JsonObject, Limits, Sampling, Task, Turn

Mode = Literal["black_box", "transparent_proxy"]
Driver = Literal["cli", "serve"]
Verifier = Callable[[SandboxHandle, OpenCodeTask], VerifyResult]
"""Judges what an agent left in its box; it is called when the agent is gone."""

_DRIVERS = {"cli": "run", "run": "run", "serve": "serve", "": ""}
_GRACE_S = 300
_KILLED = 137
"""The exit code of an agent that was stopped."""


class OpenCodeSession(ResourceSession):
    """One agent at work in a box. Made by a factory, with the agent running already."""

    def __init__(
        self,
        *,
        sandbox: BoxHandle,
        config: OpenCodeConfig,
        task: OpenCodeTask,
        verifier: Verifier | None = None,
        job: Job | None = None,
    ) -> None:
        """Made by a factory, which gives `job`; without it the session records no model calls."""
        self.sandbox, self.config, self.task = sandbox, config, task
        self._job, self._verifier = job or _job(config, task), verifier
        self._log: list[Event] = []
        self._working: Future[None] | None = None
        self._scope: anyio.CancelScope | None = None
        self._verified: VerifyResult | None = None
        self._known = threading.Event()
        self.error: str | None = None
        """What went wrong beyond the agent's exit code, in one line: no model could be reached, the box was lost."""

    def initial_messages(self) -> list[Message]:
        """The instruction."""
        return [{"role": "user", "content": self.task.instruction}]

    def list_tools(self) -> list[Tool]:
        """None: the agent has tools of its own."""
        return []

    def call_tool(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Always an error: the agent calls its own tools."""
        return ToolResult(error=f"{name}: this session has no tools to call; the agent runs a tool loop of its own")

    def verify(self, transcript: list[Message], final_state: Any | None = None) -> VerifyResult:
        """What the verifier says; no reward where there is none. An agent that still runs is stopped first."""
        self.abort()
        if self._verifier is None:
            return VerifyResult(env_reward=None, done=True)
        self._verified = self._verifier(self.sandbox, self.task)
        return self._verified

    def close(self) -> None:
        """End the agent and the box. What was recorded stays."""
        self.abort()
        self.sandbox.kill()

    def set_up(self) -> None:
        """The task's files and its setup commands; RuntimeError where one of them fails. Called by the factory."""
        try:
            loop().call(set_up, self._job, self.sandbox.box, self._record)
        except Failure as failure:
            raise RuntimeError(failure.ended.error) from failure
        self.sandbox.write_text(INSTRUCTION_PATH, self.task.instruction)

    def start_agent(self) -> None:
        """Let the agent begin; nothing happens where it has already. With `serve`, its session is there then."""
        if self._working is not None:
            return
        self._working, self._scope = loop().portal.start_task(self._work)
        self._working.add_done_callback(lambda _: self._known.set())
        if self.driver == "serve":
            self._known.wait()

    def wait_for_completion(self, timeout_s: float | None = None) -> int:
        """The agent's exit code; TimeoutError where it does not end in time, or used up its own."""
        if self._working is None:
            raise RuntimeError("the agent was not started; call start_agent() first")
        try:
            self._working.result(timeout_s)
        except FutureTimeout:
            raise TimeoutError(f"the agent had not ended after {timeout_s:g} s") from None
        ended = next((event for event in self._log if isinstance(event, AgentEnded)), None)
        if ended is not None and ended.timed_out:
            raise TimeoutError(f"the agent's {self.config.agent_timeout_s:g} s were up")
        if ended is None or ended.exit_code is None:
            return 1 if self.error else _KILLED
        return ended.exit_code

    def abort(self) -> bool:
        """Stop the agent: generation at once, then everything it started. Whether there was something to stop."""
        if self._working is None or self._scope is None or not self.running:
            return False
        loop().portal.call(self._scope.cancel)
        self._working.result()
        return True

    def fetch_trace(self) -> str:
        """What the agent said so far, as JSON lines."""
        return "".join(f"{json.dumps(data)}\n" for data in self.said)

    def fetch_proxy_trace(self) -> list[TraceEntry]:
        """Every model call so far, token by token; empty in `black_box` mode."""
        return trace_entries(self.turns, self._verified.env_reward if self._verified else None)

    def fetch_training_trace(self) -> TrainingTrace:
        """The calls that can be trained on, each with its mask."""
        if self._job.mode == "black_box":
            raise RuntimeError("black_box sessions record nothing to train on; use mode='transparent_proxy'")
        return training_trace(self.turns)

    def sequences(self) -> list[Sequence]:
        """The calls as the sequences that trainers take: those that continue each other are one."""
        return sequences(
            Rollout.model_construct(None, id=self.sandbox.sandbox_id, job=self._job, turns=tuple(self.turns))
        )

    def list_messages(self) -> list[JsonObject]:
        """The agent's own transcript so far: `[{info, parts}]`."""
        return messages_of(self.said, self.task.instruction)

    @property
    def mode(self) -> str:
        """Whether its model calls are recorded."""
        return self._job.mode

    @property
    def driver(self) -> Driver:
        """How the agent is driven: `cli` runs it once, `serve` speaks to its own server."""
        return "serve" if self._job.agent.driver == "serve" else "cli"

    @property
    def serve_client(self) -> ServeClient | None:
        """What the agent's own server tells of its session; None with the driver `cli`."""
        return ServeClient(self) if self.driver == "serve" else None

    @property
    def serve_session_id(self) -> str | None:
        """The id of the agent's own session, once it has one."""
        return session_of(self.said) or None

    @property
    def running(self) -> bool:
        """Whether the agent is at work."""
        return self._working is not None and not self._working.done()

    @property
    def said(self) -> list[JsonObject]:
        """The agent's own events so far."""
        return [event.raw for event in list(self._log) if isinstance(event, AgentEmitted) and event.raw is not None]

    @property
    def turns(self) -> list[Turn]:
        """The model calls so far."""
        return [event.turn for event in list(self._log) if isinstance(event, TurnEnded)]

    async def _work(self, *, task_status: TaskStatus[anyio.CancelScope]) -> None:
        on, box = loop(), self.sandbox.box
        parts = RolloutDeps(provider=self.sandbox.provider, agent=on.agent, gateway=on.gateway)
        with anyio.CancelScope() as scope:
            task_status.started(scope)
            try:
                seconds = self.config.agent_timeout_s
                await work(self._job, parts, (box, None), self._record, seconds=seconds, name="")
            except Failure as failure:
                self.error = failure.ended.error
            except Exception as error:  # noqa: BLE001 - whatever breaks, the session says so
                self.error = f"{type(error).__name__}: {error}"
        # For verifiers that read them in the box, as published. A box that is lost has none.
        broken = "".join(f"turn {turn.index}: {turn.error}\n" for turn in self.turns if turn.error)
        with suppress(SandboxError):
            await box.write(AGENT_LOG, self.fetch_trace().encode())
            await box.write(PROXY_LOG, broken.encode("utf-8", "replace"))

    async def _record(self, event: Event) -> None:
        self._log.append(event)
        if isinstance(event, AgentEmitted):
            self._known.set()


class OpenCodeHarnessAdapter(HarnessAdapter):
    """Lets OpenEnv's rollout functions drive our sessions: the agent's loop is its own, so it is waited for.

    A session's model is the one in its config: `model_step` is never called, and of `limits` nothing applies.
    The tokens are one sequence as the model saw it: the prompt of its first turn, then everything after it. What the
    model did not say there has logprob 0.0 and a 0 in `metrics["env_mask"]`, which TRL knows by that name.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        """`timeout_s`: how long a session may take; by default as long as its agent's budget."""
        self._timeout_s = timeout_s

    def run_white_box(
        self, model_step: ModelStep, session: ResourceSession, limits: HarnessRunLimits | None = None
    ) -> HarnessRolloutResult:
        """Wait for the agent, and give back its longest conversation as one sequence."""
        return self.run_black_box(session, limits)

    def run_black_box(self, session: ResourceSession, limits: HarnessRunLimits | None = None) -> HarnessRolloutResult:
        """The same: nobody but the agent calls the model."""
        if not isinstance(session, OpenCodeSession):
            raise TypeError(f"session: {type(session).__name__} is no OpenCodeSession")
        metrics: dict[str, Any] = {"timed_out": False}
        try:
            metrics["exit_code"] = session.wait_for_completion(self._timeout_s)
        except TimeoutError:
            # What it left is judged all the same.
            session.abort()
            metrics["timed_out"] = True
        messages = session.initial_messages()
        result = HarnessRolloutResult(messages=messages, done=not metrics["timed_out"], metrics=metrics)
        turns = [] if session.mode == "black_box" else session.fetch_training_trace().turns
        result.messages += [turn.response["choices"][0]["message"] for turn in turns]
        if found := session.sequences():
            # Of two that train as much, the later one.
            longest = max(reversed(found), key=lambda each: each.trained_tokens)
            row = longest.split()
            result.prompt_ids, result.completion_ids = list(row.prompt_ids), list(row.response_ids)
            result.logprobs = list(row.response_logprobs)
            metrics |= {
                "env_mask": list(row.response_mask),
                "turns": len(turns),
                "turns_in_sequence": len(longest.turns),
            }
        return result


class OpenCodeSessionFactory(ResourceSessionFactory[OpenCodeSession]):
    """Makes sessions, each with a box of its own."""

    def __init__(
        self,
        *,
        config: OpenCodeConfig,
        sandbox_backend: SandboxBackend | Provider,
        mode: Mode | None = "black_box",
        verifier: Verifier | None = None,
        install_timeout_s: int = 240,
        setup_timeout_s: int = 300,
        create_attempts: int = 3,
        create_backoff_s: float = 2.0,
        driver: str = "",
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        """`install_timeout_s` is accepted: boxes come with the agent. `driver`: `cli` or `serve`; the agent's own
        default where it is not given. `sandbox_backend`: one of ours by its published name, or any rollcage provider.
        `sampling`: fields of every request to the model, whatever the agent asks for.
        """
        mode = mode or "black_box"
        if mode not in ("black_box", "transparent_proxy"):
            raise ValueError(f"Unknown mode: {mode!r}; use 'black_box' or 'transparent_proxy'")
        if driver not in _DRIVERS:
            raise ValueError(f"Unknown driver: {driver!r}; use 'cli' or 'serve'")
        if config.sandbox_home != HOME:
            raise ValueError(f"sandbox_home {config.sandbox_home!r}: home is {HOME} in every box; leave it out")
        self._config, self._backend, self._mode, self._verifier = config, backend_of(sandbox_backend), mode, verifier
        self._setup_timeout_s, self._driver = setup_timeout_s, _DRIVERS[driver]
        self.sampling = dict(sampling or {})
        """What every request to the model says of sampling."""
        self._attempts, self._backoff_s = max(1, create_attempts), create_backoff_s

    def create(
        self, task: Any, seed: int | None = None, episode_id: str | None = None, start_agent: bool = True
    ) -> OpenCodeSession:
        """A session whose agent runs already, unless `start_agent` is false.

        `seed` tells apart what trainers run in groups; it is none of the model's: equal prompts would give equal
        samples. Give `sampling={"seed": ...}` to the factory for that.
        A box that cannot be opened is tried again. A task whose setup fails, or a model that cannot be reached, raises.
        """
        wanted = OpenCodeTask.coerce(task)
        job = self._job(wanted, episode_id)
        on = loop()
        on.agent.check(job.agent)
        on.call(on.gateway.check, job.model)
        for attempt in range(self._attempts):
            try:
                return self._create(wanted, job, start=start_agent)
            except SandboxError:
                if attempt + 1 == self._attempts:
                    raise
                time.sleep(self._backoff_s * 2**attempt)
        raise AssertionError("unreachable")

    def _create(self, task: OpenCodeTask, job: Job, *, start: bool) -> OpenCodeSession:
        seconds = self._config.agent_timeout_s + self._setup_timeout_s + _GRACE_S
        handle = self._backend.create(timeout_s=seconds, layers=loop().agent.layers())
        try:
            session = OpenCodeSession(sandbox=handle, config=self._config, task=task, verifier=self._verifier, job=job)
            session.set_up()
            if start:
                session.start_agent()
        except BaseException:
            handle.kill()
            raise
        return session

    def _job(self, task: OpenCodeTask, episode_id: str | None) -> Job:
        job = _job(self._config, task, episode_id)
        limits = job.task.limits.model_copy(update={"setup_timeout_s": float(self._setup_timeout_s)})
        return job.model_copy(
            update={
                "model": job.model.model_copy(update={"sampling": _sampling(job.model.sampling, self.sampling)}),
                "task": job.task.model_copy(update={"limits": limits}),
                "agent": self._config.agent(self._driver),
                "sandbox": self._backend.spec,
                "mode": self._mode,
            }
        )


def _job(config: OpenCodeConfig, task: OpenCodeTask, episode_id: str | None = None) -> Job:
    """What the agent is to do, in rollcage's own words."""
    limits = Limits(agent_timeout_s=config.agent_timeout_s, max_tokens_cap=config.cap)
    setup = tuple(script for script in (config.extra_setup_shell, task.setup_shell) if script)
    return Job(
        task=Task(
            id=episode_id or "", instruction=task.instruction, files=task.upload_files, setup=setup, limits=limits
        ),
        model=config.endpoint(),
        agent=config.agent("run"),
        mode="black_box",
    )


def _sampling(base: Sampling, policy: Mapping[str, Any]) -> Sampling:
    own = {name: policy[name] for name in ("temperature", "seed") if policy.get(name) is not None}
    others = {name: value for name, value in policy.items() if name not in ("temperature", "seed")}
    return Sampling.model_validate({**base.model_dump(), **own, "extra_body": {**base.extra_body, **others}})


__all__ = ["OpenCodeHarnessAdapter", "OpenCodeSession", "OpenCodeSessionFactory", "OpenCodeTask", "Verifier"]
