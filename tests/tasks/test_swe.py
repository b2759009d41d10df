"""SWE records: what they come to, what is refused, and how they run, on a real repository."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.results.fold import Rollout
from rollcage.runner import Runner
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.tasks import open_source
from rollcage.tasks.logs import END, EXIT_CODE, PARSERS, START, NotGraded, outcomes_of, parser_named, statuses_of
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome
from rollcage.wiring import opened_runner

RUN = "python3 -m unittest -v"
ADD, SUB = "test_add (test_calc.Calc.test_add)", "test_sub (test_calc.Calc.test_sub)"
TESTS = """import unittest
import calc

class Calc(unittest.TestCase):
    def test_sub(self):
        self.assertEqual(calc.sub(3, 2), 1)
"""
NEW = """
    def test_add(self):
        self.assertEqual(calc.add(2, 3), 5)
"""


class Repository:
    """A git repository with a bug at its base, a fix after it, and tests for both."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit("before", "add = None\nsub = int.__sub__\n", TESTS)
        self.git("tag", "v1")
        self.base = self.commit("base", "def add(a, b):\n    return a - b\n\n\nsub = int.__sub__\n", TESTS)
        self.fix = self.commit("fix", "def add(a, b):\n    return a + b\n\n\nsub = int.__sub__\n", TESTS + NEW)
        self.git("tag", "v2")
        self.patch = self.git("diff", self.base, self.fix, "--", "calc.py")
        self.test_patch = self.git("diff", self.base, self.fix, "--", "test_calc.py")

    def git(self, *words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        return subprocess.run(
            ["git", "-C", self.folder, *who, *words], check=True, capture_output=True, text=True
        ).stdout

    def commit(self, message: str, code: str, tests: str) -> str:
        (self.folder / "calc.py").write_text(code)
        (self.folder / "test_calc.py").write_text(tests)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)
        return self.git("rev-parse", "HEAD").strip()

    def record(self, **more: object) -> dict[str, object]:
        script = (
            "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n"
            f"git checkout {self.base} test_calc.py\ngit apply -v - <<'EOF_1'\n{self.test_patch}EOF_1\n"
            f": '{START}'\n{RUN} test_calc\n: '{END}'\ngit checkout {self.base} test_calc.py\n"
        )
        return {
            "instance_id": "calc-1",
            "repo": "a/calc",
            "repo_dir": self.folder.name,
            "base_commit": self.base,
            "problem_statement": "add() subtracts.",
            "patch": self.patch,
            "test_patch": self.test_patch,
            "eval_script": script,
            "log_parser": "parse_log_django",
            "eval_type": "pass_and_fail",
            "FAIL_TO_PASS": json.dumps([ADD]),
            "PASS_TO_PASS": [SUB],
            **more,
        }


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "calc")


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Runner]:
    tmp_path.chmod(0o755)
    settings = Settings.from_environ({"ROLLCAGE_HOME": str(tmp_path / "home"), "ROLLCAGE_SYSTEM": "host"})
    async with Store.open(settings.log_path) as store, opened_runner(settings, store, at_once=2) as runner:
        yield runner


async def played(runner: Runner, folder: Path, record: dict[str, object], agent: str, **changes: object) -> Rollout:
    path = folder / "records.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (task,) = open_source(path)
    assert task.file, task.problem
    changed = task.file.task.model_copy(update=changes)
    job = Job(task=changed, model=NO_MODEL, agent=AgentSpec(name=agent), sandbox=task.file.sandbox)
    return await runner.wait(await runner.start(job))


@pytest.mark.anyio
async def test_the_patch_of_a_record_resolves_it_and_nothing_does_not(
    runner: Runner, repository: Repository, tmp_path: Path
) -> None:
    record = repository.record()
    nothing = await played(runner, tmp_path, record, "nop")
    assert (nothing.error, nothing.reward, nothing.reward_parts) == (None, 0, {ADD: 0, SUB: 1})
    solved = await played(runner, tmp_path, record, "oracle")
    assert (solved.error, solved.reward, solved.reward_parts) == (None, 1, {ADD: 1, SUB: 1})
    assert solved.trust == "in_process"


@pytest.mark.anyio
async def test_what_came_after_the_base_cannot_be_reached(
    runner: Runner, repository: Repository, tmp_path: Path
) -> None:
    repository.git("update-ref", "refs/stash", repository.fix)
    repository.git("update-ref", "refs/remotes/origin/main", repository.fix)
    repository.git("remote", "add", "origin", "https://localhost/calc")
    repository.git("symbolic-ref", "refs/remotes/origin/HEAD", "refs/remotes/origin/main")
    look = (
        f"git cat-file -e {repository.fix} 2>/dev/null && exit 3\n"
        f"git cat-file -e {repository.base} || exit 4\n"
        '[ "$(git tag)" = v1 ] && [ -z "$(git remote)" ] && [ -z "$(git status --porcelain)" ] || exit 5\n'
        f'[ "$(git log --all --format=%s)" = "base\nbefore" ] && [ "$(git branch --show-current)" = main ] || exit 6\n'
        "grep -q add test_calc.py && exit 7\n"
        "grep -q -- '- b' calc.py || exit 8\n"
    )
    # The agent looks: its script fails where there is something to find.
    rollout = await played(runner, tmp_path, repository.record(), "oracle", solution_patch="", solution_script=look)
    assert (rollout.outcome, rollout.error, rollout.reward) == (Outcome.FINISHED, None, 0)


