"""Checks by `node --test`: what is run for them, on which side, and with which order."""

from __future__ import annotations

import base64
import json
from functools import cache
from importlib import resources

from rollcage.rollout.checks.plan import CheckPlan
from rollcage.tasks.expected import tests_below
from rollcage.types import TESTS_DIR, Check, JsonObject, Task


@cache
def _program(name: str) -> str:
    return (resources.files("rollcage.rollout.checks") / "inside" / name).read_text("utf-8")


def plan(check: Check, task: Task, seconds: float) -> CheckPlan:
    """How to run it. The runner itself runs no code under test: that is in a process for each test file."""
    node = check.interpreter or "node"
    order: JsonObject = {"tests_dir": TESTS_DIR, "path": check.path}
    text = _program("node_run.cjs")
    if check.isolation == "reported":
        order["tests"] = tests_below(task.tests)
        return CheckPlan([node, "-"], order, cwd=task.workdir, text=text)
    first = f"--import=data:text/javascript;base64,{_encoded(_stubs(node, task, seconds))}"
    return CheckPlan([node, first, "-"], order, cwd=TESTS_DIR, text=text, in_judge=True)


def _stubs(node: str, task: Task, seconds: float) -> str:
    """What is loaded before each test file: the stubs, the worker behind them, and where both belong."""
    config: JsonObject = {
        "node": node,
        "launcher": "untrusted",
        "workdir": task.workdir,
        "outside": [task.workdir, *task.keep],
        "seconds": seconds,
    }
    hooks = _with(config, _program("node_hooks.mjs"))
    worker = _program("node_wire.js") + _program("node_worker.cjs")
    return _with({**config, "hooks": hooks, "worker": worker}, _program("node_wire.js") + _program("node_proxied.mjs"))


def _with(config: JsonObject, program: str) -> str:
    return f"const CONFIG = {json.dumps(config)};\n{program}"


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
