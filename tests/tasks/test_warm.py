"""What of a verifier's script is run where its task's image is built, and that nothing of its tests is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from rollcage.tasks import load
from rollcage.tasks.warm import script_of, steps_of
from support.paths import ROOT

GREETING = ROOT / "tests" / "data" / "harbor" / "greeting"


def found(tmp_path: Path, text: str) -> list[str]:
    script = tmp_path / "test.sh"
    script.write_text(text)
    return [command for step in steps_of(script) for command in step.commands]


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        ("apt-get update && apt-get install -y curl git", ["apt-get update", "apt-get install -y curl git"]),
        ("sudo apt-get -y install jq > /dev/null 2>&1", ["apt-get -y install jq"]),
        ("DEBIAN_FRONTEND=noninteractive apt install -y jq", ["DEBIAN_FRONTEND=noninteractive apt install -y jq"]),
        ("uvx -p 3.13 -w pytest==8.4.1 pytest /tests/x.py -rA", ["uvx -p 3.13 -w pytest==8.4.1 pytest --version"]),
        ("uvx --with a --from=b tool --secret \\\n  /tests/x", ["uvx --with a --from=b tool --version"]),
        ("uv run --with numpy /tests/grade.py", ["uv run --with numpy python -c pass"]),
        ("uv run pytest $TEST_DIR/test_outputs.py", ["uv run pytest --version"]),
        ("uv init; uv add pytest==8.4.1", ["uv init", "uv add pytest==8.4.1"]),
        ("npm i -g 'left-pad@1'", ["npm i -g 'left-pad@1'"]),
        ("source $HOME/.local/bin/env", ["source $HOME/.local/bin/env"]),
        ("cd /app && pytest /tests && echo 1 > /logs/verifier/reward.txt", []),
        ("pip install -r /tests/requirements.txt", []),
        ("pip install $(cat /tests/wanted)", []),
        ("npm install", []),
        ("curl https://files.example/answer.json -o /tests/answer.json", []),
        ("cat /tests/answer | python3 /tests/grade.py", []),
        ("echo 'pip install x", []),
    ],
)
def test_only_what_installs_is_taken_of_a_line(tmp_path: Path, line: str, commands: list[str]) -> None:
    assert found(tmp_path, f"#!/bin/bash\n# pip install nothing\n{line}\n") == commands


def test_wheels_are_kept_for_environments_that_the_verifier_makes(tmp_path: Path) -> None:
    assert found(tmp_path, "python3 -m venv /v && /v/bin/pip install -q 'attrs>=23'\n") == [
        "python3 -m venv /v",
        "/v/bin/pip install -q 'attrs>=23'",
        "/v/bin/pip download -q -d /opt/rollcage/wheels 'attrs>=23'",
    ]


def test_scripts_that_it_reads_from_beside_it_are_read_too_and_not_for_ever(tmp_path: Path) -> None:
    (tmp_path / "ready.sh").write_text("pip install attrs\nsource $TEST_DIR/ready.sh\n")
    assert found(tmp_path, "source $TEST_DIR/ready.sh\nbash /tests/ready.sh\n").count("pip install attrs") == 2
    assert found(tmp_path, "bash /tests/../../etc/x.sh\nbash /tests/missing.sh\n") == []


def test_a_script_that_installs_nothing_is_none_and_a_line_that_fails_ends_nothing(tmp_path: Path) -> None:
    script = tmp_path / "test.sh"
    script.write_text("export A=1\npytest /tests\n")
    assert script_of(list(steps_of(script))) == ""
    script.write_text("export MARK=it\n/no/such/pip install 'x y'; npm i -g a\n")
    made = script_of(list(steps_of(script))).replace("/opt/rollcage", str(tmp_path))
    (tmp_path / "npm").write_text(f"#!/bin/sh\necho $MARK $* > {tmp_path}/ran\n")
    (tmp_path / "npm").chmod(0o755)
    # Its tail writes to this machine's /etc/apt: only the steps are tried.
    tried = subprocess.run(
        ["bash", "-c", made.partition("[ ! -d /etc/apt ]")[0]],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "ran").read_text() == "it i -g a\n"
    assert set(tried.stdout.splitlines()) == {"not installed beforehand: what test.sh:2 says"}


def test_what_is_installed_is_part_of_the_image_s_name_and_needs_no_notice(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GREETING, tmp_path / "task"))
    (folder / "environment").mkdir()
    (folder / "environment" / "Dockerfile").write_text("FROM debian:bookworm\n")
    plain = load(folder).sandbox.template
    script = folder / "tests" / "test.sh"
    script.write_text("#!/bin/bash\npip install attrs\nwget https://files.example/x\n")
    told = "\n".join(load(folder).notices)
    assert "test.sh:3: `wget` may want a network" in told and "test.sh:2" not in told
    warmed = load(folder).sandbox.template
    script.write_text("#!/bin/bash\npip install attrs\npytest /tests\n")
    assert not any("test.sh:" in notice for notice in load(folder).notices)
    assert load(folder).sandbox.template == warmed != plain, "the tests themselves are no part of the image"
    script.write_text("#!/bin/bash\npip install attrs==24.1.0\n")
    assert load(folder).sandbox.template != warmed
