"""Runs the checks one by one: whatever goes wrong is a verdict, and a hang is a failure."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio

from rollcage.agents.base import Agent
from rollcage.conformance.agents.checks import CHECKS, AgentCheck
from rollcage.conformance.agents.subject import Subject
from rollcage.conformance.sandboxes.values import CheckVerdict, Failed, NotApplicable
from rollcage.errors import UsageError
from rollcage.gateway import Gateway
from rollcage.sandboxes.base import Provider
from rollcage.simulators import ScriptedModel

DEADLINE_S = 300.0
"""For one check, its agent's download aside."""


def chosen(only: Sequence[str] = ()) -> list[AgentCheck]:
    """The checks of these names, or whose names begin with them; all of them where none is named."""
    for name in only:
        if not any(name in (check.name, check.name.partition(".")[0]) for check in CHECKS):
            known = ", ".join(check.name for check in CHECKS)
            raise UsageError(f"no check is called {name!r}", argument="only", remedy=f"there are {known}")
    return [check for check in CHECKS if not only or {check.name, check.name.partition(".")[0]} & set(only)]


@asynccontextmanager
async def opened_subject(
    agent: Agent, provider: Provider, *, pace: float = 1, template: str = ""
) -> AsyncIterator[Subject]:
    """An agent ready to be tried: with a gateway and a scripted model of its own."""
    async with Gateway.open() as gateway, ScriptedModel() as model:
        yield Subject(agent, provider, gateway, model, pace=pace, template=template)


async def judge(check: AgentCheck, subject: Subject) -> CheckVerdict:
    """Try one check."""
    began, outcome, detail = time.monotonic(), "passed", ""
    try:
        with anyio.fail_after(DEADLINE_S * subject.pace):
            if lacking := subject.lacks(check.needs):
                raise NotApplicable(lacking)
            await check.run(subject)
    except NotApplicable as reason:
        outcome, detail = "not_applicable", str(reason)
    except Failed as failure:
        outcome, detail = "failed", str(failure)
    except TimeoutError:
        outcome, detail = "failed", f"no end within {DEADLINE_S * subject.pace:g} s"
    except Exception as error:  # noqa: BLE001 - whatever an agent raises is its verdict
        outcome, detail = "failed", f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    return CheckVerdict.model_validate(
        {"name": check.name, "holds": check.holds, "outcome": outcome, "detail": detail, "seconds": seconds}
    )


async def check(
    agent: Agent, provider: Provider, *, only: Sequence[str] = (), pace: float = 1, template: str = ""
) -> AsyncIterator[CheckVerdict]:
    """Try an agent: one verdict after the other, as they come."""
    checks = chosen(only)
    async with opened_subject(agent, provider, pace=pace, template=template) as subject:
        for one in checks:
            yield await judge(one, subject)
