"""How a check is run: a program, the order it gets, and the side on which it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rollcage.rollout.checks.report import CheckReport
from rollcage.types import JsonObject


def _as_it_is(report: CheckReport) -> None:
    """The program told every test itself."""


@dataclass(frozen=True)
class CheckPlan:
    """One run of tests."""

    argv: list[str]
    """The program, which takes its order from standard input."""
    order: JsonObject
    """What it is to do."""
    cwd: str
    """Where it starts."""
    in_judge: bool = False
    """It runs in the judge, and has code under test run elsewhere; else it runs as the judged."""
    scratch: bool = False
    """It works in a copy of the workdir."""
    text: str = ""
    """The program's own text, where it too comes by standard input, after the order: for Node."""
    read: Callable[[CheckReport], None] = _as_it_is
    """Takes the tests out of what a framework printed or wrote."""
