"""`rollcage audit` and `reverify`, and the agents that need no model, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.commands import rollcage

SOUND = """
id = "answer"
instruction = "Write a program `answer` that prints 42."
isolate = true
verify = ['test "$(untrusted --timeout 5 ./answer)" = 42']
solution_script = "printf '#!/bin/sh\\\\necho 42\\\\n' > answer && chmod 755 answer"
"""
WEAK = """
id = "weak"
instruction = "Write a program `answer` that prints 42."
verify = ["./answer", "true"]
solution_script = "printf '#!/bin/sh\\\\necho 42\\\\n' > answer && chmod 755 answer"
[limits]
verify_timeout_s = 8
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "sound.toml").write_text(SOUND)
    (tmp_path / "weak.toml").write_text(WEAK)
    return tmp_path


def test_an_audit_says_what_is_wrong_what_to_do_and_fails(home: Path) -> None:
    some = ("--only", "always_true", "--only", "hang", "--repeat", "1")
    ended = rollcage(home, "audit", "sound.toml", "weak.toml", *some)
    assert ended.returncode == 1, ended.stderr
    sound, weak = ended.stdout.split("\nweak")
    assert "sound" in sound and "trust: isolated" in sound and "pays" not in sound
    assert "pays_for_nothing: doing nothing earns 0.5" in weak and "cheat_pays: always_true" in weak
    assert "no_reward: hang" in weak and "rollcage show" in weak and "trust: shared" in weak
    assert "audit weak: 4 of 4" in ended.stderr, "how far it is, on stderr"
    assert "\x1b" not in ended.stdout, "plain where nobody watches"


def test_many_tasks_are_one_line_each_a_summary_and_go_on_where_they_were(home: Path) -> None:
    lines: list[dict[str, Any]] = [{"id": f"t{n}", "instruction": "x", "verify": ["test -e x"]} for n in range(3)]
    lines[0]["solution_script"] = lines[1]["solution_script"] = "touch x"
    lines[1]["verify"] = ["true"]
    lines[2] |= {"sandbox": {"template": "nowhere"}}
    (home / "many.jsonl").write_text("\n".join([*map(json.dumps, lines), "{"]))
    command = ("audit", "many.jsonl", "--only", "empty", "--repeat", "1", "--report", "found.jsonl")
    ended = rollcage(home, *command)
    assert ended.returncode == 1, ended.stderr
    by_task = {line.split()[1]: line for line in ended.stdout.splitlines() if line[:4].strip()}
    assert "sound" in by_task["t0"] and "nothing 0.0" in by_task["t0"] and "reference 1.0" in by_task["t0"]
    assert "pays_for_nothing" in by_task["t1"] and "no image 'nowhere'" in by_task["t2"]
    assert "many.jsonl:4" in by_task["many-4"] and "valid JSON" in by_task["many-4"]
    assert ended.stdout.splitlines()[-1].startswith("4 tasks: 1 sound, 1 with problems (pays_for_nothing 1")
    assert ended.stdout.splitlines()[-1].endswith("2 cannot run")
    tried = len(json.loads(rollcage(home, "ls", "--json").stdout))
    found = (home / "found.jsonl").read_text().splitlines()
    assert len(found) == 2
    # Stopped in the middle of its second report, it tries that task again, and no other.
    (home / "found.jsonl").write_text(found[0] + "\n" + found[1][:40])
    again = rollcage(home, *command)
    assert sorted(again.stdout.splitlines()) == sorted(ended.stdout.splitlines())
    assert tried < len(json.loads(rollcage(home, "ls", "--json").stdout)) < 2 * tried
    details = rollcage(home, *command, "--details").stdout
    assert "the agent does nothing" in details and "4 tasks" in details
    assert tried < len(json.loads(rollcage(home, "ls", "--json").stdout)) < 2 * tried, "nothing more was tried"


