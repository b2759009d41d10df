"""The MCP plane against servers of `mcp` 2.x, which cannot be installed beside OpenEnv: in a venv of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.paths import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tools_work_with_mcp_two(tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["fleet"], "fastmcp>=4", "mcp>=2"]
    tools = ["hypothesis", "jsonschema", "pytest", "pytest-timeout"]
    pip = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *wanted, *tools], capture_output=True, text=True
    )
    assert pip.returncode == 0, pip.stderr[-2000:]
    versions = "import importlib.metadata as m; print(m.version('mcp'), m.version('fastmcp'))"
    found = subprocess.run([str(python), "-c", versions], capture_output=True, text=True, check=True).stdout
    assert found.startswith("2.")
    rooms = ("environments/test_fleet_tools.py", "environments/test_fleet_values.py", "mcp")
    files = [str(ROOT / "tests" / name) for name in rooms]
    tests = subprocess.run(
        [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), *files],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert tests.returncode == 0, tests.stdout[-4000:]
