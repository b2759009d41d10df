"""Writes the examples that the web page offers, from the task files in examples/."""

from __future__ import annotations

import json
from pathlib import Path

from rollcage.simulators.fleet.task import desk_task
from rollcage.tasks import load
from rollcage.types import Task

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src/rollcage/server/web/examples.json"
SAYS = {
    "paginate": "Find and fix a fault in a small package, with hidden tests.",
    "wordcount": "Write a small program from a description.",
    "merge": "Resolve a merge conflict so that both changes stay.",
}
DESK = "Work on a remote ticket desk through its tools; its own verifier gives the reward."
"""Offered where the server reaches that environment."""


def documents() -> list[dict[str, object]]:
    """What the page needs of each example: a line for people, and the body of the request."""
    found = []
    for name, says in SAYS.items():
        task = load(str(ROOT / "examples" / f"{name}.toml")).task
        found.append({"about": {"name": name, "says": says}, "request": request_of(task)})
    desk = request_of(desk_task()) | {"environment": "fleet:ticket-desk"}
    return [*found, {"about": {"name": "ticket desk", "says": DESK}, "request": desk}]


def request_of(task: Task) -> dict[str, object]:
    """The body of the request that runs a task."""
    request = {
        "task_id": task.id,
        "instruction": task.instruction.strip(),
        "upload_files": task.files,
        "setup": list(task.setup),
        "verify": list(task.verify),
        "tests": task.tests,
        "test_script": task.test_script,
        "checks": [check.model_dump(mode="json", exclude_defaults=True) for check in task.checks],
        "restore": task.restore,
        "isolate": task.isolate,
        "verify_in": "" if task.verify_in == "box" else task.verify_in,
        "verifier": task.verifier,
        "environment_seed": task.environment_seed,
        "agent_timeout_s": task.limits.agent_timeout_s,
        "solution": [turn.model_dump(mode="json", exclude_defaults=True) for turn in task.solution],
    }
    return {key: value for key, value in request.items() if value}


def text() -> str:
    """The whole file."""
    return json.dumps(documents(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
