"""The examples, as a new user runs them: real OpenCode, real box, scripted model."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest

from rollcage.results.result import RolloutResult
from rollcage.settings import Settings
from support.commands import rollcage
from support.paths import EXAMPLES, ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home of its own in which the agent is prepared; a package that was fetched before is used again."""
    folder = tmp_path_factory.mktemp("examples")
    cache = folder / "state" / "cache"
    cache.mkdir(parents=True)
    kept = Settings.from_environ(os.environ).cache_dir
    for package in kept.glob("*.tgz") if kept.is_dir() else ():
        shutil.copy(package, cache)
    prepared = rollcage(folder, "setup")
    assert prepared.returncode == 0, prepared.stderr
    assert rollcage(folder, "setup", "--check").returncode == 0
    return folder


@pytest.mark.parametrize("name", ["paginate", "wordcount", "merge"])
def test_the_scripted_solution_earns_the_whole_reward(home: Path, name: str) -> None:
    ended = rollcage(home, "run", str(EXAMPLES / f"{name}.toml"), "--json")
    result = RolloutResult.model_validate_json(ended.stdout)
    assert (ended.returncode, result.outcome, result.reward) == (0, "finished", 1.0), result.error
    assert result.proxy_turns and all(turn.completion_token_ids for turn in result.proxy_turns)


@pytest.mark.parametrize("name", ["paginate", "wordcount", "merge"])
def test_an_agent_that_does_nothing_earns_less(home: Path, name: str) -> None:
    ended = rollcage(home, "run", str(EXAMPLES / f"{name}.toml"), "--agent", "shell", "-i", "true", "--json")
    result = RolloutResult.model_validate_json(ended.stdout)
    assert result.outcome == "finished" and result.reward is not None and result.reward < 0.5, result.error


def test_the_examples_are_sound(home: Path) -> None:
    names = [str(EXAMPLES / f"{name}.toml") for name in ("paginate", "wordcount", "merge")]
    ended = rollcage(home, "audit", *names, "--repeat", "2", "--strict", "--json")
    report = json.loads(ended.stdout)
    assert ended.returncode == 0, [task["findings"] for task in report["tasks"]]
    assert [task["trust"] for task in report["tasks"]] == ["isolated"] * 3
    assert all(len(task["probes"]) > 20 for task in report["tasks"])


def docs_tasks() -> dict[str, str]:
    """Every whole task that the docs show, by its page."""
    pages = {page.stem: re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL) for page in DOCS.glob("*.md")}
    # An instance of SWE-bench needs its image.
    return {
        f"{name}-{number}": text
        for name, texts in pages.items()
        for number, text in enumerate(texts)
        if "instruction" in tomllib.loads(text) and name != "swe"
    }


@pytest.mark.slow
def test_the_tasks_in_the_docs_are_sound(tmp_path: Path) -> None:
    assert {name.partition("-")[0] for name in docs_tasks()} >= {"checks", "tasks", "verification"}
    for name, text in docs_tasks().items():
        (tmp_path / f"{name}.toml").write_text(text)
    ended = rollcage(tmp_path, "audit", *map(str, tmp_path.glob("*.toml")), "--repeat", "1", "--json")
    report = json.loads(ended.stdout)
    assert ended.returncode == 0, [task["findings"] for task in report["tasks"]]
    for task in report["tasks"]:
        assert task["trust"] in ("isolated", "in_process"), task["task_id"]
        earned = {probe["probe"]["name"]: probe["reward"] for probe in task["probes"]}
        assert earned["reference"] == 1, "each has one"
