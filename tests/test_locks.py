"""A lock outlives nobody: what a dead process claimed is found, and what a living one holds is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from rollcage.locks import abandoned, claim, is_claimed, locked, try_lock

CLAIMS = """
import sys
from pathlib import Path
from rollcage.locks import claim
held = claim(Path(sys.argv[1]), folder=sys.argv[2] == "folder")
print(held.path, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_claim_ends_with_its_process_however_that_ends(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", CLAIMS, str(tmp_path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        assert is_claimed(path)
        assert is_claimed(path), "looking does not take it"
        assert list(abandoned(tmp_path)) == []
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert path.exists()
    assert not is_claimed(path)
    assert list(abandoned(tmp_path)) == [path]


@pytest.mark.parametrize("folder", [False, True])
def test_what_is_released_is_gone_and_what_is_merely_closed_is_abandoned(tmp_path: Path, folder: bool) -> None:
    released, closed = claim(tmp_path, folder=folder), claim(tmp_path, folder=folder)
    if folder:
        (released.path / "content").write_text("x")
    released.release()
    closed.close()
    assert not released.path.exists()
    assert list(abandoned(tmp_path)) == [closed.path]


def test_what_is_being_removed_as_abandoned_is_held_meanwhile(tmp_path: Path) -> None:
    claim(tmp_path, folder=True).close()
    for path in abandoned(tmp_path):
        assert is_claimed(path)
        assert list(abandoned(tmp_path)) == []


def test_nothing_is_claimed_where_there_is_nothing(tmp_path: Path) -> None:
    assert not is_claimed(tmp_path / "none")
    assert list(abandoned(tmp_path / "none")) == []


async def test_a_lock_is_had_by_one_or_shared_by_many(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    async with locked(path, shared=True), locked(path, shared=True):
        assert try_lock(path) is None
    async with locked(path):
        assert try_lock(path, shared=True) is None
        with anyio.move_on_after(0.2) as scope:
            async with locked(path):
                pytest.fail("it is held")
        assert scope.cancelled_caught
    fd = try_lock(path)
    assert fd is not None
    os.close(fd)
