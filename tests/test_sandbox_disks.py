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

from boxes import ROOT, living, python
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.box import LocalBox
from rollcage.sandboxes.conformance import CHECKS, judge
from rollcage.sandboxes.disks import FOLDER
from rollcage.sandboxes.local import LocalProvider
from rollcage.sandboxes.machine import BOX_UID
from rollcage.types import HOME, SandboxSpec

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
    # Who kills the keeper leaves a folder to the next who starts.
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
            assert (found.st_mode & 0o777, found.st_uid) == (0o700, BOX_UID if ROOT else os.geteuid())
            assert any(note.startswith("disk: 64 MB is held by looking") for note in box.notes)
        assert _disks(tmp_path) == []
    assert list((tmp_path / "layers" / FOLDER).iterdir()) == []


async def test_nothing_stays_of_folders_that_are_closed_or_too_deep_to_be_named(tmp_path: Path) -> None:
    async with _on_disk(tmp_path) as box:
        close = "mkdir -p ~/closed/below; touch ~/closed/below/file; chmod 000 ~/closed/below/* ~/closed/below ~/closed"
        assert (await sh(box, close)).code == 0
        await box.checkpoint()
        assert (await sh(box, "chmod 755 ~/closed; touch ~/closed/file; chmod 000 ~/closed")).code == 0
        # It may be killed for it, but not before it has come further than a path can reach.
        assert (await python(box, DEEP)).code in (0, 137)
    assert _disks(tmp_path) == []


async def test_a_memory_disk_is_what_boxes_have_where_it_will_do(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider, provider.open(SandboxSpec()) as box:
        assert not any(note.startswith("disk") for note in box.notes)
        assert not (tmp_path / "layers" / FOLDER).exists()


async def test_who_writes_too_much_is_killed_and_the_box_goes_on(tmp_path: Path) -> None:
    async with _on_disk(tmp_path, disk_mb=10) as box:
        ran = await sh(box, "head -c 20M /dev/zero > ~/large; sleep 1000", timeout_s=100)
        assert (ran.code, ran.timed_out) == (137, False)
        assert (await sh(box, "rm ~/large; echo alive")).stdout.text == "alive\n"


async def test_a_file_with_many_names_is_counted_once_and_empty_ones_count_too(tmp_path: Path) -> None:
    async with _on_disk(tmp_path, disk_mb=10) as box:
        before = (await box._ask("usage", {}, [box._user, box._mnt])).body["bytes"]
        await sh(box, "head -c 3M /dev/zero > ~/a; for i in `seq 9`; do ln ~/a ~/a$i; done; touch ~/b ~/c")
        after = (await box._ask("usage", {}, [box._user, box._mnt])).body["bytes"]
        assert 3 << 20 <= after - before - 2 * 4096 <= (3 << 20) + 8192


async def test_folders_deep_enough_to_hide_something_are_too_much(tmp_path: Path) -> None:
    async with _on_disk(tmp_path) as box:
        ran = await python(box, f"{DEEP}\nimport time; time.sleep(1000)", timeout_s=100)
        assert (ran.code, ran.timed_out) == (137, False)


CHILD = """
import anyio, sys
from pathlib import Path
from rollcage.sandboxes.local import LocalProvider
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
