"""A box whose system can be written: real paths, root by its look, and everything put back, apart and bounded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.sandboxes.base import Separation, refuse_writable_system, sh
from rollcage.sandboxes.local.box import LocalBox
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
async def box(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[LocalBox]:
    tmp_path.chmod(0o755)
    spec = SandboxSpec(writable_system=True, disk_mb=64)
    async with LocalProvider(tmp_path, on_disk=request.param) as provider, provider.open(spec) as box:
        yield box


async def said(box: LocalBox, script: str, cwd: str = "/") -> str:
    ended = await sh(box, script, cwd=cwd)
    return (ended.stdout.text + ended.stderr.text).strip()


async def test_commands_are_root_by_their_look_and_nothing_more(box: LocalBox) -> None:
    assert await said(box, "id -u; echo $HOME $USER; mkdir -p /app; cd /app; pwd") == "0\n/root root\n/app"
    assert await said(box, "echo x > /root/f; cat /home/user/f; grep CapEff /proc/self/status") == (
        "x\nCapEff:\t0000000000000000"
    )
    assert "denied" in await said(box, "cat /proc/1/mem; cat /proc/kcore")


async def test_servers_listen_at_the_ports_of_a_whole_system(box: LocalBox) -> None:
    bind = "import socket; socket.socket().bind(('127.0.0.1', 80)); print('bound')"
    assert await said(box, f'python3 -c "{bind}"') == "bound"


async def test_what_our_mounts_stand_on_cannot_be_moved_or_replaced(box: LocalBox) -> None:
    for name in ("home", "proc", "dev", "run", "tmp", "root", "home/user", "usr"):
        assert "busy" in (await said(box, f"mv /{name} /moved; echo")).lower(), name
    assert "Read-only" in await said(box, "touch /usr/x")


async def test_the_system_is_put_back_but_for_what_is_kept(box: LocalBox) -> None:
    await said(box, "mkdir /app /opt; echo 1 > /app/a; echo 1 > /opt/b; echo 1 > /root/c; echo 1 > /tmp/d")
    await box.checkpoint()
    assert await said(box, "cat /app/a /opt/b /root/c /tmp/d") == "1\n1\n1\n1"
    await said(
        box, "echo 2 > /app/a; rm /opt/b; echo 2 > /root/c; echo 2 > /root/kept; echo 2 > /etc/plant; mkdir /new"
    )
    changed = await box.rewind(["/app", "/root/kept"])
    assert changed == ("/etc/plant", "/new", "/opt/b", "/home/user/c")
    assert (
        await said(box, "cat /app/a /opt/b /root/c /root/kept; ls /etc/plant /new 2>/dev/null; ls /tmp") == "2\n1\n1\n2"
    )


async def test_a_path_in_what_is_kept_is_restored(box: LocalBox) -> None:
    await said(box, "mkdir -p /app/.git; echo old > /app/.git/config")
    await box.checkpoint()
    await said(box, "rm -r /app/.git; mkdir /app/.git; echo new > /app/.git/config; echo new > /app/x")
    await box.rewind(["/app"], ["/app/.git/config"])
    assert await said(box, "cat /app/.git/config /app/x") == "old\nnew"


async def test_everything_can_be_kept(box: LocalBox) -> None:
    await box.checkpoint()
    await said(box, "echo 1 > /x; echo 1 > /root/y; echo 1 > /tmp/z")
    assert await box.rewind(["/"]) == ("/x", "/home/user/y")
    assert await said(box, "cat /x /root/y; ls /tmp") == "1\n1"


async def test_a_divided_box_that_is_rewound_is_whole_again_and_can_be_divided_anew(box: LocalBox) -> None:
    separation = Separation(("/app",), hidden=("/logs/verifier",))
    await said(box, "mkdir -p /app /logs/verifier; echo work > /app/a")
    for turn in ("1", "2"):
        await box.checkpoint()
        async with box.separate(separation) as judged:
            await said(box, f"echo {turn} > /logs/verifier/reward.txt; echo {turn} > /etc/judge")
            async with judged.spawn(["bash", "-c", "ls /logs/verifier; cat /app/a; touch /app/left"]) as process:
                await process.stdin.aclose()
                assert b"".join([chunk async for chunk in process.stdout]) == b"work\n"
        await box.rewind(())
        assert await said(box, "ls /logs/verifier /app; ls /etc/judge 2>/dev/null") == "/app:\na\n\n/logs/verifier:"


async def test_the_judged_has_a_system_of_its_own(box: LocalBox) -> None:
    await said(box, "mkdir -p /app /tests /logs/verifier; echo s > /tests/secret")
    await box.checkpoint()
    await box.rewind(["/app"])
    separation = Separation(("/app",), sealed=("/tests",), hidden=("/logs/verifier",))
    async with box.separate(separation) as judged:
        script = "id -u; echo 1 > /etc/j; echo 1 > /root/j; echo 1 > /logs/verifier/reward.txt; echo 1 > /app/j; pwd"
        ran = await said(box, f"cd /app; {judged.tools}/untrusted bash -c '{script}'")
        assert ran == "0\n/app"
        assert await said(box, "ls /etc/j /root/j /logs/verifier/reward.txt 2>/dev/null; cat /app/j") == "1"
        assert "Read-only" in await said(box, "echo x > /tests/secret")


async def test_the_disk_bounds_the_system_too(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    spec = SandboxSpec(writable_system=True, disk_mb=8)
    async with LocalProvider(tmp_path) as provider, provider.open(spec) as box:
        assert "No space left" in await said(box, "head -c 64M /dev/zero > /big")


def test_other_kinds_of_boxes_refuse_it() -> None:
    with pytest.raises(UsageError, match="local boxes only"):
        refuse_writable_system(SandboxSpec(backend="container", writable_system=True))
