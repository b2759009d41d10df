"""A rollout is its log: the events, and the entries that carry them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from rollcage.agent_events import AgentEvent, AgentRaw
from rollcage.types import (
    BatchPlace,
    Blame,
    CommandResult,
    GroupPlace,
    Job,
    JsonObject,
    Origin,
    Outcome,
    Reward,
    Stage,
    Turn,
    Value,
)


class Queued(Value):
    """The rollout exists."""

    kind: Literal["queued"] = "queued"
    job: Job
    """What is to be done; the endpoint's key is not in it."""
    owner: str = ""
    """The process that runs it; its lock tells whether it still lives."""
    caller: str = ""
    """Whose key asked for it; empty where nobody had to show one."""
    idempotency_key: str = ""
    """The caller's own name for this start: a second start under it joins this rollout."""
    arguments: dict[str, str] = {}
    """With an idempotency key: a digest of each argument that was given, which a second start must agree with."""
    resumable: bool = False
    """Whether a server that starts after this one's death may run it, as long as its agent has not begun: nothing
    was sampled yet, and what it needs is in this log and in that server's settings."""
    not_resumable_because: str = ""
    """Why not, in words for the error it will end with, should it matter."""
    reverifies: str = ""
    """The ended rollout whose stored work this one judges again; empty where this is a rollout of its own."""
    group: GroupPlace | None = None
    """Its place in the group it was started with; None where it was started alone."""
    batch: BatchPlace | None = None
    """Its place in a batch; None where it belongs to none."""
    origin: Origin | None = None
    """The rollout that it replays or was forked from; None where all of it is its own."""


class Requeued(Value):
    """The process that ran it died before its agent began; another one begins it anew, in a new box."""

    kind: Literal["requeued"] = "requeued"
    owner: str
    """The process that runs it from now on."""
    previous: str
    """The dead one; where this is no longer the owner, somebody else was quicker and this is refused."""


class StageStarted(Value):
    """A stage began."""

    kind: Literal["stage_started"] = "stage_started"
    stage: Stage


class StageEnded(Value):
    """A stage is over, and everything it started is dead."""

    kind: Literal["stage_ended"] = "stage_ended"
    stage: Stage
    seconds: float


class BoxOpened(Value):
    """A box is there."""

    kind: Literal["box_opened"] = "box_opened"
    sandbox_id: str
    backend: str
    fresh: bool = False
    """True for the second box of `verify_in = "fresh"`."""
    notes: tuple[str, ...] = ()
    """Limits this machine cannot enforce, in words."""


class Progress(Value):
    """What a stage is doing that takes a while and is done once: fetching, unpacking, building."""

    kind: Literal["progress"] = "progress"
    stage: Stage
    message: str
    """In words."""


class CommandStarted(Value):
    """A setup or verify command began."""

    kind: Literal["command_started"] = "command_started"
    stage: Stage
    command: str


class CommandEnded(Value):
    """A setup or verify command ended."""

    kind: Literal["command_ended"] = "command_ended"
    stage: Stage
    result: CommandResult


class AgentStarted(Value):
    """The agent process runs."""

    kind: Literal["agent_started"] = "agent_started"
    agent: str
    version: str


class AgentEmitted(Value):
    """The agent said or did something."""

    kind: Literal["agent_event"] = "agent_event"
    event: AgentEvent = AgentRaw()
    """What, in words that are no agent's own."""
    raw: JsonObject | None = None
    """The agent's own event, as it came; None where it has no events of its own."""


class AgentEnded(Value):
    """The agent process and all it started are dead."""

    kind: Literal["agent_ended"] = "agent_ended"
    exit_code: int | None
    """Its own exit code; None where it was killed because its time ran out."""
    timed_out: bool = False
    error: str | None = None
    """The agent's own last error, in one line."""
    log_tail: str = ""
    """The end of what it printed to stderr."""


class TurnEnded(Value):
    """A model call is complete (or broken) and captured."""

    kind: Literal["turn_ended"] = "turn_ended"
    turn: Turn


