"""`rollcage demo`: what a new user runs first, from any folder, with an agent that is not there yet."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollcage.results.result import RolloutResult
from rollcage.settings import Settings
from support.commands import environ, rollcage


def fetched_before(home: Path) -> None:
    """Put the package, which this machine has, where the command looks for it."""
    cache = home / "state" / "cache"
    cache.mkdir(parents=True)
    kept = Settings.from_environ(os.environ).cache_dir
    for package in kept.glob("*.tgz") if kept.is_dir() else ():
        shutil.copy(package, cache)


def without_npm(folder: Path) -> str:
    """A PATH that has everything this machine has but npm."""
    folder.mkdir()
    for place in os.environ["PATH"].split(":"):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            link = folder / program.name
            if program.name != "npm" and not link.is_symlink():
                link.symlink_to(program)
    return str(folder)


def registry() -> str:
    """The registry that this machine's npm is set to."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("only npm knows the registry of this machine")
    asked = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, check=True)
    return asked.stdout.strip()


def test_the_example_runs_in_any_folder_and_preparing_the_agent_is_told(tmp_path: Path) -> None:
    fetched_before(tmp_path)
    ended = rollcage(tmp_path, "demo", "--json")
    result = RolloutResult.model_validate_json(ended.stdout)
    assert (ended.returncode, result.task_id, result.reward) == (0, "paginate", 1.0), result.error
    system, _, prepared = ended.stderr.partition("\n")
    assert system == "demo: in the system of this machine; rollcage setup --base makes one of its own"
    assert re.fullmatch(
        r"setup: preparing opencode-\S+ \(once\)\n(setup: .*\n)*setup: opencode-\S+ is ready .*\n", prepared
    )


def test_without_npm_and_without_a_registry_it_says_what_to_do(tmp_path: Path) -> None:
    ended = rollcage(tmp_path, "demo", env={"PATH": without_npm(tmp_path / "bin")})
    assert ended.returncode == 3
    assert "apt-get install npm" in ended.stderr and "NPM_CONFIG_REGISTRY" in ended.stderr


def test_a_registry_that_does_not_answer_is_named(tmp_path: Path) -> None:
    env = {"PATH": without_npm(tmp_path / "bin"), "NPM_CONFIG_REGISTRY": "http://127.0.0.1:1/"}
    ended = rollcage(tmp_path, "setup", env=env)
    assert ended.returncode == 3 and "from 127.0.0.1" in ended.stderr, ended.stderr
    assert [path.name for path in (tmp_path / "state" / "cache").iterdir()] == []


@pytest.mark.slow
@pytest.mark.parametrize("by", ["variable", "file"])
def test_without_npm_it_is_fetched_from_the_registry_that_is_set(tmp_path: Path, by: str) -> None:
    """Really fetches it: tens of megabytes, checked against the pinned hash; lines tell how far it is."""
    env = {"PATH": without_npm(tmp_path / "bin")} | {
        name: value for name, value in os.environ.items() if name.startswith("SSL_CERT") or name.endswith("_proxy")
    }
    if by == "variable":
        env["NPM_CONFIG_REGISTRY"] = registry()
    else:
        (tmp_path / ".npmrc").write_text(f"fund=false\nregistry = {registry()}\n")
    ended = rollcage(tmp_path, "setup", "--json", env=env)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)["built"]) == 1
    assert rollcage(tmp_path, "setup", "--check", env=env).returncode == 0


def test_on_a_terminal_progress_is_one_line_that_is_cleared(tmp_path: Path) -> None:
    fetched_before(tmp_path)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rollcage", "setup"]
    with subprocess.Popen(command, env=environ(tmp_path), cwd=tmp_path, stderr=theirs) as process:
        os.close(theirs)
        said = b""
        try:
            while chunk := os.read(ours, 4096):
                said += chunk
        except OSError:  # how a terminal says that nobody is left to write to it
            pass
        assert process.wait(timeout=120) == 0
    os.close(ours)
    assert b"\r\x1b[K" in said and b"is ready" in said
