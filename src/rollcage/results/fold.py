"""The state of a rollout: what its log comes to, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable

from rollcage.events import (
    AbortRequested,
    AgentEmitted,
    AgentEnded,
    AgentStarted,
    BoxOpened,
    CommandEnded,
    Ended,
    Entry,
    EnvironmentOpened,
    FilesCollected,
    Progress,
    Queued,
    Requeued,
    Scored,
    StageEnded,
    StageStarted,
    Suspicion,
    ToolCalled,
    TurnEnded,
    WorkStored,
)
from rollcage.types import (
    BatchPlace,
    Blame,
    CommandResult,
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
        from rollcage.results.result import result_of

        return result_of(self).model_dump(mode="json")

    def _repr_html_(self) -> str:
        from rollcage.results.html import html_of
        from rollcage.results.result import result_of

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
