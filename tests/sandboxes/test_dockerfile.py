"""Images of Dockerfiles: built by a real builder where one is installed, and what is said where that fails."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.sandboxes.images import builders
from rollcage.sandboxes.images.builders import ImageBuilder, builder
from rollcage.sandboxes.images.dockerfile import build_dockerfile
from rollcage.sandboxes.local.provider import LocalProvider
from support.commands import rollcage
from support.container_engine import need_base, need_buildah, need_lent_ids
from support.paths import ROOT

pytestmark = pytest.mark.anyio


def silent(line: str) -> None:
    pass


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[LocalProvider]:
    tmp_path.chmod(0o755)
    boxes = LocalProvider(tmp_path / "state")
    yield boxes
    boxes.close()


@pytest.fixture
def context(tmp_path: Path) -> Path:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text("FROM scratch\nCOPY missing /\n")
    return tmp_path / "context"


def pretending(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = ImageBuilder("sh", ("-c", script), lambda tag, to: ("-c", f": > {to}"))
    monkeypatch.setattr(builders, "TOOLS", (tool,))


async def test_a_build_that_fails_shows_its_last_lines(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretending(monkeypatch, "echo step 1; echo no such package >&2; exit 7")
    with pytest.raises(SandboxError, match=r"Dockerfile: cannot be built .*ended with 7.*\n(.*\n)*no such package"):
        await build_dockerfile(provider, "x", context, silent)
    assert not provider.images.names() and not list(provider.layers.folder.parent.glob(".build-*"))


async def test_a_build_that_fails_names_the_line_that_it_was_at(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (context / "Dockerfile").write_text(
        "FROM scratch\n\nRUN apt-get update && \\\n  apt-get install -y none\nWORKDIR /app\n"
    )
    pretending(
        monkeypatch, "echo 'STEP 1/3: FROM scratch'; echo 'STEP 2/3: RUN apt-get update &&   apt-get install'; exit 1"
    )
    with pytest.raises(SandboxError, match=r"Dockerfile:3: cannot be built"):
        await build_dockerfile(provider, "x", context, silent)
    assert list(provider.images.builds.iterdir()) == [], "nothing is left of it"


async def test_an_image_that_boxes_cannot_be_made_of_names_its_dockerfile(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretending(monkeypatch, "true")
    with pytest.raises(SandboxError, match="Dockerfile: boxes cannot be made of its image"):
        await build_dockerfile(provider, "x", context, silent)
    assert not provider.images.names() and list(provider.images.builds.iterdir()) == []


async def test_a_line_that_a_builder_cannot_read_is_named(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretending(
        monkeypatch, "echo 'STEP 1/2: FROM scratch'; echo 'Error: x {Value:copy StartLine:2 EndLine:2}: y'; exit 1"
    )
    with pytest.raises(SandboxError, match=r"Dockerfile:2: cannot be built"):
        await build_dockerfile(provider, "x", context, silent)


async def test_a_build_that_hangs_is_killed(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    pretending(monkeypatch, f"sleep 1000 & echo $! > {pid}; echo 'STEP 2/2: COPY missing /'; wait")
    with pytest.raises(SandboxError, match="Dockerfile:2: sh had not built it after 3 s"):
        await build_dockerfile(provider, "x", context, silent, timeout_s=3)
    assert is_gone(pid)


async def test_what_a_build_left_running_is_killed_and_its_long_lines_are_cut(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    pretending(
        monkeypatch, f"sleep 1000 >/dev/null 2>&1 & echo $! > {pid}; head -c 5000 /dev/zero | tr '\\0' x; echo; exit 1"
    )
    with pytest.raises(SandboxError) as failed:
        await build_dockerfile(provider, "x", context, silent)
    assert len(str(failed.value)) < 1000
    assert is_gone(pid)


def is_gone(pid: Path) -> bool:
    """Whether the process has ended: what was killed may take a moment."""
    try:
        handle = os.pidfd_open(int(pid.read_text()))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 30)[0])
    finally:
        os.close(handle)


async def test_what_cannot_begin_is_said(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builders, "TOOLS", (ImageBuilder("no-such-builder", (), lambda tag, to: ()),))
    with pytest.raises(SetupError, match="no-such-builder"):
        await build_dockerfile(provider, "x", context, silent)
    with pytest.raises(UsageError, match="no Dockerfile"):
        await build_dockerfile(provider, "x", context.parent, silent)


def test_doctor_names_the_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollcage.cli.findings import image_builder

    monkeypatch.setattr(builders, "TOOLS", (ImageBuilder("sh", (), lambda tag, to: ()),))
    assert re.search(r"/sh(, rootless)?$", image_builder().detail) and not image_builder().remedy
    monkeypatch.setattr(builders, "TOOLS", (ImageBuilder("no-such-builder", (), lambda tag, to: ()),))
    assert "no-such-builder: is not installed" in image_builder().detail and "buildah" in image_builder().remedy


def test_the_first_builder_that_works_is_taken_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A docker without its daemon is installed, and of no use."""
    from rollcage.cli.findings import image_builder

    broken = ImageBuilder("sh", (), lambda tag, to: (), ("-c", "echo no daemon answers >&2; exit 1"))
    works = ImageBuilder("env", (), lambda tag, to: (), ("true",))
    monkeypatch.setattr(builders, "TOOLS", (broken, works))
    assert builder().name == "env" and "sh: no daemon answers" in image_builder().detail
    monkeypatch.setattr(builders, "TOOLS", (broken,))
    with pytest.raises(SetupError, match=r"no builder of images works here \(sh: no daemon answers"):
        builder()


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's builder is asked for the ids that it is lent, too")
def test_of_many_tasks_one_whose_image_cannot_be_built_keeps_no_other_from_running(tmp_path: Path) -> None:
    """Two of three have a Dockerfile, and both fail; the third needs none."""
    tmp_path.chmod(0o755)
    folders = ROOT / "tests/data/harbor"
    for name in ("a", "b"):
        shutil.copytree(folders / "dockerfile", tmp_path / "set" / name)
        (tmp_path / "set" / name / "environment/note.txt").write_text(name)
    shutil.copytree(folders / "greeting", tmp_path / "set" / "c")
    builder = tmp_path / "bin" / "buildah"
    builder.parent.mkdir()
    builder.write_text('#!/bin/sh\n[ "$1" = bud ] || exit 0\necho no such base >&2\nexit 7\n')
    builder.chmod(0o755)
    env = {"PATH": f"{builder.parent}:{os.environ['PATH']}", "ROLLCAGE_SYSTEM": "host"}
    ended = rollcage(tmp_path, "eval", str(tmp_path / "set"), "--build", "--agent", "oracle", "--json", env=env)
    overall = json.loads(ended.stdout.splitlines()[-1])["overall"]
    assert (overall["done"], overall["mean"]) == (1, 1), ended.stderr
    for name in ("a", "b"):
        assert f"set/{name}/environment/Dockerfile: cannot be built" in ended.stderr
    alone = rollcage(tmp_path, "run", str(tmp_path / "set" / "a"), "--build", "--agent", "nop", env=env)
    assert alone.returncode == 3 and "no such base" in alone.stderr


