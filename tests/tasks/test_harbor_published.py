"""Our tasks in Harbor's format, read by the published `harbor` package and by us: they say the same to both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollcage.errors import TaskError
from rollcage.tasks import load
from rollcage.types import Limits
from support.paths import ROOT

pytestmark = pytest.mark.slow

FOLDERS = ROOT / "tests" / "data" / "harbor"
THEIRS = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from harbor.models.task.config import TaskConfig
found = {}
for folder in sorted(Path(sys.argv[2]).iterdir()):
    if (folder / "task.toml").is_file():
        found[folder.name] = TaskConfig.model_validate_toml((folder / "task.toml").read_text()).model_dump(mode="json")
print(json.dumps(found))
"""


def test_the_published_package_reads_our_tasks_as_we_do(tmp_path: Path) -> None:
    # Into a folder of its own, without what it depends on: reading a task needs none of that.
    get = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path / "lib")]
    get += ["--ignore-requires-python"]
    done = subprocess.run([*get, "harbor==0.24.0", "toml"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"harbor cannot be installed: {done.stderr.strip()[-200:]}")
    run = [sys.executable, "-c", THEIRS, str(tmp_path / "lib"), str(FOLDERS)]
    theirs = json.loads(subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout)
    assert len(theirs) >= 15
    compared = 0
    for name, config in theirs.items():
        try:
            file = load(FOLDERS / name)
        except TaskError:
            continue  # what we refuse by name; it is read all the same
        task, environment = file.task, config["environment"]
        compared += 1
        if not task.steps:
            assert task.limits.agent_timeout_s == (config["agent"]["timeout_sec"] or Limits().agent_timeout_s), name
            assert task.limits.verify_timeout_s == config["verifier"]["timeout_sec"], name
            assert task.verify_user == str(config["verifier"]["user"] or ""), name
            assert task.agent_user == str(config["agent"]["user"] or ""), name
        assert file.sandbox.env.keys() == environment["env"].keys(), name
        assert file.sandbox.cpus == environment["cpus"], name
        assert [step.name for step in task.steps] == [step["name"] for step in config["steps"] or ()], name
        assert [server.name for server in task.mcp_servers] == [each["name"] for each in environment["mcp_servers"]], (
            name
        )
        assert any("healthcheck" in each for each in task.setup) == bool(environment["healthcheck"]), name
        if config["verifier"]["environment_mode"] == "separate":
            assert task.verifier_box or all(step.task.verifier_box for step in task.steps), name
    assert compared >= 12
