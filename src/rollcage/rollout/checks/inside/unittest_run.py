"""In a box: runs unittest, and tells the outcome of every test. Where it runs decides how far it can be believed."""

from __future__ import annotations

import os
import sys
import unittest
from collections.abc import Iterator, Sequence
from typing import Any

from rollcage.rollout.checks.inside.reporting import Tell


class TellingResult(unittest.TestResult):
    """One line for each test, when it is over."""

    def __init__(self, tell: Tell) -> None:
        super().__init__()
        self._tell = tell
        self._why: list[str] = []
        self._passed = False

    def startTest(self, test: Any) -> None:  # noqa: N802 - unittest's own name, as below
        """Nothing has gone wrong yet, and nothing has been passed."""
        self._why, self._passed = [], False
        super().startTest(test)

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        """All of it went well; a part that did not has been told before."""
        self._passed = True

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        """A part of a test is over."""
        super().addSubTest(test, subtest, err)
        if err:
            self._why.append(_said(err))

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        """It broke."""
        super().addError(test, err)
        self._why.append(_said(err))
        if not isinstance(test, unittest.TestCase):
            self._tell(problem=f"{test}: {_said(err)}")

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        """It failed."""
        super().addFailure(test, err)
        self._why.append(_said(err))

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        """It was left out."""
        super().addSkip(test, reason)
        self._why.append(f"skipped: {reason}")

    def stopTest(self, test: Any) -> None:  # noqa: N802
        """It is over, with whatever tidies up after it."""
        super().stopTest(test)
        passed = self._passed and not self._why
        why = "" if passed else (" ".join(self._why[-2:]) or "it did not end well")
        self._tell(test=test.id(), outcome="passed" if passed else "failed", why=why[:300])


def _said(err: Any) -> str:
    return f"{err[0].__name__}: {err[1]}"


def _files(folder: str, path: str) -> Iterator[str]:
    """The test files, relative to the folder."""
    target = os.path.join(folder, path)
    if os.path.isfile(target):
        yield path
        return
    for place, folders, names in os.walk(target):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py")):
                yield os.path.relpath(os.path.join(place, name), folder)


def run(tests_dir: str, path: str, import_from: Sequence[str], tell: Tell) -> int:
    """Run the tests: 0 where all passed."""
    sys.path.insert(0, tests_dir)
    sys.path.extend(import_from)
    result, loader = TellingResult(tell), unittest.TestLoader()
    for name in _files(tests_dir, path):
        suite = loader.loadTestsFromName(name.removesuffix(".py").replace(os.sep, "."))
        for error in loader.errors:
            tell(problem=str(error).strip().splitlines()[-1][:300])
        loader.errors.clear()
        suite.run(result)
    return 0 if result.wasSuccessful() and result.testsRun else 1
