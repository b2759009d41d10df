"""How a rollout ended and what it earned: stages, outcomes, blame, rewards."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from rollcage.types.base import Value


class Stage(StrEnum):
    """Where a rollout is. Stages follow each other and never overlap."""

    QUEUED = "queued"
    PROVISION = "provision"
    SETUP = "setup"
    AGENT = "agent"
    VERIFY = "verify"
    ENDED = "ended"


class Outcome(StrEnum):
    """How a rollout ended, which says nothing of what it earned. Only the first four can carry a reward."""

    FINISHED = "finished"
    """The agent ended by itself, and what it left was scored (or there was nothing to verify)."""
    AGENT_TIMEOUT = "agent_timeout"
    """The agent used up its time; what it left was scored."""
    AGENT_FAILED = "agent_failed"
    """The agent ended with an error of its own; what it left was scored."""
    LIMIT_REACHED = "limit_reached"
    """The agent used up its turns or tokens; what it left was scored."""
    SETUP_FAILED = "setup_failed"
    """A setup command failed or hung; the agent never ran."""
    VERIFY_FAILED = "verify_failed"
    """The verifier hung or left something that is no reward."""
    SANDBOX_FAILED = "sandbox_failed"
    """No box could be opened."""
    SANDBOX_LOST = "sandbox_lost"
    """The box vanished while it was in use."""
    ENVIRONMENT_FAILED = "environment_failed"
    """The remote environment could not be had, reset or reached, or was lost."""
    MODEL_UNREACHABLE = "model_unreachable"
    """The model's endpoint did not answer, or refused us."""
    TIMED_OUT = "timed_out"
    """The one deadline of the whole rollout passed before the agent could start."""
    ABORTED = "aborted"
    """Somebody asked for it to stop."""
    CRASHED = "crashed"
    """The process that ran it died."""
    INTERNAL_ERROR = "internal_error"
    """A fault of rollcage's own; the log has the details."""

    @property
    def scored(self) -> bool:
        """Whether a rollout with this outcome may carry a reward."""
        return self in (Outcome.FINISHED, Outcome.AGENT_TIMEOUT, Outcome.AGENT_FAILED, Outcome.LIMIT_REACHED)

    @property
    def blame(self) -> Blame | None:
        """Whose fault it usually is that a rollout with this outcome has no reward."""
        return _BLAME.get(self)

    @classmethod
    def _missing_(cls, value: object) -> Outcome | None:
        return cls.FINISHED if value == FINISHED_BEFORE else None


class Blame(StrEnum):
    """Whose fault it is that a rollout has no reward: trainers count `agent` as a zero, and drop the others."""

    AGENT = "agent"
    """What the agent did kept the verifier from judging it."""
    TASK = "task"
    """The task's own setup or verifier is broken: it fails whoever works on it."""
    INFRASTRUCTURE = "infrastructure"
    """The machine, a box, the network, the model or rollcage itself failed: another try may fare better."""


_BLAME = {
    Outcome.SETUP_FAILED: Blame.TASK,
    Outcome.VERIFY_FAILED: Blame.TASK,
    Outcome.SANDBOX_FAILED: Blame.INFRASTRUCTURE,
    Outcome.SANDBOX_LOST: Blame.INFRASTRUCTURE,
    Outcome.ENVIRONMENT_FAILED: Blame.INFRASTRUCTURE,
    Outcome.MODEL_UNREACHABLE: Blame.INFRASTRUCTURE,
    Outcome.TIMED_OUT: Blame.INFRASTRUCTURE,
    Outcome.CRASHED: Blame.INFRASTRUCTURE,
    Outcome.INTERNAL_ERROR: Blame.INFRASTRUCTURE,
}
"""By outcome; an `Ended` that knows better says so itself. Nobody is to blame for what was stopped on request, or had
nothing to verify."""

Trust = Literal["isolated", "in_process", "shared"]
"""How far a reward can be trusted, best first."""

RewardFrom = Literal["reward.txt", "reward.json", "commands", "harbor"]
"""Where a verifier's number can be. `harbor`: in reward.json, else in reward.txt, and nowhere else."""

FINISHED_BEFORE = "succeeded"
"""What `finished` was called: callers may still say it, and clients of the published shapes are told it."""


class Standing(StrEnum):
    """What a rollout came to, at a glance: views colour by it, and exit codes follow it."""

    RUNNING = "running"
    """It has not ended."""
    PASSED = "passed"
    """Its reward is 1 or more."""
    PARTIAL = "partial"
    """Its reward is between 0 and 1."""
    FAILED = "failed"
    """Its reward is 0 or less."""
    UNSCORED = "unscored"
    """The agent finished and there was nothing to verify."""
    BROKEN = "broken"
    """It has no reward because something broke, or because it was stopped."""

    @classmethod
    def of(cls, outcome: Outcome | None, reward: float | None) -> Standing:
        """The standing of a rollout with this outcome and this reward."""
        if outcome is None:
            return cls.RUNNING
        if reward is None:
            return cls.UNSCORED if outcome is Outcome.FINISHED else cls.BROKEN
        return cls.PASSED if reward >= 1 else cls.PARTIAL if reward > 0 else cls.FAILED


class CommandResult(Value):
    """One shell command that was run in the box, with what it printed."""

    command: str
    """The shell text."""
    exit_code: int
    """Its exit code; 124 where its time ran out, 128+n where signal n killed it."""
    stdout: str = ""
    """The end of what it printed (long output is cut at the front)."""
    stderr: str = ""
    """The end of what it complained about."""
    seconds: float = 0.0
    """Wall time."""
    truncated: bool = False
    """Whether output was cut."""
    timed_out: bool = False
    """Whether it was killed because its time ran out."""
    refused_hosts: tuple[str, ...] = ()
    """Hosts that a setup command asked for and was not allowed to reach."""


class Reward(Value):
    """What a rollout earned: a total, and named parts where the verifier gave them."""

    total: float
    """The number trainers use."""
    parts: dict[str, float] = {}
    """Named components: the tests of `checks`, what `reward.json` says, and `verify` where a remote environment gave
    the total."""
    source: Literal["reward_file", "reward_json", "commands", "checks", "environment"] = "commands"
    """Where the number came from."""
    notice: str = ""
    """What is to be known about the total: where the verifier gave none, how it was made."""
    trust: Trust = "shared"
    """How far code under test was kept from what judged it. `isolated`: none of it was in the judge's reach.
    `in_process`: a test framework reported from inside the code's process. `shared`: the verifier may have run it
    beside itself."""
