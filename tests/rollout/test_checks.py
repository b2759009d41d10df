"""Checks: a framework runs the agent's code, and a complete report of the expected tests is the reward."""

from __future__ import annotations

import pytest

from rollcage.results.fold import Rollout
from rollcage.types import Check, Limits, Outcome, Task
from support.packages import need_compiler
from support.playing import Play
from support.pytest_in_box import PYTHON, SETUP, pytest_files

CALC = "def add(a, b):\n    return a - b\n"
SOLVE = "echo 'def add(a, b): return a + b' > calc.py"
UNITTEST = """
import unittest
import calc

class Add(unittest.TestCase):
    def test_small(self):
        self.assertEqual(calc.add(2, 3), 5)

    def test_zero(self):
        self.assertEqual(calc.add(0, 0), 0)
"""
PYTEST = """
import calc
import pytest

def test_small():
    assert calc.add(2, 3) == 5

@pytest.mark.parametrize("n", [1, 2])
def test_zero(n):
    assert calc.add(n, 0) == n
"""
NODE = """
import test from "node:test";
import assert from "node:assert/strict";
import { add } from "../workdir/calc.mjs";

test("small", () => assert.equal(add(2, 3), 5));
test("zero", () => assert.equal(add(0, 0), 0));
"""
LIMITS = Limits(agent_timeout_s=120, verify_timeout_s=120)


def task_with(*checks: Check, **more: object) -> Task:
    tests = {"test_unit.py": UNITTEST, "test_py.py": PYTEST, "calc.test.mjs": NODE}
    files = {"calc.py": CALC, "calc.mjs": "export const add = (a, b) => a - b;"}
    return Task.model_validate(
        {"instruction": "-", "tests": tests, "files": files, "checks": checks, "limits": LIMITS, **more}
    )


async def scored(play: Play, task: Task, script: str) -> tuple[float | None, dict[str, float], str]:
    rollout = await play(task.model_copy(update={"instruction": script}), agent="shell")
    assert rollout.score is not None, rollout.error
    return rollout.score.total, rollout.score.parts, rollout.score.trust


UNIT = Check(kind="unittest", path="test_unit.py")
PROXIED = UNIT.model_copy(update={"isolation": "proxied"})


@pytest.mark.parametrize(("check", "trust"), [(UNIT, "in_process"), (PROXIED, "isolated")], ids=["reported", "proxied"])
async def test_the_reward_is_the_share_of_expected_tests_that_passed(play: Play, check: Check, trust: str) -> None:
    parts = {"test_unit.Add.test_small": 0.0, "test_unit.Add.test_zero": 1.0}
    assert await scored(play, task_with(check), "true") == (0.5, parts, trust)
    assert await scored(play, task_with(check), SOLVE) == (1.0, dict.fromkeys(parts, 1.0), trust)


@pytest.mark.parametrize("check", [UNIT, PROXIED], ids=["reported", "proxied"])
async def test_a_fresh_box_and_a_judge_that_does_not_see_the_work_do_as_well(play: Play, check: Check) -> None:
    for more in ({"verify_in": "fresh"}, {"isolate": True}):
        assert (await scored(play, task_with(check, **more), SOLVE))[0] == 1


@pytest.mark.parametrize("isolation", ["reported", "proxied"])
async def test_pytest_counts_a_test_with_parameters_once(play: Play, isolation: str) -> None:
    check = Check.model_validate(
        {"kind": "pytest", "path": "test_py.py", "interpreter": PYTHON, "isolation": isolation}
    )
    task = task_with(check, setup=(SETUP,))
    task = task.model_copy(update={"files": {**task.files, **pytest_files()}})
    total, parts, _ = await scored(play, task, SOLVE)
    assert (total, parts) == (1.0, {"test_py.py::test_small": 1.0, "test_py.py::test_zero": 1.0})
    total, parts, _ = await scored(play, task, "echo 'def add(a, b): return 5 if b == 3 else a - (a > 1)' > calc.py")
    assert (total, parts) == (0.5, {"test_py.py::test_small": 1.0, "test_py.py::test_zero": 0.0})


