"""Images of Dockerfiles: built by a real builder where one is installed, and what is said where that fails."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.sandboxes.images import builders
from rollcage.sandboxes.images.builders import ImageBuilder, builder
from rollcage.sandboxes.images.dockerfile import build_dockerfile
from rollcage.sandboxes.local.provider import LocalProvider
from support.commands import rollcage
from support.container_engine import need_base, need_buildah
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


async def test_a_build_that_hangs_is_killed(
    provider: LocalProvider, context: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    pretending(monkeypatch, f"sleep 1000 & echo $! > {pid}; wait")
    with pytest.raises(SandboxError, match="had not built it after 3 s"):
        await build_dockerfile(provider, "x", context, silent, timeout_s=3)
    state = Path(f"/proc/{pid.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] in "ZX"


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
    assert image_builder().detail.endswith("/sh") and not image_builder().remedy
    monkeypatch.setattr(builders, "TOOLS", (ImageBuilder("no-such-builder", (), lambda tag, to: ()),))
    assert "none of no-such-builder" in image_builder().detail and "buildah" in image_builder().remedy


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
async def test_a_real_builder_gives_an_image_that_boxes_use(provider: LocalProvider, tmp_path: Path) -> None:
    need_buildah()
    tool = builder()
    assert tool is not None and tool.name == "buildah"
    from rollcage.sandboxes.base import sh
    from rollcage.types import SandboxSpec

    context = tmp_path / "real"
    context.mkdir()
    # The machine's own shell and what it needs are the base: no registry is asked.
    names = "bash sh env true mkdir rm chmod cat find tar id".split()
    programs = [*(f"/usr/bin/{name}" for name in names), "/bin/sh", "/bin/bash"]
    libraries = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    needed = {word for word in libraries.split() if word.startswith("/") and not word.endswith(":")}
    base = context / "base.tar"
    subprocess.run(["tar", "-chf", base, "-C", "/", *(path[1:] for path in (*programs, *sorted(needed)))], check=True)
    (context / "Dockerfile").write_text(
        "FROM scratch\nADD base.tar /\nENV COLOUR=green\nRUN echo made > /marker\nWORKDIR /app\n"
    )
    try:
        built = await build_dockerfile(provider, "real", context, print, timeout_s=400)
    finally:
        subprocess.run(["buildah", "rmi", "localhost/rollcage/real"], check=False, capture_output=True)
    assert built.new and provider.images.names() == ["real"]
    spec = SandboxSpec(template="real", writable_system=True)
    async with provider.open(spec) as box:
        said = await sh(
            box,
            "mkdir -p /app; cd /app; cat /marker; echo $COLOUR; echo own > /marker; cat /marker; pwd; id -u",
            cwd="/",
        )
    assert said.stdout.text.split() == ["made", "green", "own", "/app", "0"]
