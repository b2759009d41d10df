"""Rollouts on remote environments, as a person and as a program type them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollcage.simulators.fleet.task import desk_task
from support.commands import rollcage


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A task file that brings its verifier, its seed and the scripted model's answers, but names no environment."""
    task = desk_task(prefix="")
    (tmp_path / "judge.py").write_text(task.verifier)
    document = {
        "instruction": task.instruction,
        "verifier_file": "judge.py",
        "environment_seed": task.environment_seed,
        "agent": {"name": "loop"},
        "solution": [turn.model_dump(mode="json", exclude_defaults=True) for turn in task.solution],
    }
    path = tmp_path / "desk.json"
    path.write_text(json.dumps(document))
    return path


def test_the_demonstration_runs_a_whole_rollout(tmp_path: Path) -> None:
    done = rollcage(tmp_path, "fleet", "demo", "--agent", "loop", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["outcome"], result["reward"], len(result["proxy_turns"])) == ("finished", 1.0, 6)


def test_a_task_runs_on_an_environment_by_both_ways_of_naming_it(
    tmp_path: Path, task: Path, fleet_env: dict[str, str]
) -> None:
    for words in (
        ["run", str(task), "--environment", "fleet:ticket-desk"],
        ["fleet", "run", "ticket-desk", str(task)],
    ):
        done = rollcage(tmp_path, *words, "--json", env=fleet_env)
        assert done.returncode == 0, done.stderr + done.stdout
        assert json.loads(done.stdout)["reward"] == 1.0
    shown = rollcage(tmp_path, "fleet", "run", "ticket-desk", str(task), "--seed", "8", env=fleet_env)
    assert "environment ticket-desk:v1.1.0 local-" in shown.stdout
    assert "reward 0.0" in shown.stdout, "with another seed it is another ticket"


def test_what_is_missing_is_said_before_anything_starts(tmp_path: Path, task: Path, fleet_env: dict[str, str]) -> None:
    nothing = {"FLEET_API_KEY": "", "FLEET_BASE_URL": ""}
    cases = [
        (["run", str(task), "--environment", "fleet:ticket-desk"], nothing, "FLEET_API_KEY is not set"),
        (["run", str(task)], fleet_env, "name one: --environment"),
        (["run", str(task), "--environment", "shop:x"], fleet_env, "known: fleet, mcp, openenv"),
        (["run", str(task), "--verifier", "nowhere.py"], fleet_env, "--verifier: cannot read nowhere.py"),
        (["fleet", "run", "ticket-desk", "--agent", "loop"], fleet_env, "--agent: goes with a task"),
        (["fleet", "run", "ticket-desk", str(task), "--region", "x"], fleet_env, "--region: goes without a task"),
        (["fleet", "demo", "--agent", "loop", "--serve"], fleet_env, "--agent and --serve"),
    ]
    for words, variables, said in cases:
        done = rollcage(tmp_path, *words, env=variables)
        assert (done.returncode, said in done.stderr) == (2, True), (words, done.stderr)


def test_an_environment_that_is_unknown_ends_the_rollout_with_its_name(
    tmp_path: Path, task: Path, fleet_env: dict[str, str]
) -> None:
    done = rollcage(tmp_path, "fleet", "run", "no-such-desk", str(task), "--json", env=fleet_env)
    result = json.loads(done.stdout)
    assert (done.returncode, result["outcome"], result["reward"]) == (1, "environment_failed", None)
    assert "no-such-desk" in result["error"]
