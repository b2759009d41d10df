"""The agent's work comes out as a patch that applies, whatever the agent did to hide or to spoil it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollcage.results.result import result_of
from rollcage.rollout.patch import MAX_PATCH_BYTES, Remembered, patch_of, snapshot_workdir
from rollcage.sandboxes.base import Sandbox, sh
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec, Task
from support.playing import Play

pytestmark = pytest.mark.anyio

WORKDIR = f"{HOME}/workdir"


@pytest.fixture
async def box(state_dir: Path) -> AsyncIterator[Sandbox]:
    async with LocalProvider(state_dir) as provider, provider.open(SandboxSpec(disk_mb=64)) as opened:
        yield opened


async def _do(box: Sandbox, script: str) -> None:
    ran = await sh(box, f"mkdir -p {WORKDIR} && cd {WORKDIR} && {{ {script}\n}}")
    assert ran.code == 0, ran.stderr.text


async def _patch(box: Sandbox, before: str, after: str) -> str:
    await _do(box, before)
    remembered = await snapshot_workdir(box, WORKDIR)
    assert remembered is not None
    await _do(box, after)
    patch = await patch_of(box, WORKDIR, remembered)
    assert patch is not None
    return patch.text


async def test_the_patch_of_a_rollout_turns_what_setup_left_into_what_the_agent_left(
    play: Play, tmp_path: Path
) -> None:
    task = Task(
        instruction="rm gone.txt; sed -i s/two/zwei/ kept.txt; mkdir -p deep; printf 'new\\n' > 'deep/new file.txt'",
        files={"kept.txt": "one\ntwo\nthree\n", "gone.txt": "gone\n"},
        setup=("printf 'by setup\\n' > setup.txt",),
    )
    rollout = await play(task, agent="shell")
    assert rollout.patch is not None and not rollout.patch_truncated
    assert "setup.txt" not in rollout.patch
    here = tmp_path / "here"
    here.mkdir()
    (here / "kept.txt").write_text("one\ntwo\nthree\n")
    (here / "gone.txt").write_text("gone\n")
    subprocess.run(["git", "apply", "-"], input=rollout.patch.encode(), cwd=here, check=True)
    assert (here / "kept.txt").read_text() == "one\nzwei\nthree\n"
    assert not (here / "gone.txt").exists()
    assert (here / "deep/new file.txt").read_text() == "new\n"
    assert result_of(rollout).patch == rollout.patch


@pytest.mark.parametrize("verify_in", ["box", "fresh"])
async def test_an_agent_cannot_change_what_its_work_is_compared_with(play: Play, verify_in: str) -> None:
    spoil = "rm -rf ~/.rollcage/before.git; mkdir -p ~/.rollcage/before.git; echo changed > a.txt"
    task = Task(instruction=spoil, files={"a.txt": "original\n"}, verify_in=verify_in)
    rollout = await play(task, agent="shell")
    assert rollout.patch is not None
    assert "-original" in rollout.patch and "+changed" in rollout.patch


async def test_ignore_rules_and_attributes_in_the_workdir_hide_nothing(box: Sandbox) -> None:
    hide = "printf '*.txt\\n' > .gitignore; printf '*.txt -diff binary\\n' > .gitattributes; echo secret > a.txt"
    patch = await _patch(box, "true", hide)
    assert "+secret" in patch


async def test_a_repository_in_the_workdir_is_left_as_it_is(box: Sandbox) -> None:
    before = "git init -q . && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m first && echo 1 > a"
    patch = await _patch(box, before, "echo 2 > a; git init -q empty; echo 3 > b")
    assert "+2" in patch and "+3" in patch and ".git/" not in patch
    status = await sh(box, "git status --porcelain", cwd=WORKDIR)
    assert status.stdout.text.splitlines() == ["?? a", "?? b", "?? empty/"], "the task's own index was touched"


async def test_binary_files_are_marked_and_links_are_shown_as_links(box: Sandbox) -> None:
    patch = await _patch(box, "true", "printf 'a\\0b' > blob; ln -s /etc/passwd link; mkfifo pipe")
    assert "Binary files /dev/null and b/blob differ" in patch
    assert "new file mode 120000" in patch and "+/etc/passwd" in patch and "root:" not in patch
    assert "pipe" not in patch


async def test_a_full_disk_does_not_spoil_the_patch(box: Sandbox) -> None:
    patch = await _patch(box, "echo 1 > a", "echo 2 > a; head -c 100M /dev/zero > filler || true")
    assert "+2" in patch


async def test_a_very_long_patch_is_cut_at_a_line_and_says_so(box: Sandbox) -> None:
    await _do(box, "true")
    remembered = await snapshot_workdir(box, WORKDIR)
    assert remembered is not None
    await _do(box, "seq 400000 > long.txt")
    patch = await patch_of(box, WORKDIR, remembered)
    assert patch is not None and patch.truncated
    assert len(patch.text) <= MAX_PATCH_BYTES and patch.text.endswith("\n")


async def test_a_workdir_too_large_to_be_kept_twice_is_not_remembered(state_dir: Path) -> None:
    async with LocalProvider(state_dir) as provider, provider.open(SandboxSpec(disk_mb=512)) as box:
        await _do(box, "head -c 140M /dev/zero > large")
        assert await snapshot_workdir(box, WORKDIR) is None
        assert await patch_of(box, WORKDIR, Remembered()) is None


async def test_files_that_are_not_collected_come_with_the_reason(play: Play) -> None:
    make = (
        "head -c 300000 /dev/zero | tr '\\0' x > large.txt; printf '\\0\\1' > blob; ln -s /etc/passwd link; mkfifo pipe"
    )
    rollout = await play(Task(instruction=make), agent="shell")
    assert rollout.files_why == {
        "blob": "binary",
        "large.txt": "too large (300000 bytes)",
        "link": "symlink",
        "pipe": "pipe",
    }
    assert result_of(rollout).files_extra == [f"{WORKDIR}/{name}" for name in sorted(rollout.files_why)]
