"""Runs pytest; what fails is run once more, alone, and what then passes is named as flaky in the last lines.

    python scripts/run_tests.py -q -n 3 tests

Red where a test fails twice, where more than three are flaky, where pytest itself could not do its work, and where the
tests are not done after seventy minutes: then the last lines say what was known until then.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

MOST_FLAKY = 3
"""More than this many is red: then it is the change, or the tests, and not chance."""
LONGEST_S = 4200
"""A run that takes longer hangs: its own end tells more than that of whoever waits for it."""
MOST_AGAIN = 25
"""Where more than this many fail, nothing is run again: the tree is broken."""


class Failures:
    """A pytest plugin that notes which tests failed, in whatever phase."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names[report.nodeid] = None


def record(path: Path, arguments: Sequence[str]) -> int:
    """Run pytest in this process; the names of what failed go into a file."""
    failures = Failures()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # pytest then ends as for Ctrl-C, with its summary
    code = int(pytest.main(list(arguments), plugins=[failures]))
    path.write_text(json.dumps(list(failures.names)))
    return code


def run(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """Run pytest in a process of its own: its exit code, and what failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failed.json"
        with subprocess.Popen([sys.executable, __file__, "--record", str(path), *arguments]) as pytest_run:
            for seconds, stop in ((LONGEST_S, pytest_run.terminate), (60, pytest_run.kill)):
                try:
                    code = pytest_run.wait(seconds)
                    break
                except subprocess.TimeoutExpired:
                    print(f"\nthe tests are not done after {seconds} s; ending them", flush=True)
                    stop()
            else:
                code = pytest_run.wait()
        return code, json.loads(path.read_text()) if path.exists() else []


def main(arguments: Sequence[str]) -> int:
    """The exit code of the whole."""
    code, failed = run(arguments)
    if code != pytest.ExitCode.TESTS_FAILED or not failed or len(failed) > MOST_AGAIN:
        return code
    print(f"\n{len(failed)} failed; running them once more, alone", flush=True)
    # In a worker, where there are workers: a test that hangs takes the process that runs it along.
    again, twice = run(["-q", *(["-n", "1"] if "-n" in arguments else []), *failed])
    if again not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or bool(again) != bool(twice):
        return again or code
    flaky = [name for name in failed if name not in twice]
    for name in twice:
        print(f"failed twice: {name}")
    for name in flaky:
        print(f"flaky: {name} failed, and passed when it was run again")
    if len(flaky) > MOST_FLAKY:
        print(f"red: {len(flaky)} flaky tests are more than {MOST_FLAKY}")
    return code if twice or len(flaky) > MOST_FLAKY else 0


if __name__ == "__main__":
    given = sys.argv[1:]
    sys.exit(record(Path(given[1]), given[2:]) if given[:1] == ["--record"] else main(given))