@pytest.mark.slow
def test_a_task_s_image_is_built_with_apt_on_a_base_of_debian_s_packages(tmp_path: Path) -> None:
    """Two tasks on one base, by `run --build`, and their layers are shared."""
    tmp_path.chmod(0o755)
    need_base(tmp_path, "rollcage-test-base")
    tags: list[str] = []
    try:
        for name, more in (("plain", ""), ("apt", "RUN apt-get update && apt-get install -y figlet && figlet hi\n")):
            folder = Path(shutil.copytree(ROOT / "tests/data/harbor/dockerfile", tmp_path / name))
            with (folder / "environment/Dockerfile").open("a") as file:
                file.write(more)
            for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
                ended = rollcage(tmp_path, "run", str(folder), "--build", "--agent", agent, "--json")
                assert json.loads(ended.stdout)["reward"] == reward, ended.stderr[-2000:]
        images = json.loads(rollcage(tmp_path, "image", "ls", "--json").stdout)
        tags = [f"localhost/rollcage/{image['name']}" for image in images]
        assert [image["shared_bytes"] > 10 * image["own_bytes"] for image in images].count(True) >= 1
        assert len({image["shared_bytes"] for image in images}) == 1 and len(images) == 2
    except subprocess.TimeoutExpired:
        pytest.skip("this machine is too busy to build two images")
    finally:
        subprocess.run(["buildah", "rmi", "--force", "rollcage-test-base", *tags], check=False, capture_output=True)


