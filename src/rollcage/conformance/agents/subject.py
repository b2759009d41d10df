"""The agent on trial: plays rollouts with it, and keeps what was seen, in its box too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio

from rollcage.agent_events import AgentOutput, AgentText, AgentToolCall
from rollcage.agents.base import (
    Agent,
    AgentContext,
    AgentExit,
    AsksNoModel,
    Emit,
    InProcess,
    RunsScript,
    Scriptable,
    TaskBound,
    ToolWords,
)
from rollcage.agents.purposes import classifier_of
from rollcage.conformance.agents.remote import ADDRESS, TOOL_WORDS, BoxEnvironments
from rollcage.errors import UsageError
from rollcage.events import Ended, Entry, Event, Queued
from rollcage.gateway import Gateway
from rollcage.results.fold import Rollout
from rollcage.rollout.run import RolloutDeps
from rollcage.rollout.run import run as run_rollout
from rollcage.sandboxes.base import SHELL, Provider, Sandbox, sh
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.sandboxes.layers import Layer
from rollcage.simulators import RecordedRequest, ScriptedModel
from rollcage.types import (
    HOME,
    AgentSpec,
    Endpoint,
    Job,
    JsonObject,
    Limits,
    SandboxSpec,
    ScriptedTurn,
    Task,
)

WORKDIR = f"{HOME}/workdir"
FIRST = "--help -p \U0001f600 “Grüße, 世界” $(id) `id` 'x' \\n\t"
"""The beginning of the usual prompt: dashes that look like options, letters of many scripts, what shells expand."""
PROMPT = f"{FIRST}\n\n  Write a note, then read it.  \n"
"""It ends with blanks: a prompt is handed over as it is."""
PROBE = "written 42"
"""The shell works it out: it is in no command, so whoever says it has seen the file."""
VERIFY = "grep -qx 'written 42' note.txt"
CHILD = "31415926"
"""How long the process sleeps that the agent leaves behind."""

LINGER = "sleep 0.2"
"""Ends a command whose words are looked for: Qwen Code can lose those of one that ends at once (docs/agents.md)."""

Need = Literal["model", "box", "work"]
"""What a check cannot do without: an agent that asks a model, that has a box, that does something at all."""

_TIMES = "/tmp/rollcage-cpu"  # noqa: S108 - in the box
_TIMED = f"TIMEFORMAT='%U %S'; {{ time \"$@\" 2>&3; }} 3>&2 2>>{_TIMES}"
_COUNTERS = "cat /proc/net/snmp /proc/net/snmp6"
_TRIES = ("Ip.OutNoRoutes", "Udp.NoPorts", "Ip6OutNoRoutes", "Udp6NoPorts")
"""What the kernel counts in a box without network: packets without a route, and questions that no name server heard."""


@dataclass
class Played:
    """One rollout, and what was seen of it."""

    rollout: Rollout
    endpoint: Endpoint
    """Of the scripted model that it was played with."""
    requests: Sequence[RecordedRequest]
    """What the model was asked."""
    egress: int | None
    """How often something in the box tried to reach the network; None where that cannot be counted."""
    holding_key: str
    """Files in the box with the real key in them."""
    left_alive: str
    """Processes of the agent's that outlived it."""
    cpu_s: float = 0.0
    """What its processes used, where that was asked for."""

    @property
    def ended(self) -> str:
        """How it ended."""
        return self.rollout.error or str(self.rollout.outcome)

    @property
    def first(self) -> JsonObject:
        """The first request to the model, as a chat."""
        return self.rollout.turns[0].request if self.rollout.turns else {}

    @property
    def texts(self) -> list[str]:
        """What the agent said, by its own events."""
        return [one.event.text for one in self.rollout.agent_events if isinstance(one.event, AgentText)]

    @property
    def calls(self) -> list[AgentToolCall]:
        """The tools it called, by its own events, each as it ended."""
        seen: dict[str, AgentToolCall] = {}
        for one in self.rollout.agent_events:
            if isinstance(one.event, AgentToolCall):
                seen[one.event.id or str(len(seen))] = one.event
        return list(seen.values())

    @property
    def told(self) -> str:
        """What came of its commands, as its model was told; what they printed, where it asks none."""
        if self.rollout.turns:
            return json.dumps(self.rollout.turns[-1].request["messages"][-1])
        return "".join(one.event.text for one in self.rollout.agent_events if isinstance(one.event, AgentOutput))


