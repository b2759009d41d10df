"""Tests of a task that a framework or a command runs against the agent's code."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, model_validator

from rollcage.types.base import Value


class Check(Value):
    """Tests that a framework runs against the agent's code: a complete report of the expected ones decides."""

    kind: Literal["pytest", "unittest", "node", "go", "cargo", "junit", "log", "command"]
    """Who runs the tests. `junit`: a command that writes a JUnit XML report. `log`: a script whose output is read
    outside the box. `command`: one command is the test."""
    path: str = ""
    """What to run of the task's `tests`: a file or a folder, relative to `$TESTS_DIR`; empty: all. For `go` a package
    (`./calc`), for `cargo` a test target (`tests/calc.rs` is `calc`)."""
    expect: tuple[str, ...] = ()
    """The tests that count, by the names that the framework reports: `test_calc.py::test_add` (pytest),
    `test_calc.Add.test_add` (unittest), `calc.test.mjs > adds` (node), `example.com/calc::TestAdd` (go),
    `tests/calc.rs::adds` (cargo), `classname::name` (junit). Empty, for pytest and unittest: what stands in the files.
    """
    maintain: tuple[str, ...] = ()
    """For `log`: further tests that count, and may be skipped."""
    together: bool = False
    """Its tests earn 1 where all of them passed, and 0 else; each is still a part of the reward."""
    name: str = Field(default="", max_length=100)
    """Stands before the names of its tests in `reward.parts`; a `command` has no other name."""
    isolation: Literal["reported", "proxied"] = "reported"
    """`reported`: the framework runs as the judged, and its report counts. `proxied` (pytest, unittest, node): it runs
    in the judge, and the agent's modules are called in a process of their own."""
    import_from: tuple[str, ...] = (".",)
    """Folders of the workdir from which Python tests import the agent's modules."""
    interpreter: str = ""
    """The program that runs the tests, or its path in the box; empty: `python3`, `node`, `go` or `cargo`."""
    command: str = ""
    """For `junit`, `log` and `command`: bash, run in the workdir as the judged."""
    parser: str = ""
    """For `log`: who reads the output, by name (`pytest`, `pytest_v2`, `django`, ...)."""
    report: str = ""
    """For `junit`: where the command writes its report, relative to the workdir."""
    stdin: str = ""
    """For `command`: what it reads."""
    stdout: str | None = None
    """For `command`: what it must print, white space at the end aside; None: anything."""
    exit_code: int = 0
    """For `command`: how it must end."""
    timeout_s: float = Field(default=60, gt=0)
    """How long its tests may take together; what has not been reported then has failed."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Check:
        runs_command = self.kind in ("junit", "log", "command")
        if runs_command != bool(self.command.strip()):
            raise ValueError(f"kind {self.kind!r} {'needs' if runs_command else 'takes no'} `command`")
        if (self.kind == "junit") != bool(self.report):
            raise ValueError(f"kind {self.kind!r} {'needs' if self.kind == 'junit' else 'takes no'} `report`")
        if (self.kind == "log") != bool(self.parser) or (self.maintain and self.kind != "log"):
            raise ValueError("kind 'log' needs `parser`; no other takes it, or `maintain`")
        if self.isolation == "proxied" and self.kind not in ("pytest", "unittest", "node"):
            raise ValueError(f"kind {self.kind!r} cannot be proxied; pytest, unittest and node can")
        if self.kind in ("node", "go", "cargo", "junit", "log") and not (self.expect or self.maintain):
            raise ValueError(f"kind {self.kind!r} needs `expect`: the names of the tests that count")
        if self.kind == "command" and self.expect:
            raise ValueError("kind 'command' is one test: give it a `name`, not `expect`")
        for path in (self.path, self.report, *self.import_from):
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\0" in path:
                raise ValueError(f"{path!r} must be a relative path that leads nowhere else")
        return self
