"""Checks by pytest and unittest: what is run for them, on which side, and with which order."""

from __future__ import annotations

from rollcage.rollout.checks.inside import (
    judge_worker,
    proxied,
    proxies,
    pytest_run,
    reported,
    reporting,
    unittest_run,
    wire,
    worker,
)
from rollcage.rollout.checks.plan import CheckPlan
from rollcage.sandboxes.bundle import bundle
from rollcage.tasks.expected import tests_below
from rollcage.types import TESTS_DIR, Check, JsonObject, Task

_FLAGS = ["-I", "-X", "pycache_prefix=/tmp/pycache"]


def plan(check: Check, task: Task, seconds: float) -> CheckPlan:
    """How to run it. Compiled modules in the workdir are not read: they need not be what their source says."""
    python = check.interpreter or "python3"
    import_from = [task.workdir if each == "." else f"{task.workdir}/{each}" for each in check.import_from]
    order: JsonObject = {"kind": check.kind, "path": check.path, "tests_dir": TESTS_DIR, "import_from": import_from}
    if check.isolation == "reported":
        order["tests"] = tests_below(task.tests)
        text = bundle(reported, reporting, pytest_run, unittest_run)
        return CheckPlan([python, *_FLAGS, "-c", text], order, cwd=task.workdir)
    order |= {"workdir": task.workdir, "keep": list(task.keep), "seconds": seconds}
    order["worker"] = [python, *_FLAGS, "-u", "-c", bundle(worker, wire), *import_from]
    text = bundle(proxied, wire, reporting, pytest_run, unittest_run, judge_worker, proxies)
    return CheckPlan([python, "-I", "-S", "-c", text], order, cwd=TESTS_DIR, in_judge=True)