class Suspicion(Value):
    """Something the agent left that could have decided the result, had verification looked at it."""

    kind: Literal["suspicion"] = "suspicion"
    code: str = ""
    """What sort of suspicion: a stable word for programs; empty in logs of before there were such words."""
    what: str
    """The same in words."""
    paths: tuple[str, ...] = ()


class FilesCollected(Value):
    """What the agent left in the workdir."""

    kind: Literal["files_collected"] = "files_collected"
    files: dict[str, str]
    """`{path relative to the workdir: text}`."""
    extra: tuple[str, ...] = ()
    """Paths not collected: too large, too many, binary, or not regular files."""
    why: dict[str, str] = {}
    """Why each of them was not."""
    patch: str | None = None
    """What the agent changed in the workdir, as `git diff` writes it; None where that cannot be told."""
    patch_truncated: bool = False
    """The patch was longer than we keep."""


class EnvironmentOpened(Value):
    """A remote environment is there, and was put to its start."""

    kind: Literal["environment_opened"] = "environment_opened"
    address: str
    """As the job names it."""
    name: str
    """What it calls itself, with its version."""
    instance_id: str = ""
    """Which instance of it."""
    tools: tuple[str, ...] = ()
    """What the agent is offered."""


class ToolCalled(Value):
    """The agent called a tool of the remote environment."""

    kind: Literal["tool_called"] = "tool_called"
    name: str
    arguments: JsonObject = {}
    """As the agent gave them; where they were very long, their beginning as one text under `...`."""
    answer: str = ""
    """What the agent was told, as text; the beginning of it where it was very long."""
    failed: bool = False
    """The tool says that it failed, or could not be called."""
    error: str = ""
    """Why it could not be called."""
    seconds: float = 0.0


class WorkStored(Value):
    """What verification is about to see of the agent's work was stored, so that it can be judged again."""

    kind: Literal["work_stored"] = "work_stored"
    digest: str = ""
    """Names the archive beside the log; empty where none was kept."""
    paths: tuple[str, ...] = ()
    """The workdir, and what else was in it."""
    size: int = 0
    """Its bytes, uncompressed."""
    why_not: str = ""
    """Why none was kept."""


class Scored(Value):
    """The verifier's judgement."""

    kind: Literal["scored"] = "scored"
    reward: Reward


class AbortRequested(Value):
    """Somebody wants the rollout to stop; the process that runs it obeys."""

    kind: Literal["abort_requested"] = "abort_requested"
    reason: str = ""


class Ended(Value):
    """Nothing comes after this."""

    kind: Literal["ended"] = "ended"
    outcome: Outcome
    error: str | None = None
    """`Kind: message`, None where nothing broke."""
    error_code: str | None = None
    """A stable word for programs, None where nothing broke."""
    blame: Blame | None = None
    """Whose fault it is that there is no reward; not given: what `Outcome.blame` says."""
    seconds: float | None = None
    """Since it was queued, by a clock that nobody sets; None where another process queued it."""

    @model_validator(mode="before")
    @classmethod
    def _usual_blame(cls, data: Any) -> Any:
        if isinstance(data, dict) and "outcome" in data and data.get("blame") is None:
            with suppress(ValueError):
                return {**data, "blame": Outcome(data["outcome"]).blame}
        return data


Event = Annotated[
    Queued
    | Requeued
    | StageStarted
    | StageEnded
    | Progress
    | BoxOpened
    | CommandStarted
    | CommandEnded
    | AgentStarted
    | AgentEmitted
    | AgentEnded
    | EnvironmentOpened
    | ToolCalled
    | TurnEnded
    | Suspicion
    | FilesCollected
    | WorkStored
    | Scored
    | AbortRequested
    | Ended,
    Field(discriminator="kind"),
]

EVENT: TypeAdapter[Event] = TypeAdapter(Event)
"""Reads an event back from its JSON shape."""

Log = Callable[[Event], Awaitable[object]]
"""Appends to the log of one rollout; durable when it returns."""


class Entry(Value):
    """One line of the log."""

    rollout_id: str
    seq: int
    """1, 2, 3 ... within the rollout, without gaps."""
    time: float
    """Unix time at which it was appended."""
    event: Event
