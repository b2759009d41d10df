"""The audit, row by row: real boxes, real verifiers, and what each try earns there."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.cli.audit import AuditOptions, audited
from rollcage.runner import Runner
from rollcage.tasks import TaskFile
from rollcage.tasks.audit import NOTHING, AuditReport, Probe, Probed, findings_of
from rollcage.tasks.cheats import cheats_for, targets_of
from rollcage.types import Check, Outcome, ScriptedCall, ScriptedTurn, Task

ADD = "def add(a, b):\n    return a + b\n"
TEST = "import sys\nsys.path.append('/home/user/workdir')\nfrom calc import add\nassert add(2, 3) == 5\n"
UNITTEST = """
import sys, unittest
sys.path.append('/home/user/workdir')
from calc import add
class Add(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
unittest.main()
"""
OUTSIDE = """
import json, os
from untrusted import run
ended = run(["python3", "-c", "from calc import add; print(add(2, 3))"], text=True, timeout=5)
with open(os.environ["REWARD_FILE"], "w") as file:
    file.write(str(float(ended.stdout.strip() == "5")))
"""
BASE = Task(id="calc", instruction="Write calc.py with add.", solution_patch="")
WRITES = f"cat > calc.py <<'PYTHON'\n{ADD}PYTHON\n"


def calc(**fields: object) -> Task:
    return Task.model_validate(
        {
            "id": "calc",
            "instruction": "Write calc.py.",
            "solution_script": WRITES,
            "limits": {"verify_timeout_s": 8},
            **fields,
        }
    )


async def audit(runner: Runner, task: Task, *only: str, repeat: int = 1) -> AuditReport:
    options = AuditOptions(repeat=repeat, only=frozenset(only))
    return await audited(runner, TaskFile(path=Path("calc.toml"), task=task), options)


def paying(report: AuditReport) -> set[str]:
    return {finding.probe for finding in report.findings if finding.kind == "cheat_pays"}


def kinds(report: AuditReport) -> set[str]:
    return {finding.kind for finding in report.findings}


async def test_a_verifier_that_asks_from_outside_is_sound(runner: Runner) -> None:
    report = await audit(
        runner,
        calc(
            tests={"judge.py": OUTSIDE},
            verify=("python3 $TESTS_DIR/judge.py",),
            isolate=True,
            limits={"verify_timeout_s": 60},
        ),
    )
    assert report.findings == () and report.trust == "isolated"
    assert {each.reward for each in report.probes if each.probe.kind != "reference"} == {0.0}
    assert len(report.probes) > 15


@pytest.mark.parametrize(
    ("test", "fits"),
    [("assert add(2, 3) == 5", True), ("import calc, inspect; assert 'a + b' in inspect.getsource(calc.add)", False)],
)
async def test_an_audit_tries_whether_proxied_checks_fit(test: str, fits: bool, runner: Runner) -> None:
    body = f"import unittest\nfrom calc import add\nclass T(unittest.TestCase):\n    def test_it(self): {test}\n"
    check = Check(kind="unittest", path="test_calc.py")
    report = await audit(runner, calc(tests={"test_calc.py": body}, checks=(check,)), "none")
    assert report.proxied_fits is fits
    assert "reference_fails" not in kinds(report), "it is advice"
    proxied = check.model_copy(update={"isolation": "proxied"})
    plain = await audit(runner, calc(tests={"test_calc.py": body}, checks=(proxied,)), "none")
    assert plain.proxied_fits is None, "there is nothing to try"


async def test_code_in_the_process_of_its_test_pays_in_many_ways(runner: Runner) -> None:
    report = await audit(runner, calc(tests={"t.py": UNITTEST}, verify=("python3 $TESTS_DIR/t.py",), guards=False))
    assert {"early_exit", "fake_output", "patched_framework", "always_equal"} <= paying(report)
    assert {"planted_reward", "shadowed_modules", "build_files", "planted_programs"}.isdisjoint(paying(report))
    assert report.trust == "shared" and "shared_trust" in kinds(report)
    assert all(finding.remedy and finding.rollout_id for finding in report.problems)


async def test_work_that_keeps_a_verifier_from_its_verdict_is_found(runner: Runner) -> None:
    script = "python3 $TESTS_DIR/t.py && echo 1 > $REWARD_FILE"
    report = await audit(runner, calc(tests={"t.py": TEST}, test_script=script), "empty", "garbage", "hang", "removed")
    silent = {finding.probe for finding in report.findings if finding.kind == "no_reward"}
    assert silent == {"nothing", "empty", "garbage", "hang", "removed"}


EXIT = "printf '#!/bin/bash\\ntest -n \"$1\"\\n' > given && chmod 755 given"
FILES = {
    "Makefile": "test:\n\tpython3 calc_test.py\n",
    "calc_test.py": TEST,
    "tests/one.sh": "python3 ../calc_test.py\n",
}
UNLESS = "[ -s $REWARD_FILE ] || echo 0 > $REWARD_FILE"
EVALUATES = f"[[ $(untrusted python3 calc.py) -eq 42 ]] && echo 1 > $REWARD_FILE; {UNLESS}"
COMPARES = f'[ "$(untrusted python3 calc.py)" = 42 ] && echo 1 > $REWARD_FILE; {UNLESS}'
NEAR = "untrusted python3 calc.py | python3 -c 'import sys; said = float(input()); sys.exit({})'"
LOOP = "cd tests && for file in *.sh; do bash $file || exit 1; done"


@pytest.mark.parametrize(
    ("cheat", "fields"),
    [
        ("always_true", {"verify": ["./given something"], "solution_script": EXIT}),
        ("early_exit", {"verify": ["./given something"], "solution_script": EXIT}),
        ("build_files", {"verify": ["make -s test"], "files": FILES}),
        ("changed_visible_tests", {"verify": [LOOP], "files": FILES, "restore": []}),
        ("reward_daemon", {"test_script": f"python3 calc.py; sleep 0.3; {UNLESS}", "guards": False}),
        ("forged_reward", {"test_script": f"python3 calc.py; {UNLESS}", "guards": False}),
        ("fake_output", {"verify": ["python3 calc.py | grep -q '1 passed'"]}),
        ("evaluated_output", {"verify": [EVALUATES], "isolate": True}),
        ("spliced_output", {"verify": ["[ $(untrusted python3 calc.py) = 42 ]"], "isolate": True}),
        ("not_a_number", {"verify": [NEAR.format("abs(said - 42) > 0.1")], "isolate": True}),
        ("every_answer", {"verify": ["untrusted python3 calc.py | grep -x 42"], "isolate": True}),
    ],
)
async def test_a_weak_verifier_pays_the_cheat_that_fits_it(
    cheat: str, fields: dict[str, object], runner: Runner
) -> None:
    report = await audit(runner, calc(**fields), cheat)
    assert paying(report) == {cheat}


@pytest.mark.parametrize(
    ("cheat", "fields"),
    [
        ("changed_visible_tests", {"verify": [LOOP], "files": FILES, "restore": ["tests", "calc_test.py"]}),
        ("build_files", {"verify": ["make -s test"], "files": FILES, "restore": ["Makefile"]}),
        ("reward_daemon", {"test_script": f"untrusted python3 calc.py; {UNLESS}"}),
        ("forged_reward", {"test_script": f"untrusted python3 calc.py; {UNLESS}"}),
        ("reward_daemon", {"test_script": f"python3 calc.py; sleep 0.3; {UNLESS}"}),
        ("forged_reward", {"test_script": f"python3 calc.py; {UNLESS}"}),
        ("evaluated_output", {"verify": [COMPARES], "isolate": True}),
        ("spliced_output", {"verify": ['[ "$(untrusted python3 calc.py)" = 42 ]'], "isolate": True}),
        ("not_a_number", {"verify": [NEAR.format("not abs(said - 42) < 0.1")], "isolate": True}),
        ("every_answer", {"verify": [COMPARES], "isolate": True}),
    ],
)
async def test_the_remedy_takes_the_pay_away(cheat: str, fields: dict[str, object], runner: Runner) -> None:
    assert paying(await audit(runner, calc(**fields), cheat)) == set()


async def test_doing_nothing_that_pays_is_found_and_a_floor_allows_it(runner: Runner) -> None:
    report = await audit(runner, calc(verify=("true", "test -f calc.py")), "empty")
    assert "pays_for_nothing" in kinds(report)
    low = findings_of(report.probes, floor=0.5)
    assert "pays_for_nothing" not in {finding.kind for finding in low}


async def test_a_reference_that_does_not_earn_1_or_not_always_is_found(runner: Runner) -> None:
    failing = await audit(runner, calc(verify=("test -f calc.py", "false")), "empty")
    assert "reference_fails" in kinds(failing)
    broken = await audit(runner, calc(solution_script="echo no such tool >&2; exit 3"), "empty")
    assert any(each.kind == "reference_fails" and "no such tool" in each.what for each in broken.findings)
    random = 'echo 0; test ! -f calc.py || echo 0.$(od -An -N4 -tu4 /dev/urandom | tr -d " ")'
    flaky = await audit(runner, calc(verify=(f'({random}) | tail -n 1 > "$REWARD_FILE"',)), "empty", repeat=3)
    assert "flaky" in kinds(flaky)


async def test_solutions_are_patches_and_scripted_turns_too(runner: Runner) -> None:
    patch = "--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n-    return a - b\n+    return a + b\n"
    assert targets_of(patch) == ["calc.py"]
    turn = ScriptedTurn(
        tool_calls=(
            ScriptedCall(name="read", arguments={"filePath": "calc.py"}),
            ScriptedCall(name="edit", arguments={"filePath": "calc.py", "oldString": "a - b", "newString": "a + b"}),
            ScriptedCall(name="bash", arguments={"command": "test -f calc.py"}),
        )
    )
    fields = {
        "files": {"calc.py": ADD.replace("+", "-")},
        "tests": {"t.py": TEST},
        "verify": ["python3 $TESTS_DIR/t.py"],
    }
    for solution in ({"solution_patch": patch}, {"solution": (turn,)}):
        report = await audit(runner, calc(solution_script="", **fields, **solution), "empty")
        assert [each.reward for each in report.probes[:2]] == [0, 1], solution


def probed(name: str, kind: str, reward: float | None) -> Probed:
    probe = (
        NOTHING if kind == "nothing" else Probe.model_validate({"name": name, "kind": kind, "what": "w", "remedy": "r"})
    )
    outcome = Outcome.FINISHED if reward is not None else Outcome.VERIFY_FAILED
    return Probed(probe=probe, reward=reward, trust="isolated", outcome=outcome, rollout_id="r1")


def test_a_cheat_pays_what_is_more_than_nothing_earns() -> None:
    tries = [probed("nothing", "nothing", 0.25), probed("a", "cheat", 0.25), probed("b", "cheat", 0.5)]
    found = {(finding.kind, finding.probe) for finding in findings_of(tries)}
    assert found == {("pays_for_nothing", "nothing"), ("cheat_pays", "b"), ("no_reference", "")}
    assert [finding.level for finding in findings_of(tries)].count("advice") == 1


def test_cheats_are_fitted_to_what_honest_work_makes() -> None:
    python = {cheat.name for cheat in cheats_for(BASE, ["calc.py"])}
    other = {cheat.name for cheat in cheats_for(BASE, ["calc.rs"])}
    assert "patched_framework" in python and "early_exit" not in other and "build_files" in other
    task = BASE.model_copy(update={"verify": ("git diff --quiet",), "checks": (Check(kind="pytest"),)})
    assert "git_tricks" in {cheat.name for cheat in cheats_for(task, [])}


GIT = "git init -q . && echo a > a.txt && echo p > kept.txt && git add ."
GIT += " && git -c user.name=a -c user.email=a@b commit -qm x"


@pytest.mark.parametrize(
    ("verify", "restore", "pays"),
    [
        ('test "$(git status --porcelain)" = " M a.txt"', None, {"committed_change"}),
        ('test "$(git status --porcelain)" = " M a.txt"', (".git",), set()),
        ("git diff a.txt | grep -qx +b", None, set()),
    ],
    ids=["what else changed is asked of git", "git's folder is put back", "nobody minds other changes"],
)
async def test_a_change_that_is_committed_is_a_cheat_where_it_is_refused_uncommitted(
    verify: str, restore: tuple[str, ...] | None, pays: set[str], runner: Runner
) -> None:
    more = {} if restore is None else {"restore": restore}
    task = Task(id="git", instruction="x", setup=(GIT,), verify=(verify,), solution_script="echo b > a.txt", **more)
    report = await audit(runner, task, "uncommitted_change", "committed_change")
    assert {each.probe.name: each.reward for each in report.probes}["reference"] == 1
    assert paying(report) == pays
