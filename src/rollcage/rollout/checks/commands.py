"""Checks by commands: those whose output is compared or read here, and frameworks with a report: go, cargo, JUnit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from xml.parsers import expat

from anyio import to_thread

from rollcage.rollout.checks.inside import command_run, reporting
from rollcage.rollout.checks.plan import CheckPlan
from rollcage.rollout.checks.report import PASSED, CheckReport
from rollcage.sandboxes.base import SHELL, Exit, Sandbox, run
from rollcage.sandboxes.bundle import bundle
from rollcage.tasks.expected import Expected, tests_below
from rollcage.tasks.logs import NotGraded, outcomes_of, statuses_of
from rollcage.types import TESTS_DIR, Check, JsonObject, Task

OUTPUT_LIMIT = 4 << 20
_DEEPEST = 1000


async def run_command(
    each: Expected, side: Sandbox, workdir: str, seconds: float, env: Mapping[str, str]
) -> tuple[CheckReport, Exit]:
    """Run one command as the judged; its exit code and its output are compared here."""
    check, test = each.check, each.ids[0]
    argv, stdin = [*SHELL, check.command], check.stdin.encode()
    ended = await run(
        side, argv, stdin=stdin, env=env, cwd=workdir, inherit_image_env=False, timeout_s=seconds, limit=OUTPUT_LIMIT
    )
    report = CheckReport(begun=True)
    if ended.timed_out:
        report.add(test, "failed", "it ran out of time")
    elif ended.code != check.exit_code:
        report.add(test, "failed", f"exit code {ended.code}, not {check.exit_code}")
    elif check.stdout is not None and (
        ended.stdout.truncated or ended.stdout.data.rstrip() != check.stdout.encode().rstrip()
    ):
        report.add(test, "failed", f"it printed {ended.stdout.text[-200:]!r}")
    else:
        report.add(test, PASSED)
    return report, ended


_EVAL = """
cat > "${TMPDIR:=/tmp}/eval.sh" || exit 97
# The copy of the workdir may belong to another user: git then wants to be told.
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
exec bash "$TMPDIR/eval.sh" </dev/null 2>&1
"""


async def run_log(
    each: Expected, side: Sandbox, workdir: str, seconds: float, env: Mapping[str, str], limit: int
) -> tuple[CheckReport, Exit]:
    """Run a script as the judged, in a copy of the workdir; what it printed is read here."""
    check = each.check
    argv, stdin = [*SHELL, _EVAL], check.command.encode()
    ended = await run(
        side, argv, stdin=stdin, env=env, cwd=workdir, inherit_image_env=False, timeout_s=seconds, limit=limit
    )
    return await to_thread.run_sync(_read_log, check, ended), ended


def _read_log(check: Check, ended: Exit) -> CheckReport:
    report = CheckReport(begun=True)
    if ended.timed_out or ended.stdout.truncated:
        report.incomplete = "it ran out of time" if ended.timed_out else "its log is too long"
        return report
    try:
        found = statuses_of(ended.stdout.data.decode("utf-8", "replace"), check.parser)
    except NotGraded as error:
        report.incomplete = str(error)
        return report
    for name, status in found.items():
        report.add(name, status.lower())
    for test, passed, status in outcomes_of(found, check.expect, check.maintain):
        report.outcomes[test] = PASSED if passed else f"failed: {status}"
    return report


def plan(check: Check, task: Task, seconds: float) -> CheckPlan:
    """How to run go, cargo or a command that writes a JUnit report: in a copy of the workdir, with the tests in it."""
    tests = tests_below(task.tests)
    order: JsonObject = {"tests_dir": TESTS_DIR, "tests": tests}
    if check.kind == "go":
        words = [check.interpreter or "go", "test", "-json", "-count=1", _go_package(check)]
        order |= {"overlay": tests, "argv": words}
        read = read_go
    elif check.kind == "cargo":
        words = [check.interpreter or "cargo", "test", "--offline", "--no-fail-fast"]
        order |= {"overlay": tests, "argv": [*words, *(["--test", check.path] if check.path else [])]}
        read = read_cargo
    else:
        order |= {"argv": [*SHELL, check.command], "report": check.report}
        read = read_junit
    text = bundle(command_run, reporting)
    return CheckPlan(["python3", "-I", "-c", text], order, cwd=task.workdir, scratch=True, read=read)


def _go_package(check: Check) -> str:
    return f"./{check.path.removeprefix('./')}" if check.path else "./..."


def read_go(report: CheckReport) -> None:
    """Tests out of `go test -json`: of packages that ended, each with its last action."""
    actions: dict[str, str] = {}
    ended: dict[str, str] = {}
    for line in report.output.splitlines():
        try:
            said = json.loads(line)
            action, package = str(said["Action"]), str(said["Package"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if action in ("pass", "fail", "skip"):
            if "Test" in said:
                actions[f"{package}::{said['Test']}"] = action
            else:
                ended[package] = action
    for test, action in actions.items():
        # A package that fails though its tests passed was ended from inside, or broke between them.
        if test.partition("::")[0] in ended:
            report.add(test, PASSED if action == "pass" else "skipped" if action == "skip" else "failed")


_TARGET = re.compile(r"\s*Running (?:unittests )?(\S+) \(.*\)|\s*Doc-tests (\S+)")
_TEST = re.compile(r"test (.+?) \.\.\. (ok|FAILED|ignored)")
_RESULT = re.compile(r"test result: (?:ok|FAILED)\. (\d+) passed; (\d+) failed; (\d+) ignored")


def read_cargo(report: CheckReport) -> None:
    """Tests out of what `cargo test` prints: of targets whose result agrees with the lines before it."""
    target = ""
    found: list[tuple[str, str]] = []
    for line in report.output.splitlines():
        if begins := _TARGET.fullmatch(line):
            target, found = begins[1] or begins[2], []
        elif test := _TEST.match(line):
            found.append((test[1], test[2]))
        elif result := _RESULT.match(line):
            counts = [sum(how == word for _, how in found) for word in ("ok", "FAILED", "ignored")]
            if counts == [int(result[number]) for number in (1, 2, 3)]:
                for name, how in found:
                    report.add(f"{target}::{name}", {"ok": PASSED, "ignored": "skipped"}.get(how, "failed"))
            found = []


def read_junit(report: CheckReport) -> None:
    """Tests out of a JUnit report."""
    if not report.document:
        report.incomplete = "the command wrote no report"
        return
    if "<!DOCTYPE" in report.document or "<!ENTITY" in report.document:
        report.incomplete = "its report declares entities"
        return
    # Event by event, and not very deep: a tree of it could take a gigabyte.
    outcome, why, test, inside, depth = PASSED, "", "", False, 0

    def begin(tag: str, attributes: dict[str, str]) -> None:
        nonlocal outcome, why, test, inside, depth
        depth += 1
        if depth > _DEEPEST:
            raise ValueError("its suites are nested too deeply")
        if tag == "testcase":
            name, owner = attributes.get("name", ""), attributes.get("classname", "")
            outcome, why, test, inside = PASSED, "", f"{owner}::{name}" if owner else name, True
        elif inside and outcome == PASSED and tag in ("failure", "error", "skipped"):
            outcome, why = "skipped" if tag == "skipped" else "failed", attributes.get("message", "")[:300]

    def end(tag: str) -> None:
        nonlocal inside, depth
        depth -= 1
        if tag == "testcase" and inside:
            report.add(test, outcome, why)
            inside = False

    parser = expat.ParserCreate()
    parser.StartElementHandler, parser.EndElementHandler = begin, end
    try:
        parser.Parse(report.document, True)
    except (expat.ExpatError, ValueError) as error:
        report.incomplete = f"its report is no XML: {error}"
