"""A rollout is its log: the events, the entries that carry them, and the state folded from them."""

from __future__ import annotations

from collections.abc import Iterable
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
    Task,
    Trust,
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


class Entry(Value):
    """One line of the log."""

    rollout_id: str
    seq: int
    """1, 2, 3 ... within the rollout, without gaps."""
    time: float
    """Unix time at which it was appended."""
    event: Event


class Verdict(Value):
    """What judging a rollout's stored work again came to."""

    rollout_id: str
    """The rollout in whose log this verification is told."""
    time: float
    """Unix time of its end."""
    reward: Reward | None
    """None where this verification broke."""
    outcome: Outcome
    error: str | None = None
    error_code: str | None = None
    blame: Blame | None = None
    changed: tuple[str, ...] = ()
    """The fields of the task that were not as they had been; none: the same verifier judged again."""

    @classmethod
    def of(cls, record: Rollout, task: Task) -> Verdict:
        """What the rollout that judged again came to; `task` is what was judged first."""
        changed = (name for name in Task.model_fields if getattr(record.job.task, name) != getattr(task, name))
        return cls(
            rollout_id=record.id,
            time=record.ended_at or 0.0,
            reward=record.score,
            outcome=record.outcome or Outcome.INTERNAL_ERROR,
            error=record.error,
            error_code=record.error_code,
            blame=record.blame,
            changed=tuple(changed),
        )