def test_an_audit_is_one_json_document(home: Path) -> None:
    ended = rollcage(home, "audit", "sound.toml", "--only", "always_true", "--only", "empty", "--json")
    report = json.loads(ended.stdout)
    assert ended.returncode == 0 and report["ok"] is True, ended.stderr
    [task] = report["tasks"]
    assert (task["task_id"], task["trust"], task["findings"]) == ("answer", "isolated", [])
    earned = {each["probe"]["name"]: each["reward"] for each in task["probes"]}
    assert earned == {
        "nothing": 0,
        "reference": 1,
        "reference (2)": 1,
        "reference (3)": 1,
        "always_true": 0,
        "empty": 0,
    }
    shown = rollcage(home, "show", task["probes"][1]["rollout_id"], "--json")
    result = json.loads(shown.stdout)
    assert (result["agent"], result["group_id"], result["metadata"]) == (
        "oracle",
        "audit:answer",
        {"audit": "reference"},
    )


def test_advice_fails_a_strict_audit_only(home: Path) -> None:
    (home / "bare.toml").write_text(SOUND.split("solution_script")[0])
    assert rollcage(home, "audit", "bare.toml", "--only", "empty").returncode == 0
    assert rollcage(home, "audit", "bare.toml", "--only", "empty", "--strict").returncode == 1


def test_agents_that_need_no_model_need_no_endpoint(home: Path) -> None:
    for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
        ended = rollcage(home, "run", "sound.toml", "--agent", agent, "--json")
        result = json.loads(ended.stdout)
        assert (ended.returncode, result["reward"], result["trust"]) == (0, reward, "isolated"), ended.stderr
        assert result["model"] == "none" and result["proxy_turns"] == [] and result["agent"] == agent
    refused = rollcage(home, "run", "-i", "x", "--agent", "oracle")
    assert refused.returncode == 2 and "solution_script" in refused.stderr
    assert rollcage(home, "run", "-i", "x", "--agent", "opencode").returncode == 2, "others do"


def test_stored_work_is_judged_again_by_a_corrected_task(home: Path) -> None:
    first = json.loads(rollcage(home, "run", "weak.toml", "--agent", "oracle", "--json").stdout)
    assert first["reward"] == 1 and first["work_kept"] is True
    corrected = WEAK.replace('"./answer", "true"', '"test $(./answer) = 43", "true"')
    (home / "mended.toml").write_text(corrected)
    ended = rollcage(home, "reverify", "--task-id", "weak", "--task", "mended.toml", "--json")
    [row] = json.loads(ended.stdout)
    assert (ended.returncode, row["rollout_id"], row["before"], row["reward"]) == (0, first["rollout_id"], 1, 0.5)
    assert row["changed"] == ["verify"]
    result = json.loads(rollcage(home, "show", first["rollout_id"], "--json").stdout)
    assert result["reward"] == 1 and [verdict["reward"] for verdict in result["verdicts"]] == [0.5]
    shown = rollcage(home, "show", first["rollout_id"]).stdout
    assert "judged again" in shown and "changed: verify" in shown
    again = rollcage(home, "reverify", first["rollout_id"][:6])
    assert again.returncode == 0 and "1 judged again, 0 with another reward" in again.stdout
    assert again.stderr == "reverify: 1 of 1\n", "how far it is"
    assert f"again {first['rollout_id'][:8]}" in rollcage(home, "ls").stdout


def test_what_was_not_kept_is_said_and_fails(home: Path) -> None:
    env = {"ROLLCAGE_KEEP_WORK_MB": "0"}
    first = json.loads(rollcage(home, "run", "weak.toml", "--agent", "oracle", "--json", env=env).stdout)
    assert first["work_kept"] is False
    ended = rollcage(home, "reverify", first["rollout_id"], "--json")
    [row] = json.loads(ended.stdout)
    assert ended.returncode == 1 and "was not kept" in row["error"] and "ROLLCAGE_KEEP_WORK_MB" in row["error"]
    assert rollcage(home, "reverify").returncode == 2
    assert rollcage(home, "reverify", "--outcome", "nonsense").returncode == 2
