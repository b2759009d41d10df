"""Writes the examples that the web page offers, from the task files in examples/."""

from __future__ import annotations

import json
from pathlib import Path

from rollcage.tasks import load

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "src/rollcage/server/static/examples.json"
SAYS = {
    "paginate": "Find and fix a fault in a small package, with hidden tests.",
    "wordcount": "Write a small program from a description.",
    "merge": "Resolve a merge conflict so that both changes stay.",
}


def documents() -> list[dict[str, object]]:
    """What the page needs of each example: a line for people, and the body of the request."""
    found = []
    for name, says in SAYS.items():
        task = load(str(ROOT / "examples" / f"{name}.toml")).task
        request = {
            "task_id": task.id,
            "instruction": task.instruction.strip(),
            "upload_files": task.files,
            "setup": list(task.setup),
            "verify": list(task.verify),
            "tests": task.tests,
            "test_script": task.test_script,
            "verify_in": "" if task.verify_in == "box" else task.verify_in,
            "agent_timeout_s": task.limits.agent_timeout_s,
            "solution": [turn.model_dump(mode="json", exclude_defaults=True) for turn in task.solution],
        }
        kept = {key: value for key, value in request.items() if value}
        found.append({"about": {"name": name, "says": says}, "request": kept})
    return found


def text() -> str:
    """The whole file."""
    return json.dumps(documents(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