class Rollout(Value):
    """The state of a rollout: a fold over its entries, nothing else but for `verdicts`."""

    id: str
    job: Job
    owner: str = ""
    caller: str = ""
    resumable: bool = False
    stage: Stage = Stage.QUEUED
    created_at: float = 0.0
    ended_at: float | None = None
    progress: str = ""
    """What its stage is doing that takes a while, in words; empty where there is nothing to tell."""
    sandbox_id: str = ""
    setup: tuple[CommandResult, ...] = ()
    verify: tuple[CommandResult, ...] = ()
    turns: tuple[Turn, ...] = ()
    agent_events: tuple[AgentEmitted, ...] = ()
    agent_version: str = ""
    agent_exit_code: int | None = None
    agent_error: str | None = None
    agent_stderr_tail: str = ""
    environment: EnvironmentOpened | None = None
    tool_calls: tuple[ToolCalled, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    notes: tuple[str, ...] = ()
    files: dict[str, str] = {}
    files_extra: tuple[str, ...] = ()
    files_why: dict[str, str] = {}
    patch: str | None = None
    patch_truncated: bool = False
    work: WorkStored | None = None
    """Where the agent's work is stored; None where verification was never reached, or by an older rollcage."""
    reverifies: str = ""
    """The rollout whose stored work this one judges again."""
    batch: BatchPlace | None = None
    """Its place in a batch."""
    origin: Origin | None = None
    """The rollout that it replays or was forked from."""
    verdicts: tuple[Verdict, ...] = ()
    """What judging the stored work again came to, oldest first: out of the logs of those rollouts. `reward` stays the
    first verdict."""
    score: Reward | None = None
    """The verifier's judgement, whole; `reward` and `reward_parts` are what most want of it."""
    outcome: Outcome | None = None
    error: str | None = None
    error_code: str | None = None
    blame: Blame | None = None
    """Whose fault it is that there is no reward; None where there is one, or nobody is to blame."""
    timings: dict[str, float] = {}
    """Seconds by stage."""
    abort_requested: bool = False
    last_seq: int = 0

    @property
    def ended(self) -> bool:
        """Whether the log is complete."""
        return self.outcome is not None

    @property
    def reward(self) -> float | None:
        """What it earned; None where nothing was scored, which is not 0."""
        return self.score.total if self.score else None

    @property
    def training_reward(self) -> float | None:
        """The reward as a trainer counts it: 0 where the agent kept its work from being judged, so that nothing it
        does to its verifier spares it a zero; None where somebody else is to blame that there is none."""
        return 0.0 if self.reward is None and self.blame is Blame.AGENT else self.reward

    @property
    def reward_parts(self) -> dict[str, float]:
        """Named parts of the reward; none where the verifier named none."""
        return self.score.parts if self.score else {}

    @property
    def trust(self) -> Trust | None:
        """How far the reward can be trusted; None where there is none."""
        return self.score.trust if self.score else None

    @property
    def agent_raw(self) -> list[JsonObject]:
        """The agent's own events, in its own words, where it has such."""
        return [emitted.raw for emitted in self.agent_events if emitted.raw is not None]

    def to_dict(self) -> JsonObject:
        """As JSON holds it: the shape of `rollcage run --json` and of the server's results."""
        from rollcage.schema.result import result_of

        return result_of(self).model_dump(mode="json")

    def _repr_html_(self) -> str:
        from rollcage.schema.result import result_of
        from rollcage.schema.result_html import html_of

        return html_of(result_of(self))

    def __repr__(self) -> str:
        """In one line; the whole of it may be megabytes."""
        state = self.outcome.value if self.outcome else f"in {self.stage.value}"
        turns = "1 turn" if len(self.turns) == 1 else f"{len(self.turns)} turns"
        return f"<Rollout {self.id} {state}, reward {self.reward}, {turns}>"

    __str__ = __repr__

    @classmethod
    def fold(cls, entries: Iterable[Entry]) -> Rollout:
        """The state after these entries, which start with the rollout's first."""
        state: JsonObject = {}
        lists: dict[str, list[object]] = {
            name: [] for name in ("setup", "verify", "turns", "agent_events", "suspicions", "tool_calls")
        }
        timings: dict[str, float] = {}
        for entry in entries:
            _apply(state, lists, timings, entry)
        if "job" not in state:
            raise ValueError("a rollout's log starts with `queued`")
        values: JsonObject = {**state, **{name: tuple(rows) for name, rows in lists.items()}, "timings": timings}
        return cls.model_construct(None, **values)


def _apply(state: JsonObject, lists: dict[str, list[object]], timings: dict[str, float], entry: Entry) -> None:
    state["last_seq"] = entry.seq
    match entry.event:
        case Queued(job=job, owner=owner, caller=caller, resumable=resumable, reverifies=reverifies):
            state.update(id=entry.rollout_id, job=job, owner=owner, caller=caller, resumable=resumable)
            state.update(created_at=entry.time, reverifies=reverifies)
            state.update(batch=entry.event.batch, origin=entry.event.origin)
        case Requeued(owner=owner):
            state.update(owner=owner, stage=Stage.QUEUED, sandbox_id="", notes=(), environment=None)
            lists["setup"].clear()
            timings.clear()
        case StageStarted(stage=stage):
            state.update(stage=stage, progress="")
        case Progress(message=message):
            state["progress"] = message
        case StageEnded(stage=stage, seconds=seconds):
            timings[stage.value] = timings.get(stage.value, 0.0) + seconds
        case BoxOpened(sandbox_id=sandbox_id, notes=notes, fresh=False):
            state.update(sandbox_id=sandbox_id, notes=notes, progress="")
        case CommandEnded(stage=stage, result=result):
            lists["setup" if stage is Stage.SETUP else "verify"].append(result)
        case AgentStarted(version=version):
            state["agent_version"] = version
        case AgentEmitted() as emitted:
            lists["agent_events"].append(emitted)
        case AgentEnded(exit_code=exit_code, error=error, log_tail=tail):
            state.update(agent_exit_code=exit_code, agent_error=error, agent_stderr_tail=tail)
        case TurnEnded(turn=turn):
            lists["turns"].append(turn)
        case EnvironmentOpened() as opened:
            state["environment"] = opened
        case ToolCalled() as called:
            lists["tool_calls"].append(called)
        case Suspicion() as suspicion:
            lists["suspicions"].append(suspicion)
        case FilesCollected(files=files, extra=extra, why=why, patch=patch, patch_truncated=truncated):
            state.update(files=files, files_extra=extra, files_why=why, patch=patch, patch_truncated=truncated)
        case WorkStored() as work:
            state["work"] = work
        case Scored(reward=reward):
            state["score"] = reward
        case AbortRequested():
            state["abort_requested"] = True
        case Ended(outcome=outcome, error=error, error_code=code, blame=blame, seconds=seconds):
            state.update(
                stage=Stage.ENDED, progress="", ended_at=entry.time, outcome=outcome, error=error, error_code=code
            )
            # Without a measured time there is only the clock on the wall, which may have been set back.
            wall = entry.time - state.get("created_at", entry.time)
            timings["total"] = seconds if seconds is not None else wall if wall >= 0 else sum(timings.values())
            if not outcome.scored:
                state["score"] = None
            state["blame"] = None if state.get("score") else blame
        case _:
            pass