@pytest.mark.slow
def test_a_verifier_that_installs_things_needs_no_network_once_its_image_is_built(tmp_path: Path) -> None:
    """The commonest script there is: apt, the installer of uv, and a tool that uvx runs."""
    tmp_path.chmod(0o755)
    tag = "rollcage-test-python"
    need_base(tmp_path, tag, more=",python3-pip,python3-venv")
    folder = Path(shutil.copytree(ROOT / "tests/data/harbor/dockerfile", tmp_path / "task"))
    (folder / "environment/Dockerfile").write_text(f"FROM localhost/{tag}\nWORKDIR /app\n")
    (folder / "tests/test.sh").write_text(INSTALLING)
    (folder / "tests/test_it.py").write_text('def test_it():\n    assert open("/app/it").read() == "it\\n"\n')
    (folder / "solution/solve.sh").write_text("echo it > /app/it\n")
    try:
        built = rollcage(tmp_path, "image", "build", str(folder))
        assert built.returncode == 0 and "not installed beforehand" not in built.stderr, built.stderr[-3000:]
        for agent, reward in (("oracle", 1.0), ("nop", 0.0)):
            ended = rollcage(tmp_path, "run", str(folder), "--agent", agent, "--json")
            assert "may want a network" not in ended.stderr
            assert json.loads(ended.stdout)["reward"] == reward, ended.stdout[-3000:]
    except subprocess.TimeoutExpired:
        pytest.skip("this machine is too busy to build an image")
    finally:
        tags = [f"localhost/rollcage/{image}" for image in LocalProvider(tmp_path / "state").images.names()]
        subprocess.run(["buildah", "rmi", "--force", tag, *tags], check=False, capture_output=True)


