"""Runs the checks one by one, each against its own deadline: a hang is a failure, never a hang of the suite."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import anyio

from rollcage.conformance.sandboxes import (
    files,
    hardening,
    isolation,
    layering,
    lifecycle,
    limits,
    listening,
    listening_hard,
    processes,
    rewinding,
)
from rollcage.conformance.sandboxes.backends import traits_of
from rollcage.conformance.sandboxes.values import (
    BoxSubject,
    CheckVerdict,
    ConformanceCheck,
    Failed,
    NotApplicable,
    Outcome,
    Traits,
)
from rollcage.errors import UsageError
from rollcage.sandboxes.base import Provider

_FAMILIES = (files, processes, listening, listening_hard, layering, rewinding, lifecycle, limits, isolation, hardening)

CHECKS: tuple[ConformanceCheck, ...] = tuple(check for family in _FAMILIES for check in family.family.checks)
"""Everything a backend must hold."""

_GRACE_S = 30
"""So long a check may still clean up after its deadline."""


def chosen(only: Sequence[str] = ()) -> tuple[ConformanceCheck, ...]:
    """The checks of these names or families; all of them where none is named."""
    known = {name for check in CHECKS for name in (check.name, check.family)}
    unknown = [name for name in only if name not in known]
    if unknown:
        families = ", ".join(dict.fromkeys(check.family for check in CHECKS))
        raise UsageError(
            f"no check or family is called {unknown[0]!r}", argument="only", remedy=f"the families are {families}"
        )
    return tuple(check for check in CHECKS if not only or check.name in only or check.family in only)


async def check(
    provider: Provider, *, traits: Traits | None = None, only: Sequence[str] = ()
) -> AsyncIterator[CheckVerdict]:
    """Try a backend: one verdict after the other, as they come. `only` are names of checks or families."""
    for one in chosen(only):
        yield await judge(one, provider, traits)


async def judge(check: ConformanceCheck, provider: Provider, traits: Traits | None = None) -> CheckVerdict:
    """Try one check."""
    isolation.plant()
    subject = BoxSubject(provider, traits or traits_of(provider))
    patience, grace = check.deadline_s * subject.traits.pace, _GRACE_S * subject.traits.pace
    started = time.monotonic()
    scope = anyio.CancelScope(deadline=anyio.current_time() + patience)
    trial = asyncio.ensure_future(_tried(check, subject, scope))
    try:
        await asyncio.wait({trial}, timeout=patience + grace)
    except BaseException:
        scope.cancel()
        with anyio.move_on_after(grace, shield=True):
            await asyncio.wait({trial})
        raise
    if trial.done():
        outcome, detail = trial.result()
    else:
        # Its clean-up is shielded and hangs too. It stays behind; the other checks do not wait for it.
        trial.cancel()
        outcome, detail = "failed", f"it hung: no end {grace:g} s after its deadline of {patience:g} s"
    seconds = time.monotonic() - started
    return CheckVerdict(name=check.name, holds=check.holds, outcome=outcome, detail=detail, seconds=seconds)


async def _tried(check: ConformanceCheck, subject: BoxSubject, scope: anyio.CancelScope) -> tuple[Outcome, str]:
    try:
        with scope:
            await check.run(subject)
    except Exception as error:  # noqa: BLE001 - whatever a backend raises is its verdict
        return _verdict(check, error)
    if scope.cancelled_caught:
        return "failed", f"no end within {check.deadline_s * subject.traits.pace:g} s"
    return "passed", ""


def _verdict(check: ConformanceCheck, error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, ExceptionGroup):
        # A failure in one task ends the others; it is the one to tell.
        leaves = sorted(_leaves(error), key=lambda leaf: not isinstance(leaf, Failed | NotApplicable))
        return _verdict(check, leaves[0])
    if isinstance(error, NotApplicable):
        if check.excusable:
            return "not_applicable", str(error)
        return "failed", f"nothing excuses this: {error}"
    if isinstance(error, Failed):
        return "failed", str(error)
    return "failed", f"{type(error).__name__}: {error}"


def _leaves(error: Exception) -> list[Exception]:
    if isinstance(error, ExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]
