"""`rollcage sandbox check`, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands import rollcage


def test_each_check_is_one_line_and_the_exit_code_tells(tmp_path: Path) -> None:
    ran = rollcage(tmp_path, "sandbox", "check", "local", "--only", "files.limit", "--only", "layers")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert "files.limit  a read takes no more than its limit" in lines[0]
    assert lines[-1] == "local: all 4 checks hold"


def test_json_is_one_document(tmp_path: Path) -> None:
    ran = rollcage(tmp_path, "sandbox", "check", "local", "--only", "files.limit", "--json")
    told = json.loads(ran.stdout)
    assert (ran.returncode, told["backend"], told["conforms"]) == (0, "local", True)
    assert [(row["name"], row["outcome"]) for row in told["checks"]] == [("files.limit", "passed")]


def test_names_nobody_knows_are_usage_errors(tmp_path: Path) -> None:
    ran = rollcage(tmp_path, "sandbox", "check", "nowhere")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "no sandbox backend is called 'nowhere'; there are local" in ran.stderr
    ran = rollcage(tmp_path, "sandbox", "check", "local", "--only", "nothing")
    assert ran.returncode == 2 and "no check or family is called 'nothing'" in ran.stderr