async def test_commands_are_compared_outside(play: Play) -> None:
    checks = (
        Check(kind="command", name="adds", command="python3 -I -c 'print(2 + int(input()))'", stdin="3", stdout="5"),
        Check(kind="command", name="fails", command="exit 3", exit_code=3),
        Check(kind="command", name="sees no tests", command="ls ~/tests ~/logs/verifier", exit_code=2),
        Check(kind="command", name="hangs", command="sleep 1000", timeout_s=1),
        Check(kind="command", name="says more", command="echo 5; echo 6", stdout="5"),
    )
    total, parts, trust = await scored(play, task_with(*checks), "true")
    assert parts == {"adds": 1, "fails": 1, "sees no tests": 1, "hangs": 0, "says more": 0}
    assert (total, trust) == (0.6, "isolated")


async def test_commands_beside_checks_count_as_one_test_each_and_lower_the_trust(play: Play) -> None:
    task = task_with(UNIT, verify=("test -e calc.py", "false"))
    total, parts, trust = await scored(play, task, SOLVE)
    assert (total, parts["verify"], trust) == (0.75, 0.5, "shared")
    written = task_with(UNIT, verify=('echo 0.25 > "$REWARD_FILE"',))
    total, parts, _ = await scored(play, written, SOLVE)
    assert (total, parts["test_unit.Add.test_small"]) == (0.25, 1.0)


async def test_a_box_without_the_framework_judges_nothing_and_says_what_to_do(play: Play) -> None:
    rollout = await play(task_with(Check(kind="pytest", path="test_py.py")), agent="shell")
    _lacks(rollout, "pytest")
    rollout = await play(task_with(Check(kind="go", expect=("x::TestA",), interpreter="go-missing")), agent="shell")
    _lacks(rollout, "go-missing")
    rollout = await play(task_with(UNIT.model_copy(update={"interpreter": "python-missing"})), agent="shell")
    _lacks(rollout, "python-missing")


def _lacks(rollout: Rollout, what: str) -> None:
    assert rollout.outcome is Outcome.VERIFY_FAILED and rollout.reward is None
    assert rollout.error and f"the box has no {what}" in rollout.error and "use an image that has it" in rollout.error


async def test_an_interpreter_that_the_agent_broke_earns_nothing(play: Play) -> None:
    check = UNIT.model_copy(update={"interpreter": "/home/user/workdir/bin/python"})
    setup = ("mkdir bin && ln -s /usr/bin/python3 bin/python",)
    assert (await scored(play, task_with(check, setup=setup), "rm bin/python"))[0] == 0


@pytest.mark.parametrize("isolation", ["reported", "proxied"])
async def test_node_tests_count_by_their_names(play: Play, isolation: str) -> None:
    names = ("calc.test.mjs > small", "calc.test.mjs > zero")
    check = Check.model_validate({"kind": "node", "path": "calc.test.mjs", "expect": names, "isolation": isolation})
    assert (await scored(play, task_with(check), "true"))[1] == {names[0]: 0, names[1]: 1}
    total, parts, _ = await scored(play, task_with(check), "echo 'export const add = (a, b) => a + b;' > calc.mjs")
    assert (total, parts) == (1.0, dict.fromkeys(names, 1.0))


GO = r"""#!/bin/bash
test "$*" = "test -json -count=1 ./calc" && test -f calc/calc_test.go || exit 9
grep -q right calc/calc.go && said=pass || said=fail
for test in '"Test": "TestAdd", ' ''; do echo "{\"Action\": \"$said\", $test\"Package\": \"m/calc\"}"; done
test $said = pass
"""


