"""What came back from a run of tests: lines that carry our nonce, and whether they are complete.

All of it may have been written by code under test. A report counts as a whole or not at all.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from rollcage.sandboxes.base import Exit

PASSED = "passed"
MOST_TESTS = 100_000
_MOST_TOLD, _MOST_TEXT = 1000, 2000
"""Tests that were not expected, and characters of one line."""


@dataclass
class CheckReport:
    """What a run of tests said."""

    begun: bool = False
    """Our own program had started; nothing of the agent's had been run before."""
    missing: str = ""
    """What the box lacks for it."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """`passed`, or what else, by the names of tests."""
    problems: list[str] = field(default_factory=list)
    """Why tests could not even be read."""
    output: str = ""
    """What a command printed, where its output is the report."""
    document: str = ""
    """The report that a command wrote."""
    end: int | None = None
    """The exit code that the end of the report announced."""
    incomplete: str = ""
    """Why it does not count; empty: it does."""
    _ordered: list[str] = field(default_factory=list)

    def add(self, test: str, outcome: str, why: str = "") -> None:
        """One test was reported; one that is reported twice has not passed."""
        test, why = _text(test), _text(why)
        if len(self.outcomes) >= MOST_TESTS:
            self.incomplete = f"it tells of more than {MOST_TESTS:,} tests"
            return
        said = outcome if outcome == PASSED or not why else f"{outcome}: {why}"
        self.outcomes[test] = "failed: it was reported twice" if test in self.outcomes else said

    def of(self, test: str) -> str:
        """The outcome of an expected test: of all its parameters, where it has some and none is named."""
        if self.incomplete:
            return f"failed: {self.incomplete}"
        if test in self.outcomes:
            return self.outcomes[test]
        if len(self._ordered) != len(self.outcomes):
            self._ordered = sorted(self.outcomes)
        begin = f"{test}["
        following = islice(self._ordered, bisect_left(self._ordered, begin), None)
        variants = [self.outcomes[name] for name in takewhile(lambda name: name.startswith(begin), following)]
        if not variants:
            return "failed: it was not reported"
        return next((outcome for outcome in variants if outcome != PASSED), PASSED)


def read_report(ended: Exit, nonce: str) -> CheckReport:
    """The report in what a program of ours printed."""
    report = CheckReport()
    for line in ended.stdout.data.splitlines():
        before, _, rest = line.partition(b" ")
        if before != nonce.encode():
            continue
        try:
            said = json.loads(rest)
            _take(report, said)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            report.incomplete = "its report is nonsense"
    if ended.timed_out:
        report.incomplete = "it ran out of time"
    elif ended.stdout.truncated:
        report.incomplete = "its report is too long"
    elif report.end is None:
        report.incomplete = report.incomplete or f"it ended early, with exit code {ended.code} and no whole report"
    elif report.end != ended.code:
        report.incomplete = f"it ended with exit code {ended.code} and not {report.end} as it said"
    return report


def _take(report: CheckReport, said: dict[str, object]) -> None:
    if report.end is not None:
        report.incomplete = "its report went on after the end"
    elif "begun" in said:
        report.begun = True
    elif "missing" in said:
        report.missing = _text(said["missing"])
    elif "test" in said:
        report.add(str(said["test"]), _text(said["outcome"]), str(said.get("why", "")))
    elif "problem" in said:
        report.problems.append(_text(said["problem"]))
    elif "output" in said:
        report.output = str(said["output"])
    elif "report" in said:
        report.document = str(said["report"])
    elif type(end := said["end"]) is int:
        report.end = end


def _text(said: object) -> str:
    """JSON can name half a character (a lone surrogate), which no log that people read can hold."""
    return str(said).encode("utf-8", "replace").decode()


def told(report: CheckReport, expected: Sequence[str]) -> str:
    """The report for people: what was expected first, then what else was reported."""
    lines = [f"{report.of(test)}  {test}" for test in expected]
    # An expected test that was not found is often one that has another name.
    known = frozenset(expected)
    more = [name for name in report.outcomes if name not in known and name.partition("[")[0] not in known]
    lines += [f"not counted: {report.outcomes[name]}  {name}" for name in more[:_MOST_TOLD]]
    if len(more) > _MOST_TOLD:
        lines.append(f"not counted: {len(more) - _MOST_TOLD:,} more")
    lines += [f"problem: {problem}" for problem in report.problems[:_MOST_TOLD]]
    return "\n".join(line[:_MOST_TEXT] for line in lines)
