"""The exception tree. Each error names the boundary at which something broke.

RollcageError
├── UsageError            the caller asked for something that cannot be: bad argument, unknown name
│   └── TaskError         a task file that cannot be read
├── QueueFull             as many rollouts wait as may; ask again later
├── SetupError            this machine lacks something; `remedy` says exactly what to do
├── SandboxError          a box could not be opened, or refused what was asked of it
│   ├── SandboxLost       the box is gone; nothing more can be done in it
│   └── FileMissing       no such file in the box
├── EnvironmentFailed     a remote environment cannot be had, or cannot be used as asked
│   ├── EnvironmentLost   it was there, and is gone
│   └── ResetFailed       it did not go back to its start
├── AgentError            the agent could not be installed or started
├── ModelError            the model's endpoint cannot be used
│   └── ModelUnreachable  no answer, or one that will never change: refused, wrong key
├── ScoringError          the verifier ran but left no usable reward
│   └── VerifierHung      the verifier's time ran out
└── StoreError            the log could not be written or read
    ├── UnknownRollout    no rollout with that id; UnknownGroup, UnknownBatch: no such group, no such batch
    └── AlreadyStarted    the idempotency key names a rollout that is there already
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class RollcageError(Exception):
    """Root of everything rollcage raises on purpose: `argument: message; remedy`, one line a person can act on."""

    blame: str = ""
    """Whose fault it is, where the outcome that it leads to does not tell: a value of `Blame`."""

    def __init__(self, message: str = "", *, argument: str = "", remedy: str = "", blame: str = "") -> None:
        """`argument`: what is wrong, by the name that `RolloutRequest` or the function has for it.

        `remedy`: what to do. Names of arguments stand in it in braces: `give {base_url} or set VLLM_URL`.
        """
        super().__init__(message)
        self.message = message
        self.argument = argument
        self.remedy = remedy
        self.blame = blame or self.blame

    def __str__(self) -> str:
        """The whole line, with the names of arguments as Python and JSON have them."""
        return self.told(str)

    def told(self, spell: Callable[[str], str]) -> str:
        """The whole line; `spell` gives the name of an argument as its reader types it."""
        return "; ".join(part for part in self.parts(spell) if part)

    def parts(self, spell: Callable[[str], str]) -> tuple[str, str]:
        """What is wrong and what to do, apart."""
        wrong = f"{spell(self.argument)}: {self.message}" if self.argument else self.message
        return wrong, re.sub(r"\{(\w+)\}", lambda found: spell(found[1]), self.remedy)


class UsageError(RollcageError):
    """The caller asked for something that cannot be; `argument` names what is wrong, `remedy` says what to do."""


class TaskError(UsageError):
    """A task file that cannot be read or means nothing."""


class QueueFull(RollcageError):
    """As many rollouts wait as may."""

    def __init__(self, message: str, *, retry_after_s: float = 5) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SetupError(RollcageError):
    """This machine lacks something; `remedy` says what to do."""


class SandboxError(RollcageError):
    """A box could not be opened, or refused what was asked of it."""


class SandboxLost(SandboxError):
    """The box is gone: closed, killed or vanished."""


class FileMissing(SandboxError):
    """No such file in the box (or it is not a regular file)."""


class EnvironmentFailed(RollcageError):
    """A remote environment cannot be had, or cannot be used as asked."""


class EnvironmentLost(EnvironmentFailed):
    """The remote environment was there, and is gone or out of reach."""


class ResetFailed(EnvironmentFailed):
    """The remote environment did not go back to its start."""


class AgentError(RollcageError):
    """The agent could not be installed or started."""

    blame = "infrastructure"


class ModelError(RollcageError):
    """The model's endpoint cannot be used."""


class ModelUnreachable(ModelError):
    """The endpoint does not answer, or answers that it never will (refused, wrong key)."""


class ScoringError(RollcageError):
    """The verifier ran but left no usable reward."""


class VerifierHung(ScoringError):
    """The verifier's time ran out."""


class StoreError(RollcageError):
    """The log could not be written or read."""


class LogDamaged(StoreError):
    """The log's file is not what was written."""


class UnknownRollout(StoreError):
    """No rollout with that id in this log."""


class UnknownGroup(UnknownRollout):
    """No group with that id in this log."""


class UnknownBatch(UnknownRollout):
    """No batch with that name in this log."""


class AlreadyStarted(StoreError):
    """This caller has started a rollout under this idempotency key before."""

    def __init__(self, rollout_id: str) -> None:
        super().__init__(f"rollout {rollout_id} was started under this idempotency key")
        self.rollout_id = rollout_id


@contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Imports of packages that only the extra `extra` brings: SetupError where one is missing, with the remedy."""
    try:
        yield
    except ImportError as error:
        if (error.name or "").startswith("rollcage"):
            raise  # a fault of ours
        missing = f" ({error.name})" if error.name else ""
        raise SetupError(f"{what} needs more packages{missing}", remedy=f"pip install 'rollcage[{extra}]'") from error