@pytest.mark.anyio
async def test_lines_that_code_under_test_prints_earn_nothing(
    runner: Runner, repository: Repository, tmp_path: Path
) -> None:
    lines = f"{ADD} ... ok\\n{SUB} ... ok\\n"
    for extra in ("", f">>>>> End Test Output\\n{EXIT_CODE}: 0\\n"):
        forged = f"import os\nos.write(1, b'''{lines}{extra}''')\nos._exit(1)\n"
        script = f"cat > calc.py <<'EOF'\n{forged}EOF\n"
        rollout = await played(
            runner, tmp_path, repository.record(), "oracle", solution_patch="", solution_script=script
        )
        assert (rollout.error, rollout.reward, set(rollout.reward_parts.values())) == (None, 0, {0})


@pytest.mark.anyio
async def test_older_fields_make_the_same_task(runner: Runner, repository: Repository, tmp_path: Path) -> None:
    record = repository.record(log_parser=None, eval_script=None, repo="django/django")
    record["install_config"] = {"test_cmd": RUN, "python": "3.11"}
    solved = await played(runner, tmp_path, record, "oracle")
    assert (solved.error, solved.reward) == (None, 1)
    assert (await played(runner, tmp_path, record, "nop")).reward == 0


def test_records_without_a_test_command_are_run_by_pytest_where_their_tests_are_named_so(
    repository: Repository, tmp_path: Path
) -> None:
    gym = repository.record(eval_script=None, log_parser=None, FAIL_TO_PASS=["test_calc.py::Calc::test_add"])
    gym["PASS_TO_PASS"] = json.dumps(["test_calc.py::Calc::test_sub"])
    smith = gym | {"test_patch": None, "base_commit": None, "image_name": "a/calc.1", "repo_dir": None}
    smith["PASS_TO_PASS"] = ["tests/a b/test_x.py::test_y[1]"]
    fine = smith | {"PASS_TO_PASS": ["tests/a-b/test_x.py::test_y[1]"]}
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(map(json.dumps, (gym, fine, smith))))
    of_gym, of_smith, odd = open_source(path)
    assert of_gym.file and "\npytest -rA test_calc.py\n" in of_gym.file.task.checks[0].command
    assert of_smith.file and "\npytest -rA test_calc.py tests/a-b/test_x.py\n" in of_smith.file.task.checks[0].command
    assert of_smith.file.task.checks[0].parser == "pytest_v2"
    assert "eval_script: is missing" in odd.problem


@pytest.mark.anyio
async def test_a_patch_that_is_the_bug_is_put_in_and_its_undoing_solves_it(
    runner: Runner, repository: Repository, tmp_path: Path
) -> None:
    record = repository.record(test_cmd=f"{RUN} test_calc", eval_script=None, base_commit=None, test_patch=None)
    record["patch"] = repository.git("diff", repository.fix, repository.base, "--", "calc.py")
    nothing = await played(runner, tmp_path, record, "nop")
    assert (nothing.error, nothing.reward) == (None, 0)
    look = f"git cat-file -e {repository.fix} 2>/dev/null && exit 3\n[ $(git rev-list --all --count) = 1 ] || exit 4"
    looked = await played(runner, tmp_path, record, "oracle", solution_script=look)
    assert (looked.error, looked.reward) == (None, 0)
    assert (await played(runner, tmp_path, record, "oracle")).reward == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"log_parser": "parse_log_gtest"}, r"no log parser 'parse_log_gtest'.*pytest_v2"),
        ({"eval_type": "fail_only"}, r"eval_type: 'fail_only'"),
        ({"eval_script": "pytest"}, r"eval_script: does not say"),
        ({"eval_script": None}, r"eval_script: is missing"),
        ({"FAIL_TO_PASS": "[]"}, r"FAIL_TO_PASS: is empty"),
        ({"FAIL_TO_PASS": "[nonsense"}, r"FAIL_TO_PASS"),
        ({"base_commit": "--output=x"}, r"base_commit"),
        ({"repo_dir": None}, r"image: is missing"),
        ({"repo_dir": "../elsewhere"}, r"repo_dir"),
        ({"workdir": "/proc/x"}, r"workdir"),
        ({"problem_statement": " "}, r"problem_statement"),
    ],
)
def test_records_that_make_no_task_are_refused_by_their_line(
    repository: Repository, tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(repository.record(**changes)) + "\n" + json.dumps(repository.record()) + "\n")
    wrong, right = open_source(path)
    assert not right.problem
    assert f"{path}:1: " in wrong.problem
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(wrong.problem)