@dataclass
class Subject:
    """The agent on trial, and what it is tried with."""

    agent: Agent
    provider: Provider
    gateway: Gateway
    model: ScriptedModel
    pace: float = 1
    """Deadlines are multiplied by this."""
    template: str = ""
    """The template of its boxes, for backends that cannot do without one."""
    configured: Played | None = None
    """The rollout with everything set that the agent takes, once it was played."""
    _usual: Played | None = None
    _lock: anyio.Lock = field(default_factory=anyio.Lock)

    def lacks(self, needs: Sequence[Need]) -> str:
        """Why it cannot be tried in what needs these, by what its class declares; empty where it can."""
        no_model, no_box = isinstance(self.agent, AsksNoModel), isinstance(self.agent, InProcess)
        if "box" in needs and no_box:
            return "it works in no box: its tools are a remote environment's"
        if "model" in needs and no_model:
            return "it asks no model"
        if "work" in needs and no_model and not isinstance(self.agent, RunsScript):
            return "it does no work"
        return ""

    @property
    def words(self) -> ToolWords:
        """How its tools are called."""
        if isinstance(self.agent, InProcess):
            return TOOL_WORDS
        words = self.agent.tool_words if isinstance(self.agent, Scriptable) else None
        if words is None:
            raise UsageError(f"{self.agent.name} does not say how its tools are called: set tool_words")
        return words

    def script(self, *commands: str, edits: Mapping[str, str] | None = None) -> list[ScriptedTurn]:
        """Says something, runs each command in a turn of its own, writes files, and ends."""
        if isinstance(self.agent, AsksNoModel):
            return [ScriptedTurn(text=command) for command in commands]
        words = self.words
        calls = [words.run(command) for command in commands]
        if words.edit is not None:
            calls[1:1] = [words.edit(path, text) for path, text in (edits or {}).items()]
        turns = [ScriptedTurn(text=f"Step {number}.", tool_calls=(call,)) for number, call in enumerate(calls)]
        last = (words.run(words.submit),) if words.submit else ()
        return [*turns, ScriptedTurn(text="All is done.", tool_calls=last)]

    async def usual(self) -> Played:
        """The rollout that most checks look at: a command that leaves a process behind, an edit, a look, an end."""
        async with self._lock:
            if self._usual is None:
                writes = (
                    f"printf 'written %s\\n' $((6*7)) > note.txt; setsid sleep {CHILD} >/dev/null 2>&1 </dev/null &"
                )
                looks = f"cat note.txt; {LINGER}"
                script = self.script(writes, looks, edits={f"{WORKDIR}/edited.txt": "by its own tool\n"})
                self._usual = await self.play(PROMPT, script)
            return self._usual

    async def play(
        self,
        instruction: str,
        script: Sequence[ScriptedTurn],
        *,
        spec: Mapping[str, Any] | None = None,
        limits: Limits | None = None,
        while_running: Callable[[anyio.CancelScope, Endpoint], Coroutine[Any, Any, None]] | None = None,
        timed: bool = False,
    ) -> Played:
        """One whole rollout. `while_running`: goes on beside it, and may cancel it. `timed`: its CPU is measured."""
        endpoint = self.model.endpoint(script)
        asked = AgentSpec(name=self.agent.name, **(spec or {}))
        self.agent.check(asked)
        job = self._job(self._task(instruction, script, limits or Limits()), endpoint, asked)
        agent = self.agent.bound_to(job.task) if isinstance(self.agent, TaskBound) else self.agent
        watched = _WatchedAgent(agent, endpoint.key.get_secret_value(), timed=timed)
        entries = [Entry(rollout_id="conformance", seq=1, time=time.time(), event=Queued(job=job))]

        async def log(event: Event) -> None:
            entries.append(Entry(rollout_id="conformance", seq=len(entries) + 1, time=time.time(), event=event))

        deps = RolloutDeps(provider=self.provider, agent=watched, gateway=self.gateway)
        if job.environment:
            environments = BoxEnvironments(self.provider, job.sandbox, WORKDIR, VERIFY)
            deps = replace(deps, provider=InProcessProvider(), environments=environments)
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as scope:
                if while_running is not None:
                    tasks.start_soon(while_running, scope, endpoint)
                await run_rollout(job, deps, log)
            tasks.cancel_scope.cancel()
        assert any(isinstance(entry.event, Ended) for entry in entries)
        seen = watched.seen
        return Played(
            rollout=Rollout.fold(entries),
            endpoint=endpoint,
            requests=self.model.requests(endpoint),
            egress=seen.get("egress"),
            holding_key=seen.get("holding_key", ""),
            left_alive=seen.get("left_alive", ""),
            cpu_s=seen.get("cpu_s", 0.0),
        )

    def _task(self, instruction: str, script: Sequence[ScriptedTurn], limits: Limits) -> Task:
        """What is to be done, by whom it is written: in a script where the agent asks no model."""
        if isinstance(self.agent, InProcess):
            return Task(instruction=instruction, limits=limits)
        task = Task(instruction=instruction, verify=(VERIFY,), limits=limits)
        if isinstance(self.agent, RunsScript):
            commands = "\n".join(turn.text for turn in script)
            task = task.model_copy(update={self.agent.script_field: commands})
        return task

    def _job(self, task: Task, endpoint: Endpoint, asked: AgentSpec) -> Job:
        box = SandboxSpec(backend=self.provider.name, template=self.template)
        environment = ADDRESS if isinstance(self.agent, InProcess) else ""
        return Job(task=task, model=endpoint, agent=asked, sandbox=box, environment=environment)

    async def start_cost(self) -> float | None:
        """CPU seconds of its processes in a rollout of three model calls; None where that did not go well."""
        script = self.script("echo written 42 > note.txt", "true")
        played = await self.play("Write a note.", script, timed=True)
        return played.cpu_s if played.rollout.reward == 1.0 else None


