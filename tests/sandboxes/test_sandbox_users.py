"""As root, each box has a host user of its own: what one takes of a user's allowance is missing in no other."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import anyio
import pytest

from rollcage.sandboxes.base import sh
from rollcage.sandboxes.layers import BOX_UID, Layer
from rollcage.sandboxes.local import fork_server
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec
from support.boxes import ROOT, living, python

pytestmark = pytest.mark.skipif(not ROOT, reason="boxes have host users of their own only where we are root")

TAKE_ALL = """
import fcntl, os, socket, sys
ours, theirs = socket.socketpair()
sent = 0
try:
    while sent < 20000:
        socket.send_fds(ours, [b"x"], [0] * 50)
        sent += 50
except OSError as error:
    assert error.errno == 109, error
pipes = [os.pipe() for _ in range(1500)]
print(sent, fcntl.fcntl(pipes[-1][0], fcntl.F_GETPIPE_SZ), flush=True)
sys.stdin.read()
"""
"""Has as many descriptors on their way, and as many pages in pipes, as its user may have."""


async def test_what_one_box_takes_of_its_users_allowance_it_takes_from_no_other(tmp_path: Path) -> None:
    take = ["python3", "-c", TAKE_ALL]
    async with (
        LocalProvider(tmp_path) as provider,
        provider.open(SandboxSpec()) as one,
        provider.open(SandboxSpec()) as other,
        one.spawn(take) as first,
    ):
        sent, room = map(int, (await first.stdout.receive()).split())
        assert 4000 < sent < 10000 and room < 1 << 16, "there is a bound to reach"
        async with one.spawn(take) as same:
            assert int((await same.stdout.receive()).split()[0]) == 0, "it is the box's, not each command's"
        talk = "import fcntl, os; print(fcntl.fcntl(os.pipe()[0], fcntl.F_GETPIPE_SZ))"
        assert int((await python(other, talk)).stdout.text) == 1 << 16
        async with other.spawn(take) as elsewhere:
            assert int((await elsewhere.stdout.receive()).split()[0]) == sent


async def test_a_box_of_its_own_user_changes_what_its_layers_brought_and_the_layer_stays(tmp_path: Path) -> None:
    async def fill(folder: Path) -> None:
        (folder / "below").mkdir()
        (folder / "below/file").write_text("before\n")
        (folder / "below/program").write_text("#!/bin/sh\necho ran\n")
        (folder / "below/program").chmod(0o700)

    layer, change = Layer("own", "1", fill), "cat file; echo after > file; rm program; mkdir -m 700 new"
    async with LocalProvider(tmp_path) as provider:
        for _ in range(2):
            async with provider.open(SandboxSpec(), [layer]) as box:
                ran = await sh(box, f"cd below; ./program; {change}; ls -ln")
                assert (ran.code, ran.stdout.text.splitlines()[:2]) == (0, ["ran", "before"]), ran.stderr.text
                assert {line.split()[2] for line in ran.stdout.text.splitlines()[3:]} == {"1000"}
                await box.checkpoint()
                assert (await sh(box, "rm -r below; mkdir below; touch below/x")).code == 0
                await box.rewind([])
                assert (await sh(box, "cat below/file; ls below")).stdout.text == "after\nfile\nnew\n"
        owners = {path.stat().st_uid for path in provider.layers.folder_of(layer).rglob("*")}
    assert owners == {BOX_UID}


async def test_where_no_such_mounts_can_be_made_boxes_share_a_user_and_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fill(folder: Path) -> None:
        (folder / "file").write_text("before\n")

    # The highest number is no user's: nobody can become it.
    monkeypatch.setattr(fork_server, "BOX_UIDS", range(0xFFFFFFFF, 0xFFFFFFFF + 1))
    async with LocalProvider(tmp_path) as provider, provider.open(SandboxSpec(), [Layer("own", "1", fill)]) as box:
        ran = await sh(box, "cat file; echo after > file; cat file")
        assert ran.stdout.text.splitlines()[:2] == ["before", "after"], ran.stderr.text
        marker = f"7{secrets.randbelow(10**9)}.5"
        async with box.spawn(["sleep", marker]):
            while not (found := living(marker)):
                await anyio.sleep(0.01)
            assert {os.stat(f"/proc/{pid}").st_uid for pid in found} == {BOX_UID}
