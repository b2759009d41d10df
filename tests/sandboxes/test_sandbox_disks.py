"""Homes on a disk of the host, for kernels whose memory disks will not do: the same box, and nothing stays behind."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.conformance.sandboxes import CHECKS, judge
from rollcage.events import Event
from rollcage.rollout.verify import NOTHING, _second_box
from rollcage.sandboxes.base import Sandbox, sh
from rollcage.sandboxes.layers import BOX_UIDS
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.disks import FOLDER
from rollcage.sandboxes.local.inside import home
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, Endpoint, Job, SandboxSpec, Task
from support.boxes import ROOT, living, python

QUICK = "rewind.keeps rewind.again rewind.links layers.changes lifecycle.cancelled_opening lifecycle.lost".split()
DEEP = """
import os
os.chdir("/home/user")
for _ in range(1100):
    os.mkdir("d" * 10)
    os.chdir("d" * 10)
open("hidden", "w").write("x")
"""


def _disks(state: Path) -> list[Path]:
    """The folders that boxes of this state folder write to, or have left."""
    return list((state / "layers" / FOLDER).glob("*/*"))


@asynccontextmanager
async def _on_disk(state: Path, **limits: Any) -> AsyncIterator[LocalBox]:
    async with LocalProvider(state, on_disk=True) as provider, provider.open(SandboxSpec(**limits)) as box:
        yield box


@pytest.mark.parametrize(
    "name", [one.name if one.name in QUICK else pytest.param(one.name, marks=pytest.mark.slow) for one in CHECKS]
)
async def test_it_holds_what_every_box_must_and_says_what_it_does_not(tmp_path: Path, name: str) -> None:
    [one] = [one for one in CHECKS if one.name == name]
    async with LocalProvider(tmp_path, on_disk=True) as provider:
        verdict = await judge(one, provider)
    # Who kills the fork server leaves a folder to the next who starts.
    assert _disks(tmp_path) == [] or name == "lifecycle.lost"
    beyond_us = ["limits.disk"] + ([] if ROOT else ["limits.memory_together", "limits.cpus"])
    assert verdict.outcome == "passed" or (verdict.outcome == "not_applicable" and name in beyond_us), verdict.detail


async def test_what_a_box_writes_lies_below_the_state_folder_until_the_box_is_closed(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path, on_disk=True) as provider:
        async with provider.open(SandboxSpec(disk_mb=64)) as box:
            await box.write(f"{HOME}/file", b"x" * 1000)
            [folder] = _disks(tmp_path)
            assert (folder.name, (folder / "disk/0/u/file").read_bytes()) == (box.id, b"x" * 1000)
            # Nobody else on the host may look into it, and it is not root's.
            found = folder.stat()
            assert found.st_mode & 0o777 == 0o700 and found.st_uid in (BOX_UIDS if ROOT else [os.geteuid()])
            assert any(note.startswith("disk: 64 MB is held by looking") for note in box.notes)
        assert _disks(tmp_path) == []
    assert list((tmp_path / "layers" / FOLDER).iterdir()) == []


async def test_nothing_stays_of_folders_that_are_closed_or_too_deep_to_be_named(tmp_path: Path) -> None:
    async with _on_disk(tmp_path) as box:
        close = "mkdir -p ~/closed/below; touch ~/closed/below/file; chmod 000 ~/closed/below/* ~/closed/below ~/closed"
        assert (await sh(box, close)).code == 0
        await box.checkpoint()
        assert (await sh(box, "chmod 755 ~/closed; touch ~/closed/file; chmod 000 ~/closed")).code == 0
        # Further than a path can reach.
        assert (await python(box, DEEP)).code == 0
    assert _disks(tmp_path) == []


async def test_a_memory_disk_is_what_boxes_have_where_it_will_do(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider, provider.open(SandboxSpec()) as box:
        assert not any(note.startswith("disk") for note in box.notes)
        assert not (tmp_path / "layers" / FOLDER).exists()


async def test_who_writes_too_much_is_killed_and_the_box_goes_on(tmp_path: Path) -> None:
    async with _on_disk(tmp_path, disk_mb=10) as box:
        ran = await sh(box, "head -c 20M /dev/zero > ~/large; sleep 1000", timeout_s=100)
        assert (ran.code, ran.timed_out) == (137, False)
        await box.write(f"{HOME}/large", b"")
        assert (await sh(box, "echo alive")).stdout.text == "alive\n"


async def test_a_file_with_many_names_is_counted_once_and_empty_ones_count_too(tmp_path: Path) -> None:
    async with _on_disk(tmp_path, disk_mb=10) as box:
        before = await box._used()
        await sh(box, "head -c 3M /dev/zero > ~/a; for i in `seq 9`; do ln ~/a ~/a$i; done; touch ~/b ~/c")
        after = await box._used()
        assert 3 << 20 <= after - before - 2 * 4096 <= (3 << 20) + 8192


async def test_nothing_is_hidden_in_deep_folders_or_by_taking_its_name_away(tmp_path: Path) -> None:
    deep = f"{DEEP}\nfile = open('large', 'wb')"
    nameless = "import os\nfile = open('large', 'wb')\nos.unlink('large')"
    for hide in (deep, nameless):
        script = f"{hide}\nfile.write(bytes(30 << 20))\nfile.flush()\nimport time; time.sleep(1000)"
        async with _on_disk(tmp_path, disk_mb=20) as box:
            ran = await python(box, script, timeout_s=100)
            assert (ran.code, ran.timed_out) == (137, False)


async def test_a_folder_counts_as_large_as_its_names_make_it(tmp_path: Path) -> None:
    names = """
