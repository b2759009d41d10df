"""`rollcage run -n`: a group, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import rollcage

TASK = """
id = "hi"
instruction = "Write hi.txt."
verify = ["grep -qx hi hi.txt"]

[[solution]]
tool_calls = [{ name = "bash", arguments = { command = "echo hi > hi.txt" } }]

[[solution]]
text = "Done."
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "hi.toml").write_text(TASK)
    return tmp_path


def test_a_group_is_run_in_one_command_and_told_line_by_line(task: Path) -> None:
    done = rollcage(task, "run", "hi.toml", "--agent", "mini", "-n", "3", "--group-id", "g", "--json", "--require", "1")
    assert done.returncode == 0, done.stderr
    group = json.loads(done.stdout)
    assert (group["group_id"], group["n"], group["scored"], group["usable"], group["done"]) == ("g", 3, 3, 3, True)
    assert [(each["index"], each["reward"]) for each in group["rollouts"]] == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert [line.split()[0] for line in done.stderr.splitlines() if "reward 1" in line] == ["1/3", "2/3", "3/3"]
    again = rollcage(task, "run", "hi.toml", "--agent", "mini", "-n", "2", "--group-id", "g")
    assert again.returncode == 2
    assert "has rollouts already" in again.stderr


def test_enough_usable_ones_are_enough(task: Path) -> None:
    done = rollcage(task, "run", "hi.toml", "--agent", "mini", "-n", "3", "--min-usable", "1", "--require", "2")
    assert done.returncode == 4, "the mean is below what is required"
    assert "usable, mean reward 1" in done.stdout
    assert len(done.stdout.splitlines()) == 4, "one line each, and one for the group"


def test_what_makes_no_sense_is_refused_before_anything_runs(task: Path) -> None:
    for options, said in {
        ("-n", "2", "--min-usable", "3"): "no more than n can be usable",
        ("-n", "2", "--follow", "--json"): "-n makes a group",
        ("-n", "0"): "greater than or equal to 1",
    }.items():
        done = rollcage(task, "run", "hi.toml", "--agent", "mini", *options)
        assert done.returncode == 2
        assert said in done.stderr + done.stdout
    assert not (task / "state" / "rollouts.db").exists()
