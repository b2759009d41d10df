"""What is published: the two distributions, what each brings, and the rules by which the build server judges."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from rollcage.cli import rollcage
from rollcage.gateway import usual
from support.paths import ROOT, SCRIPTS

BOTH = (ROOT, ROOT / "src" / "opencode_env")


def project(folder: Path) -> dict[str, Any]:
    """What its pyproject.toml says about the project."""
    said: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return said


def wheel(folder: Path, into: Path) -> zipfile.ZipFile:
    """The wheel that is built from it, with the build backend that is installed."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return zipfile.ZipFile(next(into.glob("*.whl")))


def test_the_two_distributions_have_one_version_and_the_second_needs_the_first() -> None:
    ours, names = (project(folder) for folder in BOTH)
    assert ours["version"] == names["version"]
    assert names["dependencies"] == [f"rollcage[openenv]=={ours['version']}"]


@pytest.mark.parametrize("folder", BOTH, ids=["rollcage", "opencode_env"])
def test_whoever_looks_at_a_distribution_finds_what_they_need_to_know(folder: Path) -> None:
    said = project(folder)
    assert said["authors"] == [{"name": "rollcage"}] and "urls" not in said
    assert said["license"] == "Apache-2.0" and "Version 2.0, January 2004" in (folder / "LICENSE").read_text()
    assert said["keywords"] and "Typing :: Typed" in said["classifiers"]
    assert (folder / said["readme"]).is_file()


def test_only_the_extra_openenv_brings_openenv() -> None:
    said = project(ROOT)
    extras = {name: " ".join(needs) for name, needs in said["optional-dependencies"].items()}
    heavy = re.compile(r"\bopenenv\b|gradio|pandas")
    assert [name for name, needs in extras.items() if heavy.search(needs)] == ["openenv", "dev"]
    assert not heavy.search(" ".join(said["dependencies"]))


def test_a_wheel_of_rollcage_brings_the_examples_and_no_other_package(tmp_path: Path) -> None:
    with wheel(ROOT, tmp_path) as built:
        names = built.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rollcage"}
    assert {"rollcage/py.typed", "rollcage/examples/paginate.toml", "rollcage/server/web/index.html"} <= set(names)
    compiled, wheels = "rollcage/gateway/_wire.abi3.so" in names, next(tmp_path.glob("*.whl")).name
    assert ("-abi3-" if compiled else "-none-any") in wheels and compiled is usual.compiled
    there = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src/rollcage/examples").rglob("*.*")}
    assert {name for name in there if "__pycache__" not in name} <= set(names)


def test_a_wheel_of_opencode_env_brings_that_package_and_no_other(tmp_path: Path) -> None:
    with wheel(ROOT / "src" / "opencode_env", tmp_path) as built:
        names = built.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"opencode_env"}
    assert {"opencode_env/py.typed", "opencode_env/server/app.py", "opencode_env/sandbox/base.py"} <= set(names)


def test_help_of_make_names_every_target() -> None:
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert declared
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"^make ([\w-]+)", shown, re.MULTILINE)) == set(declared[1].split())


def test_every_test_of_make_quick_is_there() -> None:
    names = (ROOT / "tests" / "quick.txt").read_text().split()
    assert names and all((ROOT / name).exists() for name in names), names


def test_every_command_of_the_readme_is_one_of_ours() -> None:
    said = set(re.findall(r"`rollcage ([a-z]+)", (ROOT / "README.md").read_text()))
    said |= set(re.findall(r"^\$ rollcage ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert said and said <= set(rollcage.commands), said - set(rollcage.commands)


SUITE = """
from pathlib import Path
import pytest

def once(name):
    "Fails when it is run for the first time, and passes from then on."
    mark = Path(__file__).with_name(name)
    if not mark.exists():
        mark.touch()
        raise AssertionError(name)

def test_sound(): pass

@pytest.mark.parametrize("n", range({flaky}))
def test_flaky(n): once(f"flaky {{n}}")

@pytest.mark.parametrize("n", range({broken}))
def test_broken(n): assert False
"""


def judged(folder: Path, *, flaky: int, broken: int) -> tuple[int, list[str]]:
    """What the build server's script makes of such a suite: its exit code, and its last words."""
    (folder / "test_it.py").write_text(SUITE.format(flaky=flaky, broken=broken))
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, str(SCRIPTS / "run_tests.py"), "-q", "-p", "no:cacheprovider", "test_it.py"]
    # The plugins of our own suite would only take time.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    words = ("flaky: ", "failed twice: ", "red: ")
    return ran.returncode, [line for line in ran.stdout.splitlines() if line.startswith(words)]


def test_a_sound_suite_is_green_and_nothing_is_said_about_it(tmp_path: Path) -> None:
    assert judged(tmp_path, flaky=0, broken=0) == (0, [])


def test_up_to_three_flaky_tests_are_named_and_green(tmp_path: Path) -> None:
    code, said = judged(tmp_path, flaky=3, broken=0)
    assert code == 0
    assert [line.split(" failed, ")[0] for line in said] == [f"flaky: test_it.py::test_flaky[{n}]" for n in range(3)]


def test_more_than_three_flaky_tests_are_red(tmp_path: Path) -> None:
    code, said = judged(tmp_path, flaky=4, broken=0)
    assert code == 1 and len(said) == 5 and said[-1].startswith("red: 4 ")


def test_a_test_that_fails_twice_is_red_and_told_apart_from_a_flaky_one(tmp_path: Path) -> None:
    code, said = judged(tmp_path, flaky=1, broken=1)
    assert code == 1
    assert said[0] == "failed twice: test_it.py::test_broken[0]" and said[1].startswith(
        "flaky: test_it.py::test_flaky[0]"
    )


def test_a_suite_that_cannot_be_collected_is_red(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("raise RuntimeError")
    assert judged(tmp_path, flaky=0, broken=0)[0] not in (0, 1)


def test_the_build_server_runs_make_test() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    assert "run: make test" in (ROOT / ".github" / "workflows" / "test.yml").read_text()
    assert shutil.which("make")