import os
os.mkdir("folder")
os.chdir("folder")
open("file", "w").close()
for number in range(3000):
    os.link("file", f"{number:0240}")
print(os.stat(".").st_blocks * 512)
"""
    async with _on_disk(tmp_path) as box:
        before = await box._used()
        size = int((await python(box, names)).stdout.text)
        assert await box._used() - before >= size > 1 << 18


async def test_what_was_kept_does_not_count_against_who_comes_after_a_rewind(tmp_path: Path) -> None:
    async with _on_disk(tmp_path, disk_mb=10) as box:
        await box.checkpoint()
        await box.write(f"{HOME}/kept/small", b"x")
        assert (await python(box, DEEP.replace(HOME, f"{HOME}/kept"))).code == 0
        await box.write(f"{HOME}/kept/large", bytes(30 << 20))
        await box.write(f"{HOME}/other", bytes(30 << 20))
        await box.rewind([f"{HOME}/kept"])
        # Longer than it takes to be looked at, several times.
        assert (await sh(box, "sleep 2; echo alive")).stdout.text == "alive\n"
        ran = await sh(box, "head -c 50M /dev/zero > ~/more; sleep 1000", timeout_s=100)
        assert (ran.code, ran.timed_out) == (137, False)


async def test_what_was_copied_to_a_fresh_box_does_not_count_against_its_verifier(tmp_path: Path) -> None:
    job = Job(
        task=Task(instruction="x"), model=Endpoint(base_url="http://x/v1", model="m"), sandbox=SandboxSpec(disk_mb=1)
    )

    async def copy(box: Sandbox, path: str) -> None:
        # More than the fresh box may have: what one that is only watched may have written before it was looked at.
        await box.write(f"{path}/large", bytes(80 << 20))

    async def log(_: Event) -> None:
        pass

    async with LocalProvider(tmp_path, on_disk=True) as provider, _second_box(job, copy, provider, log, NOTHING) as box:
        ran = await sh(box, "sleep 2; stat -c %s ~/workdir/large")
        assert ran.stdout.text == f"{80 << 20}\n"


CHILD = """
import anyio, sys
from pathlib import Path
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec
async def main():
    async with LocalProvider(Path(sys.argv[1]), on_disk=True) as provider, provider.open(SandboxSpec()) as box:
        script = f"mkdir ~/d; touch ~/d/f; chmod 000 ~/d; echo up; exec sleep {sys.argv[2]}"
        async with box.spawn(["bash", "-c", script]) as process:
            print((await process.stdout.receive()).decode(), end="", flush=True)
            await process.wait()
anyio.run(main)
"""


@contextmanager
def _other_program(state: Path, marker: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program that has a box of its own with a command in it; killed at the end."""
    command = [sys.executable, "-c", CHILD, str(state), marker]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
            yield child
        finally:
            child.kill()


async def test_what_a_killed_program_left_goes_with_the_next_start_and_what_is_in_use_stays(tmp_path: Path) -> None:
    marker = f"5{secrets.randbelow(10**9)}.5"
    with _other_program(tmp_path, marker) as child:
        [theirs] = _disks(tmp_path)
        async with _on_disk(tmp_path):
            assert theirs in _disks(tmp_path)
            child.kill()
            child.wait()
            with anyio.fail_after(120):
                while living(marker):
                    await anyio.sleep(0.01)
            assert theirs in _disks(tmp_path)
            async with _on_disk(tmp_path):
                assert theirs not in _disks(tmp_path) and len(_disks(tmp_path)) == 2
    assert list((tmp_path / "layers" / FOLDER).iterdir()) == []


def test_a_link_that_took_a_folders_place_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious/deep").mkdir(parents=True)
    (tmp_path / "precious/file").write_text("x")
    (tmp_path / "box/disk/0").mkdir(parents=True)
    (tmp_path / "box/disk/0/u").symlink_to(tmp_path / "precious")
    (tmp_path / "box/disk/link").symlink_to(tmp_path / "precious")
    home.discard(str(tmp_path / "box/disk/link"), str(tmp_path / "box"))
    home.discard(str(tmp_path / "box/disk"), str(tmp_path / "box"))
    assert list((tmp_path / "box").iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "precious").iterdir()) == ["deep", "file"]
