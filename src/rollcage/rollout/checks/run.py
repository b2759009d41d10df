"""Runs the checks of a task, each as it has to be, and says which expected tests passed."""

from __future__ import annotations

import json
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import PurePosixPath
from typing import NamedTuple

from anyio import to_thread

from rollcage.errors import ScoringError, UsageError
from rollcage.events import CommandEnded, CommandStarted, Event
from rollcage.rollout.checks import commands, node, python
from rollcage.rollout.checks.plan import CheckPlan
from rollcage.rollout.checks.report import PASSED, CheckReport, read_report, told
from rollcage.sandboxes.base import SHELL, Exit, Judged, Process, Sandbox, run
from rollcage.tasks.expected import Expected, expected_of
from rollcage.types import HOME, TESTS_DIR, Check, CommandResult, Stage, Task, Trust

REPORT_LIMIT = 16 << 20
_NOT_THERE = (126, 127)
"""Exit codes of a program that cannot be started."""


class Sides(NamedTuple):
    """Where checks can run, and with which environment."""

    box: Sandbox
    """The judge's side."""
    judged: Judged
    env: Mapping[str, str]
    """What the judge's commands get; the launcher is on its PATH."""
    given: Mapping[str, str]
    """What the judged get."""


class Checked(NamedTuple):
    """What the checks of a task came to."""

    parts: dict[str, float]
    """1 for each expected test that passed and 0 for each other, by name."""
    scores: tuple[float, ...]
    """What counts, each as much as the others: a test, or all tests of a check that are judged together."""
    trust: Trust
    """That of the weakest check."""


class _JudgedSide:
    """The judged's side as something that `run` takes."""

    def __init__(self, judged: Judged, scratch: bool) -> None:
        self._judged, self._scratch = judged, scratch

    def spawn(
        self, argv: list[str], *, env: Mapping[str, str] | None, cwd: str = HOME, inherit_image_env: bool = False
    ) -> AbstractAsyncContextManager[Process]:
        return self._judged.spawn(argv, env=env, cwd=cwd, scratch=self._scratch)


async def run_checks(
    task: Task,
    sides: Sides,
    log: Callable[[Event], Awaitable[object]],
    *,
    seconds: float,
) -> Checked:
    """Run all checks, logged as commands. ScoringError where the task or its box lacks something, never for what the
    agent did: that is a test that has not passed."""
    try:
        expected = expected_of(task)
    except UsageError as error:
        raise ScoringError(str(error), blame="task") from error
    deadline = time.monotonic() + seconds
    parts: dict[str, float] = {}
    scores: list[float] = []
    # Whoever is given the tests could keep them: those come last who are.
    for each in sorted(expected, key=lambda each: not isolated(each.check)):
        label = label_of(each.check)
        await log(CommandStarted(stage=Stage.VERIFY, command=label))
        left = max(0.1, min(each.check.timeout_s, deadline - time.monotonic()))
        report, ended = await _run_one(each, task, sides, left)
        result = CommandResult(
            command=label,
            exit_code=ended.code,
            stdout=told(report, each.ids) + _log_of(each.check, ended),
            stderr=ended.stderr.data[-(64 << 10) :].decode("utf-8", "replace"),
            seconds=ended.seconds,
            timed_out=ended.timed_out,
        )
        await log(CommandEnded(stage=Stage.VERIFY, result=result))
        _refuse_lacking(each.check, task, report, ended, first=not parts)
        passed = {each.part(test): float(report.of(test) == PASSED) for test in each.ids}
        parts |= passed
        scores += [min(passed.values())] if each.check.together else passed.values()
    weakest: Trust = "isolated" if all(isolated(check) for check in task.checks) else "in_process"
    return Checked(parts, tuple(scores), weakest)


def _log_of(check: Check, ended: Exit) -> str:
    """The end of what a script printed, which is its report."""
    return f"\n\n{ended.stdout.text[-(16 << 10) :]}" if check.kind == "log" else ""


