"""Which tests a check expects: known before anything of the agent's is run, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollcage.errors import TaskError, UsageError
from rollcage.jobs import task_of
from rollcage.schema.request import RolloutRequest
from rollcage.tasks import load
from rollcage.tasks.expected import expected_of
from rollcage.types import Check, Task

TESTS = """
import unittest
import pytest

def test_plain(): ...

@pytest.mark.parametrize("n", [1, 2])
async def test_many(n): ...

def helper(): ...

class Base(unittest.TestCase):
    def test_base(self): ...

class More(Base):
    def test_more(self): ...

class TestBare:
    def test_bare(self): ...
    def helper(self): ...

class Other:
    def test_not_collected(self): ...
"""


def ids(kind: str, tests: dict[str, str], path: str = "") -> tuple[str, ...]:
    [expected] = expected_of(Task.model_validate(_task(tests, {"kind": kind, "path": path})))
    return expected.ids


def _task(tests: dict[str, str], *checks: dict[str, Any]) -> dict[str, Any]:
    return {"instruction": "x", "tests": tests, "checks": checks}


def test_tests_are_read_out_of_the_files() -> None:
    assert ids("pytest", {"a/test_a.py": TESTS, "a/helper.py": "def test_no(): ..."}) == (
        "a/test_a.py::test_plain",
        "a/test_a.py::test_many",
        "a/test_a.py::Base::test_base",
        "a/test_a.py::More::test_base",
        "a/test_a.py::More::test_more",
        "a/test_a.py::TestBare::test_bare",
    )
    assert ids("unittest", {"a/test_a.py": TESTS}) == (
        "a.test_a.Base.test_base",
        "a.test_a.More.test_base",
        "a.test_a.More.test_more",
    )


def test_only_what_the_path_names_is_read() -> None:
    one = "def test_one(): ..."
    tests = {"a/test_a.py": one, "b/test_b.py": one, "/home/user/tests/b/checks.py": one, "/home/user/x/test_x.py": one}
    assert ids("pytest", tests, "b") == ("b/test_b.py::test_one",)
    assert ids("pytest", tests, "b/checks.py") == ("b/checks.py::test_one",)
    assert ids("pytest", tests) == ("a/test_a.py::test_one", "b/test_b.py::test_one")


@pytest.mark.parametrize(
    ("tests", "checks", "says"),
    [
        ({}, [{"kind": "pytest"}], "no pytest tests stand in `tests`; list them in `expect`"),
        ({"test_a.py": "def f(:"}, [{"kind": "pytest"}], "test_a.py of `tests` is no Python"),
        ({"test_a.py": "#" * (1 << 20) + "\n"}, [{"kind": "pytest"}], "too long to look for tests"),
        (
            {"test_a.py": "def test_a(): ..."},
            [{"kind": "pytest"}, {"kind": "pytest", "isolation": "proxied"}],
            "the test 'test_a.py::test_a' is expected twice; give each check a name",
        ),
    ],
)
def test_what_cannot_be_known_is_refused_at_every_door(
    tests: dict[str, str], checks: list[dict[str, Any]], says: str, tmp_path: Path
) -> None:
    task = Task.model_validate(_task(tests, *checks))
    with pytest.raises(UsageError, match=says):
        expected_of(task)
    with pytest.raises(UsageError, match=says) as refused:
        task_of(RolloutRequest.model_validate(_task(tests, *checks)))
    assert refused.value.argument == "checks"
    file = tmp_path / "task.json"
    file.write_text(task.model_dump_json(include={"instruction", "tests", "checks"}))
    with pytest.raises(TaskError, match=says):
        load(file)


@pytest.mark.parametrize(
    ("check", "says"),
    [
        ({"kind": "node"}, "needs `expect`"),
        ({"kind": "command"}, "needs `command`"),
        ({"kind": "junit", "command": "true", "expect": ["a"]}, "needs `report`"),
        ({"kind": "pytest", "command": "true"}, "takes no `command`"),
        ({"kind": "go", "expect": ["a"], "isolation": "proxied"}, "cannot be proxied"),
        ({"kind": "command", "command": "true", "expect": ["a"]}, "is one test"),
        ({"kind": "pytest", "path": "../workdir"}, "leads nowhere else"),
        ({"kind": "pytest", "import_from": ["/home/user/tests"]}, "leads nowhere else"),
    ],
)
def test_a_check_that_makes_no_sense_is_refused(check: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Check.model_validate(check)


def test_a_task_file_has_tables_of_checks(tmp_path: Path) -> None:
    file = tmp_path / "task.toml"
    file.write_text('instruction = "x"\n[[check]]\nkind = "command"\ncommand = "true"\nname = "holds"\n')
    [check] = load(file).task.checks
    assert (check.kind, check.name) == ("command", "holds")
    file.write_text('instruction = "x"\n[[check]]\nkind = "command"\ncomand = "true"\n')
    with pytest.raises(TaskError, match=r"unknown key 'checks.0.comand'; did you mean 'command'\?"):
        load(file)


@pytest.mark.parametrize("program", [".venv/bin/python", "../workdir/.venv/bin/python"])
def test_a_proxied_check_runs_no_program_that_its_code_can_change_while_it_is_judged(program: str) -> None:
    asked = {"kind": "unittest", "isolation": "proxied", "interpreter": f"/home/user/workdir/{program}"}
    task = Task.model_validate({**_task({"test_a.py": TESTS}, asked), "restore": [".venv"]})
    with pytest.raises(UsageError, match="in the judge"):
        expected_of(task)