INSTALLING = """#!/bin/bash
apt-get update
apt-get install -y figlet
curl -LsSf https://astral.sh/uv/install.sh | sh
source $HOME/.local/bin/env
python3 -m venv /tmp/own && /tmp/own/bin/pip install attrs && /tmp/own/bin/python -c 'import attr' || exit 1
uvx -w pytest==8.4.1 pytest /tests/test_it.py
if [ $? -eq 0 ] && figlet hi > /dev/null; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.mark.slow
@pytest.mark.parametrize("lent", ["ids are lent to it", "no ids are lent to it"])
def test_an_ordinary_user_builds_and_runs_a_task_where_ids_are_lent_to_it(lent: str) -> None:
    need_lent_ids()
    ordinary = 61236
    # Not in pytest's own folder: other users may not enter that. This machine's own lists of users stay as they are.
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        folder = Path(shutil.copytree(ROOT / "tests/data/harbor/dockerfile", home / "task"))
        machine_base(folder / "environment/base.tar", "chown")
        (folder / "environment/Dockerfile").write_text(
            "FROM scratch\nADD base.tar /\nWORKDIR /app\nRUN echo made > /app/made && chown 33:33 /app/made\n"
        )
        (folder / "solution/solve.sh").write_text("cat made > /app/solved\n")
        (folder / "tests/test.sh").write_text(
            "#!/bin/bash\nif [ -s /app/solved ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
        )
        (home / "passwd").write_text(f"root:x:0:0::/root:/bin/sh\nbuilder:x:{ordinary}:{ordinary}::{home}:/bin/sh\n")
        (home / "ids").write_text("builder:700000:65536\n" if lent.startswith("ids") else "")
        subprocess.run(["chown", "-R", f"{ordinary}:{ordinary}", home], check=True)
        lists = {"passwd": "passwd", "subuid": "ids", "subgid": "ids"}
        mount = "; ".join(f"mount --bind {home}/{mine} /etc/{theirs}" for theirs, mine in lists.items())
        user = f"setpriv --reuid {ordinary} --regid {ordinary} --clear-groups"
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "ROLLCAGE_HOME": f"{home}/state"}

        def played(*arguments: str) -> subprocess.CompletedProcess[str]:
            script = f'{mount}; cd {home}; exec {user} "$@"'
            command = ["unshare", "-m", "bash", "-ec", script, "bash", *arguments]
            return subprocess.run(command, env={**env, "HOME": name}, capture_output=True, text=True, timeout=400)

        # The interpreter of these tests may lie where only root may go.
        probe = "import os, sys, rollcage.cli, rollcage.store; sys.exit(not os.access(sys.executable, os.X_OK))"
        pythons = (str(Path(sys.executable).resolve()), "/usr/bin/python3")
        python = next((each for each in pythons if played(each, "-c", probe).returncode == 0), "")
        if not python:
            pytest.skip("another user can run no Python that has what rollcage needs")
        ended = played(python, "-m", "rollcage", "run", str(folder), "--build", "--agent", "oracle", "--json")
        if lent.startswith("ids"):
            assert json.loads(ended.stdout).get("reward") == 1, ended.stderr[-2000:] + ended.stdout[-2000:]
            played("buildah", "rmi", "--all", "--force")
        else:
            assert ended.returncode != 0 and "no ids are lent to the user builder" in ended.stderr, ended.stderr
            assert "usermod --add-subuids" in ended.stderr
        assert not list((home / "state" / "builds").glob("*"))


def machine_base(archive: Path, *more: str) -> None:
    """The machine's own shell and what it needs: a base for which no registry is asked."""
    names = ("bash sh env true mkdir rm chmod cat find tar id".split(), more)
    programs = [*(f"/usr/bin/{name}" for group in names for name in group), "/bin/sh", "/bin/bash"]
    libraries = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    needed = {word for word in libraries.split() if word.startswith("/") and not word.endswith(":")}
    paths = (path[1:] for path in (*programs, *sorted(needed)))
    subprocess.run(["tar", "-chf", archive, "-C", "/", *paths], check=True)


@pytest.mark.slow
async def test_a_real_builder_gives_an_image_that_boxes_use(provider: LocalProvider, tmp_path: Path) -> None:
    need_buildah()
    tool = builder()
    assert tool is not None and tool.name == "buildah"
    from rollcage.sandboxes.base import sh
    from rollcage.types import SandboxSpec

    context = tmp_path / "real"
    context.mkdir()
    machine_base(context / "base.tar")
    (context / "Dockerfile").write_text(
        "FROM scratch\nADD base.tar /\nENV COLOUR=green\nRUN echo made > /marker\nWORKDIR /app\n"
    )
    try:
        built = await build_dockerfile(provider, "real", context, print, timeout_s=400)
    finally:
        subprocess.run(["buildah", "rmi", "localhost/rollcage/real"], check=False, capture_output=True)
    assert built.new and provider.images.names() == ["real"] and built.image.source == f"Dockerfile of {context}"
    spec = SandboxSpec(template="real", writable_system=True)
    async with provider.open(spec) as box:
        said = await sh(
            box,
            "mkdir -p /app; cd /app; cat /marker; echo $COLOUR; echo own > /marker; cat /marker; pwd; id -u",
            cwd="/",
        )
    assert said.stdout.text.split() == ["made", "green", "own", "/app", "0"]