def label_of(check: Check) -> str:
    """A check in one line."""
    if check.kind == "command":
        return check.name or check.command.strip()
    how = " (proxied)" if check.isolation == "proxied" else ""
    what = f"{check.name}: {check.kind}" if check.name else check.kind
    return " ".join(word for word in (what, check.path) if word) + how


def isolated(check: Check) -> bool:
    """Whether no code under test is in reach of what decides."""
    return check.kind == "command" or check.isolation == "proxied"


async def _run_one(each: Expected, task: Task, sides: Sides, seconds: float) -> tuple[CheckReport, Exit]:
    check = each.check
    if check.kind == "command":
        side = _JudgedSide(sides.judged, scratch=False)
        return await commands.run_command(each, side, task.workdir, seconds, sides.given)  # type: ignore[arg-type]
    if check.kind == "log":
        copy = _JudgedSide(sides.judged, scratch=True)
        return await commands.run_log(each, copy, task.workdir, seconds, sides.given, REPORT_LIMIT)  # type: ignore[arg-type]
    kinds = {"pytest": python.plan, "unittest": python.plan, "node": node.plan}
    plan = kinds.get(check.kind, commands.plan)(check, task, seconds)
    nonce = secrets.token_hex(16)
    ended = await run(
        sides.box if plan.in_judge else _JudgedSide(sides.judged, plan.scratch),  # type: ignore[arg-type]
        [*SHELL, _not_theirs(task), "check", *plan.argv] if plan.in_judge else plan.argv,
        stdin=_order(plan, nonce),
        env=sides.env if plan.in_judge else {**sides.given, "TESTS_DIR": TESTS_DIR},
        cwd=plan.cwd,
        inherit_image_env=False,
        timeout_s=seconds,
        limit=REPORT_LIMIT,
    )
    return await to_thread.run_sync(_read, plan, ended, nonce), ended


def _not_theirs(task: Task) -> str:
    """A script that becomes what it is called with, unless links lead from there into the work: where an image or setup
    had them lead, the agent has put what it likes."""
    folders = " ".join(map(shlex.quote, (task.workdir, *task.keep)))
    return f"""
        real=$(readlink -f -- "$(command -v -- "$1")")
        for folder in {folders}; do
          case $real in "$folder"/* | "$(readlink -f -- "$folder" || echo "$folder")"/*)
            echo "$1 leads to $real, where the agent can change it" >&2
            exit 126 ;;
          esac
        done
        exec "$@"
    """


def _read(plan: CheckPlan, ended: Exit, nonce: str) -> CheckReport:
    """What came back; it may be long, and everybody else's work waits for none of it."""
    report = read_report(ended, nonce)
    if not report.incomplete:
        plan.read(report)
    return report


def _order(plan: CheckPlan, nonce: str) -> bytes:
    order = json.dumps({**plan.order, "nonce": nonce})
    return f"const ORDER = {order};\n{plan.text}".encode() if plan.text else order.encode()


def _refuse_lacking(check: Check, task: Task, report: CheckReport, ended: Exit, *, first: bool) -> None:
    """A box without the framework judges nothing. Where the interpreter is of the agent's making, that is its work.

    So it may be where earlier checks ran its code, which can close the workdir: then only a program that is not there
    is lacking.
    """
    own = any(PurePosixPath(check.interpreter).is_relative_to(folder) for folder in (task.workdir, *task.keep))
    lacks = report.missing or ("" if report.begun or check.kind == "command" else check.interpreter or check.kind)
    if not report.missing and not first and ended.code not in _NOT_THERE:
        lacks = ""
    if lacks and not own and not ended.timed_out:
        said = ended.stderr.data[-300:].decode("utf-8", "replace").strip()
        raise ScoringError(
            f"check {label_of(check)!r}: the box has no {lacks}. {said}".strip(),
            argument="checks",
            blame="task",
            remedy="use an image that has it, install it in setup outside the workdir, or name `interpreter`",
        )