async def test_go_runs_in_a_copy_of_the_workdir_with_the_tests_in_it(play: Play) -> None:
    check = Check(kind="go", path="calc", expect=("m/calc::TestAdd",), interpreter="/home/user/go")
    task = Task(
        instruction="-",
        files={"/home/user/go": GO, "calc/calc.go": "wrong"},
        setup=("chmod +x ~/go",),
        tests={"calc/calc_test.go": "hidden"},
        checks=(check, Check(kind="command", name="unseen", command="test ! -e calc/calc_test.go")),
        limits=LIMITS,
    )
    assert (await scored(play, task, "true"))[1] == {"m/calc::TestAdd": 0, "unseen": 1}
    planted = "echo right > calc/calc.go; ln -s ~/elsewhere calc/calc_test.go"
    assert (await scored(play, task, planted))[1] == {"m/calc::TestAdd": 1, "unseen": 1}


GO_CODE = "package calc\nfunc Add(a, b int) int { return 0 }\n"
GO_TEST = """package calc
import "testing"
func TestAdd(t *testing.T) { if Add(2, 3) != 5 { t.Fatal("wrong") } }
func TestZero(t *testing.T) { if Add(0, 0) != 0 { t.Fatal("wrong") } }
"""
CARGO_TEST = """
#[test]
fn small() { assert_eq!(calc::add(2, 3), 5); }
#[test]
fn zero() { assert_eq!(calc::add(0, 0), 0); }
"""


@pytest.mark.slow
async def test_a_real_go_reports_its_tests(play: Play) -> None:
    need_compiler("go", "golang-go")
    names = ("example.com/m/calc::TestAdd", "example.com/m/calc::TestZero")
    task = Task(
        instruction="-",
        files={
            "go.mod": "module example.com/m\n",
            "calc/calc.go": "package calc\nfunc Add(a, b int) int { return 0 }\n",
        },
        tests={"calc/calc_test.go": GO_TEST},
        checks=(Check(kind="go", path="calc", expect=names),),
        limits=LIMITS,
    )
    assert (await scored(play, task, "true"))[1] == {names[0]: 0, names[1]: 1}
    assert (await scored(play, task, "sed -i 's/return 0/return a + b/' calc/calc.go"))[0] == 1
    ends = """sed -i 's/return 0/return 5/; 1a import "os"' calc/*; echo 'func init() { os.Exit(0) }' >> calc/calc.go"""
    assert (await scored(play, task, ends))[0] == 0


@pytest.mark.slow
async def test_a_real_cargo_reports_its_tests(play: Play) -> None:
    need_compiler("cargo", "cargo")
    names = ("tests/calc.rs::small", "tests/calc.rs::zero")
    task = Task(
        instruction="-",
        files={
            "Cargo.toml": '[package]\nname = "calc"\nversion = "0.1.0"\nedition = "2021"\n',
            "src/lib.rs": "pub fn add(_a: i32, _b: i32) -> i32 { 0 }\n",
        },
        tests={"tests/calc.rs": CARGO_TEST},
        checks=(Check(kind="cargo", path="calc", expect=names),),
        limits=LIMITS,
    )
    assert (await scored(play, task, "true"))[1] == {names[0]: 0, names[1]: 1}
    assert (await scored(play, task, "echo 'pub fn add(a: i32, b: i32) -> i32 { a + b }' > src/lib.rs"))[0] == 1
    ends = "echo 'pub fn add(_: i32, _: i32) -> i32 { std::process::exit(0) }' > src/lib.rs"
    assert (await scored(play, task, ends))[0] == 0


async def test_a_junit_report_is_the_one_that_the_command_wrote(play: Play) -> None:
    report = '<testsuite><testcase classname="c" name="t"/></testsuite>'
    check = Check(kind="junit", report="out/report.xml", expect=("c::t",), command="bash $TESTS_DIR/suite.sh")
    suite = f"grep -q done work && echo '{report}' > out/report.xml"
    task = Task(instruction="-", files={"out/x": ""}, tests={"suite.sh": suite}, checks=(check,), limits=LIMITS)
    assert (await scored(play, task, "echo done > work"))[0] == 1
    assert (await scored(play, task, f"echo '{report}' > out/report.xml"))[0] == 0