class _WatchedAgent:
    """An agent whose box is looked at when it has ended, before anything there is put back."""

    def __init__(self, agent: Agent, secret: str, *, timed: bool = False) -> None:
        self._agent, self._secret, self._timed = agent, secret, timed
        self.name, self.version, self.own_paths = agent.name, agent.version, agent.own_paths
        self.origin = classifier_of(agent)
        if isinstance(agent, AsksNoModel):
            self.asks_no_model = True
        self.seen: dict[str, Any] = {}

    def check(self, spec: AgentSpec) -> None:
        self._agent.check(spec)

    def layers(self) -> Sequence[Layer]:
        return self._agent.layers()

    async def log_tail(self, box: Sandbox) -> str:
        return await self._agent.log_tail(box)

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        if self._timed:
            own: Any = _TimedBox(box)
            ending = await self._agent.solve(own, instruction, context, spec, workdir=workdir, emit=emit)
            told = (await sh(box, f"cat {_TIMES}")).stdout.text.split()
            self.seen["cpu_s"] = sum(map(float, told))
            return ending
        if isinstance(self._agent, InProcess):
            return await self._agent.solve(box, instruction, context, spec, workdir=workdir, emit=emit)
        before = await _tries(box)
        ending = await self._agent.solve(box, instruction, context, spec, workdir=workdir, emit=emit)
        after = await _tries(box)
        self.seen["egress"] = None if before is None or after is None else after - before
        grep = f"grep -rlF -e '{self._secret}' {HOME} /tmp 2>/dev/null"
        self.seen["holding_key"] = (await sh(box, grep, timeout_s=120)).stdout.text
        alive = f"grep -lz -e '^{CHILD}$' /proc/[0-9]*/cmdline 2>/dev/null"
        self.seen["left_alive"] = (await sh(box, alive)).stdout.text
        return ending


class _TimedBox:
    """A box in which bash tells what each command has used, in a file of its own."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    def __getattr__(self, name: str) -> Any:
        return getattr(self._box, name)

    def spawn(self, argv: Sequence[str], **options: Any) -> Any:
        return self._box.spawn([*SHELL, _TIMED, "timed", *argv], **options)


async def _tries(box: Sandbox) -> int | None:
    """How often something in this box has tried to reach the network."""
    counted = await sh(box, _COUNTERS)
    numbers: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for line in counted.stdout.text.splitlines():
        family, _, rest = line.partition(":")
        words = line.split()
        if rest and family in names:
            numbers |= {f"{family}.{name}": int(n) for name, n in zip(names.pop(family), words[1:], strict=False)}
        elif rest:
            names[family] = words[1:]
        elif len(words) == 2 and words[1].isdigit():
            numbers[words[0]] = int(words[1])
    return sum(numbers[name] for name in _TRIES if name in numbers) if "Ip.OutNoRoutes" in numbers else None


def without_builds(layers: Sequence[Layer]) -> list[Layer]:
    """The same layers, which must be there already: whoever builds one fails."""

    def refused(layer: Layer) -> Layer:
        async def build(folder: object) -> None:
            raise RuntimeError(f"{layer.name} was built again")

        return replace(layer, build=build)

    return [refused(layer) for layer in layers]
