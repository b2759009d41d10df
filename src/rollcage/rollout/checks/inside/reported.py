"""In a box, as the judged: runs a Python test framework beside the agent's code, and tells what it found."""

from __future__ import annotations

import os

from rollcage.rollout.checks.inside.pytest_run import run as run_pytest
from rollcage.rollout.checks.inside.reporting import begin
from rollcage.rollout.checks.inside.unittest_run import run as run_unittest


def main() -> None:
    """Run the tests of the order; the last word is the exit code, and nothing can be said after it."""
    leave = os._exit
    order, tell = begin()
    if order["kind"] == "pytest":
        try:
            import pytest  # noqa: F401 - before the agent's folders are on the path
        except ImportError:
            tell(missing="pytest")
            leave(3)
    run = run_pytest if order["kind"] == "pytest" else run_unittest
    code = run(order["tests_dir"], order["path"], order["import_from"], tell)
    tell(end=code)
    leave(code)


if __name__ == "__main__":
    main()