def test_an_image_that_is_not_here_is_said(repository: Repository, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    r2e = {
        "docker_image": "namanjain12/calc_final:1",
        "problem_statement": "Mend it.",
        "expected_output_json": json.dumps({"Calc.test_add": "PASSED", "Calc.test_old": "FAILED"}),
    }
    path.write_text(json.dumps(repository.record(repo_dir=None, image="swebench/x:1")) + "\n" + json.dumps(r2e) + "\n")
    first, second = open_source(path)
    assert "no image 'swebench-x-1'" in first.why_not(lambda name: False) and first.verifier == "checks"
    assert second.file and second.file.sandbox.template == "namanjain12-calc_final-1"
    (check,) = second.file.task.checks
    assert (check.expect, check.parser) == (("Calc.test_add",), "r2e")


def logged(text: str, code: int = 0) -> str:
    return f"+ : '{START}'\n{text}\n+ : '{END}'\n+ echo '{EXIT_CODE}: {code}'\n{EXIT_CODE}: {code}\n"


@pytest.mark.parametrize(
    ("parser", "line", "test", "status"),
    [
        ("pytest", "FAILED a.py::b - assert 1 == 2", "a.py::b", "FAILED"),
        ("pytest", "PASSED a.py::b[x]", "a.py::b[x]", "PASSED"),
        ("pytest_options", "PASSED a.py::b[/tmp/x/y]", "a.py::b[/y]", "PASSED"),
        ("pytest_v2", "\x1b[32mPASSED\x1b[0m a.py::b[x y]", "a.py::b[x y]", "PASSED"),
        ("pytest_v2", "a.py::b FAILED", "a.py::b", "FAILED"),
        ("seaborn", "a.py::b PASSED  [ 3%]", "a.py::b", "PASSED"),
        ("sympy", "test_b ok", "test_b", "PASSED"),
        ("sympy", "____ a.py:test_b ____", "a.py:test_b", "FAILED"),
        ("matplotlib", "PASSED a.py::b[MouseButton.LEFT]", "a.py::b[1]", "PASSED"),
        ("django", "test_b (a.B) ... printed\nok", "test_b (a.B)", "PASSED"),
        ("django", "ERROR: test_b (a.B)", "test_b", "ERROR"),
        ("django", "test_b (a.B) ... skipped 'why'", "test_b (a.B)", "SKIPPED"),
        ("r2e", "XFAIL a.py::B::c", "B.c", "XFAIL"),
    ],
)
def test_parsers_read_what_their_frameworks_print(parser: str, line: str, test: str, status: str) -> None:
    assert statuses_of(logged(line), f"parse_log_{parser}")[test] == status


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_no_line_however_long_stops_a_parser(parser: str) -> None:
    for begin in ("FAILED ", "PASSED ", "test ", "_ "):
        for part in ("[", "a", ". ", " ", "_ ", "... ", "]", ".py: "):
            line = begin + part * (300_000 // len(part))
            with suppress(NotGraded):
                statuses_of(f"{START}\n{line}\n{END}\n", parser)


def test_logs_that_contradict_themselves_are_not_graded() -> None:
    assert statuses_of(logged("PASSED a\nFAILED b", code=1), "pytest") == {"a": "PASSED", "b": "FAILED"}
    assert statuses_of(logged("PASSED a\nSKIPPED [1] b.py:1: why"), "pytest") == {"a": "PASSED"}
    for log, words in {
        logged("PASSED a", code=1): "exit code 1",
        logged("nothing"): "no test",
        logged(f"PASSED a\n{END}\nFAILED a"): "2 times",
        logged(f"PASSED a\n{EXIT_CODE}: 0\nFAILED b", code=1): "several exit codes",
        logged("PASSED a\n>>>>> Tests Timed Out"): "Timed Out",
        "PASSED a": "0 times",
    }.items():
        with pytest.raises(NotGraded, match=words):
            statuses_of(log, "pytest")
    with pytest.raises(UsageError, match="no log parser 'nose'"):
        parser_named("nose")
    assert len(PARSERS) > 15


def test_skipped_is_maintained_and_not_resolved_and_cut_names_are_found() -> None:
    found = {"a": "SKIPPED", "b": "XFAIL", "c[x]": "PASSED", "c[xy]": "PASSED", "d[x]": "PASSED", "d[xy]": "FAILED"}
    graded = {test: passed for test, passed, _ in outcomes_of(found, ["a", "b", "c", "c[x", "d[x"], ["none"])}
    assert graded == {"a": False, "b": True, "c": False, "c[x": True, "d[x": False, "none": False}
    assert [passed for _, passed, _ in outcomes_of(found, [], ["a", "b"])] == [True, True]