PROXY_ONLY = """
import calc

def test_program():
    import subprocess
    subprocess.run(["python3", "/home/user/workdir/calc.py"])

def test_text():
    exec(compile(open("/home/user/workdir/calc.py").read(), "/home/user/workdir/calc.py", "exec"))

def test_launched():
    from untrusted import run
    assert run(["python3", "-c", "print(7)"], cwd="/home/user/workdir").stdout == b"7\\n"
"""


async def test_a_proxied_test_does_not_run_the_work_in_the_judge(play: Play) -> None:
    check = Check(kind="pytest", path="test_only.py", isolation="proxied", interpreter=PYTHON)
    task = task_with(check, setup=(SETUP,), tests={"test_only.py": PROXY_ONLY})
    task = task.model_copy(update={"files": {**task.files, **pytest_files()}})
    _, parts, trust = await scored(play, task, SOLVE)
    names = ("program", "text", "launched")
    assert [parts[f"test_only.py::test_{name}"] for name in names] == [0, 0, 1] and trust == "isolated"


CARRIED = """
import asyncio
from decimal import Decimal
import pytest
import calc
from calc import Point, twice

def test_crash():
    with pytest.raises(Exception):
        calc.die()

def test_object():
    point = Point(1, y=2)
    point.x += 3
    assert (point.x, point.y, repr(point)) == (4, 2, "Point(x=4, y=2)")
    assert point == Point(4, 2) and point != Point(0, 0) and isinstance(point, Point)

def test_errors():
    with pytest.raises(calc.Wrong, match="no") as caught:
        calc.fail()
    assert caught.value.code == 7 and issubclass(calc.Wrong, ValueError)
    with pytest.raises(UnicodeDecodeError):
        calc.decode(b"\\xff")

def test_iterates():
    assert list(calc.count(3)) == [0, 1, 2] and calc.Many([1, 2]) == [1, 2] and 2 in calc.Many([1, 2])

def test_callback():
    assert calc.apply(lambda n: n + 1, 3) == 4

def test_patched(monkeypatch):
    monkeypatch.setattr(calc, "ten", lambda: 11)
    assert twice() == 22

def test_printed(capsys):
    calc.hello()
    assert capsys.readouterr().out == "hello\\n"

def test_block():
    with calc.Block() as block:
        assert block.open
    assert not block.open

def test_values():
    assert calc.same({1: ("a", {2.5}, b"x", None)}) == {1: ("a", {2.5}, b"x", None)}
    assert calc.same(Decimal("1.10")) == Decimal("1.1")

def test_coroutine():
    assert asyncio.run(calc.later()) == 5
"""
CARRIER = """
import os
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: int
class Wrong(ValueError):
    code = 7
class Many(list): pass
class Block:
    open = False
    def __enter__(self):
        self.open = True
        return self
    def __exit__(self, *error):
        self.open = False
def die(): os._exit(0)
def fail(): raise Wrong("no")
def decode(data): return data.decode()
def count(n): yield from range(n)
def apply(function, n): return function(n)
def ten(): return 10
def twice(): return 2 * ten()
def hello(): print("hello")
def same(value): return value
async def later(): return 5
"""


async def test_a_proxied_check_carries_much_and_outlives_a_crash(play: Play) -> None:
    check = Check(kind="pytest", path="test_carried.py", isolation="proxied", interpreter=PYTHON)
    files = {"calc.py": CARRIER, **pytest_files()}
    task = task_with(check, setup=(SETUP,), tests={"test_carried.py": CARRIED}, files=files)
    _, parts, _ = await scored(play, task, "true")
    assert {test for test, passed in parts.items() if not passed} == {"test_carried.py::test_crash"}
    assert len(parts) == 10


async def test_no_other_check_comes_after_the_tests_are_handed_over(play: Play) -> None:
    reads = Check(kind="command", name="reads", command="cat ~/tests/test_unit.py kept")
    task = task_with(UNIT, reads)
    script = 'echo \'import shutil; shutil.copy("/home/user/tests/test_unit.py", "/home/user/workdir/kept")\' > calc.py'
    _, parts, _ = await scored(play, task, script)
    assert parts["reads"] == 0
