"""In a box: runs pytest, and tells the outcome of every test. Where it runs decides how far it can be believed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from rollcage.rollout.checks.inside.reporting import Tell


class TellingPlugin:
    """A plugin: one line for each test, when its last phase is over."""

    def __init__(self, tell: Tell, import_from: Sequence[str]) -> None:
        self._tell, self._import_from = tell, list(import_from)
        self._outcomes: dict[str, tuple[str, str]] = {}

    def pytest_configure(self) -> None:
        """The agent's folders come last, and only after plugins were looked for: they shadow nothing."""
        sys.path.extend(self._import_from)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test is over."""
        outcome, why = self._outcomes.pop(report.nodeid, ("passed", ""))
        if outcome == "passed" and (report.outcome != "passed" or hasattr(report, "wasxfail")):
            outcome, why = "failed" if report.outcome == "passed" else report.outcome, _last(report)
        if report.when == "teardown":
            self._tell(test=report.nodeid, outcome=outcome, why=why)
        else:
            self._outcomes[report.nodeid] = outcome, why

    def pytest_collectreport(self, report: Any) -> None:
        """A file could not be read."""
        if report.failed:
            self._tell(problem=f"{report.nodeid}: {_last(report)}")


def _last(report: Any) -> str:
    """The line that says what went wrong."""
    text = str(getattr(report, "longreprtext", "") or "")
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")] or text.splitlines()[-1:]
    return " ".join(lines)[:300]


def run(tests_dir: str, path: str, import_from: Sequence[str], tell: Tell) -> int:
    """Run the tests; no configuration and no conftest of the agent's is read."""
    import pytest

    target = os.path.join(tests_dir, path) if path else tests_dir
    words = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={tests_dir}", f"--confcutdir={tests_dir}"]
    return int(pytest.main([*words, target], plugins=[TellingPlugin(tell, import_from)]))
