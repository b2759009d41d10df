"""What the suite is made of: a check, its verdict, and the backend it is tried on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rollcage.sandboxes.base import Exit, Provider, Sandbox, run
from rollcage.sandboxes.layers import Layer
from rollcage.types import SandboxSpec, Value

Outcome = Literal["passed", "failed", "not_applicable"]


class Failed(Exception):
    """What had to hold did not; the message says what was seen."""


class NotApplicable(Exception):
    """The check means nothing for this backend; the message says why. Only excusable checks may raise it."""


@dataclass(frozen=True)
class Traits:
    """What a backend is, where that decides what can be asked of it. Nothing here excuses isolation or lifecycle."""

    own_kernel: bool = False
    """Every box has a kernel of its own (a virtual machine): what a command does to that kernel is its box's affair."""
    lose: Callable[[Sandbox], Awaitable[None]] | None = None
    """Makes this box vanish from outside, as a crash or an eviction would. Without it the checks of loss fail."""
    pace: float = 1
    """Deadlines are multiplied by this: a cloud is further away than this machine."""
    template: str = ""
    """The template of the boxes that are tried, for backends that cannot do without one."""


@dataclass(frozen=True)
class BoxSubject:
    """The backend on trial: what a check is given."""

    provider: Provider
    """It opens the boxes."""
    traits: Traits
    """What it says of itself."""

    @asynccontextmanager
    async def open(self, layers: Sequence[Layer] = (), **limits: Any) -> AsyncIterator[Sandbox]:
        """A new box; `limits` are fields of SandboxSpec."""
        async with self.provider.open(self.spec(**limits), layers) as box:
            yield box

    def spec(self, **limits: Any) -> SandboxSpec:
        """A wish for a box of this backend."""
        return SandboxSpec(backend=self.provider.name, template=self.traits.template, **limits)


Trial = Callable[[BoxSubject], Awaitable[None]]


@dataclass(frozen=True)
class ConformanceCheck:
    """One thing that must hold of every backend."""

    name: str
    """Family and name: `files.binary`."""
    holds: str
    """What must hold, in one sentence."""
    run: Trial
    """Tries it: returns where it holds, raises where it does not."""
    deadline_s: float
    """A check that takes longer has failed."""
    excusable: bool
    """Whether it may be not applicable."""

    @property
    def family(self) -> str:
        """What it is about: `files`."""
        return self.name.partition(".")[0]


class CheckVerdict(Value):
    """What came of one check."""

    name: str
    """Which check."""
    holds: str
    """What must hold, in one sentence."""
    outcome: Outcome
    """`not_applicable` means: not tried, for the reason in `detail`."""
    detail: str = ""
    """What was seen where it failed; why it was not tried."""
    seconds: float
    """How long it took."""


class Family:
    """Collects the checks of one module."""

    def __init__(self, name: str, *, excusable: bool = False) -> None:
        """Checks of an excusable family may be not applicable to a backend."""
        self._name, self._excusable = name, excusable
        self._checks: list[ConformanceCheck] = []

    def check(self, holds: str, *, deadline_s: float = 60) -> Callable[[Trial], Trial]:
        """Make a check of a function; its name is the check's."""

        def decorate(trial: Trial) -> Trial:
            name = f"{self._name}.{trial.__name__}"
            self._checks.append(ConformanceCheck(name, holds, trial, deadline_s, self._excusable))
            return trial

        return decorate

    @property
    def checks(self) -> tuple[ConformanceCheck, ...]:
        """All of them, in the order they were written."""
        return tuple(self._checks)


def expect(holds: object, seen: str) -> None:
    """Fail the check where something does not hold, with what was seen instead."""
    if not holds:
        raise Failed(seen)


def same(seen: object, wanted: object, what: str) -> None:
    """Fail the check where something is not what it should be."""
    if seen != wanted:
        raise Failed(f"{what}: {_short(seen)}, not {_short(wanted)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:120]}...{text[-60:]} ({len(text)} characters)"


async def python(box: Sandbox, script: str, *arguments: str, **more: Any) -> Exit:
    """Run Python text in a box."""
    return await run(box, ["python3", "-I", "-c", script, *arguments], **more)


async def said(box: Sandbox, script: str, *arguments: str, **more: Any) -> str:
    """What Python text in a box prints; it must end well."""
    ran = await python(box, script, *arguments, **more)
    if ran.code:
        raise Failed(f"a script in the box ended with {ran.code}: {ran.stderr.text.strip()[-400:]}")
    return ran.stdout.text
