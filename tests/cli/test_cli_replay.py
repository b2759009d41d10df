"""`rollcage replay` and `fork` as processes: what they print, what they hold rollouts to, their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.commands import rollcage

TASK = """
instruction = "Write a.txt."
verify = ["grep -q one a.txt"]

[[solution]]
tool_calls = [{ name = "bash", arguments = { command = "echo one > a.txt" } }]

[[solution]]
tool_calls = [{ name = "bash", arguments = { command = "cat a.txt" } }]

[[solution]]
text = "Done."
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "write.toml").write_text(TASK)
    (tmp_path / "tasks" / "other.toml").write_text('instruction = "x"\nverify = ["true"]\n')
    ended = rollcage(tmp_path, "eval", "tasks/write.toml", "-m", "scripted", "--agent", "mini", "--name", "one")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return tmp_path


def first(home: Path) -> str:
    rows = json.loads(rollcage(home, "ls", "--json").stdout)
    return str(rows[-1]["id"])


def test_replays_are_held_to_their_originals_also_with_the_tasks_of_today(home: Path) -> None:
    again = ("replay", "--batch", "one", "--expect", "same-reward", "--expect", "same-requests")
    ended = rollcage(home, *again)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the same reward 1.0, 3 of 3 requests the same" in ended.stdout
    (home / "tasks" / "write.toml").write_text(TASK.replace("grep -q one", "grep -q two"))
    assert rollcage(home, *again).returncode == 0, "the task is as it was"
    ended = rollcage(home, *again, "--task", "tasks", "--json")
    (report,) = json.loads(ended.stdout)
    assert ended.returncode == 1, ended.stderr
    assert (report["reward_before"], report["reward"], report["differences"]) == (1.0, 0.0, [])
    ended = rollcage(home, "replay", first(home), "--task", "tasks/other.toml", "--on-difference", "position")
    assert ended.returncode == 0 and "turn 1: messages[" in ended.stdout and "is " in ended.stdout, ended.stdout
    ended = rollcage(home, *again, "--task", "tasks/none.toml")
    assert ended.returncode == 2 and "no such file" in ended.stderr
    (home / "tasks" / "write.toml").rename(home / "tasks" / "moved.toml")
    ended = rollcage(home, *again, "--task", "tasks")
    assert ended.returncode == 2 and "there is no task write in tasks" in ended.stderr


def test_a_fork_goes_on_from_its_turn_with_an_answer_by_hand_too(home: Path) -> None:
    original = first(home)
    (home / "said.json").write_text(
        json.dumps(
            {
                "tool_calls": [
                    {
                        "id": "c",
                        "type": "function",
                        "function": {"name": "bash", "arguments": '{"command": "echo two > a.txt"}'},
                    }
                ]
            }
        )
    )
    ended = rollcage(home, "fork", original[:6], "--at", "2", "-n", "2", "-m", "scripted")
    assert ended.returncode == 0 and ended.stdout.count("reward 1.0  3 turns") == 2, ended.stdout + ended.stderr
    ended = rollcage(home, "fork", original, "--at", "2", "-m", "scripted", "--edit", "said.json", "--json")
    (found,) = json.loads(ended.stdout)
    assert found["reward"] == 0.0 and found["group_id"] == f"fork:{original}:2", ended.stderr
    assert found["proxy_turns"][1]["message"]["tool_calls"][0]["function"]["arguments"] == (
        '{"command": "echo two > a.txt"}'
    )
    for arguments, words in (
        (("--at", "9", "-m", "scripted"), "there is no turn 9"),
        (("--at", "1", "-m", "nobody"), "names no endpoint"),
        (("--at", "0", "-m", "scripted"), "0 is not in the range"),
    ):
        ended = rollcage(home, "fork", original, *arguments)
        assert ended.returncode == 2 and words in ended.stderr, ended.stderr
