"""A box goes back to its checkpoint, whatever the agent did to prevent it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rollcage.errors import FileMissing, SandboxError
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.box import LocalBox
from support.boxes import a_box

WORK = "/home/user/workdir"
TREE = "find . -mindepth 1 \\( -type f -printf '%P %s %m\\n' -o -printf '%P %y %l %m\\n' \\) | sort"


async def _tree(box: LocalBox, folder: str = "/home/user") -> str:
    return (await sh(box, TREE, cwd=folder)).stdout.text


async def _base(folder: Path) -> None:
    (folder / "tools" / "deep").mkdir(parents=True)
    (folder / "tools" / "run").write_text("original")
    (folder / "tools" / "deep" / "file").write_text("deep")
    (folder / ".profile").write_text("profile")


LAYER = Layer("base", "1", _base)
SETUP = (
    f"mkdir -p {WORK}/src; echo one > {WORK}/src/a; echo two > {WORK}/b; echo rc > ~/.bashrc; mkdir ~/d; echo x > ~/d/x"
)


async def test_only_the_kept_paths_stay_as_the_agent_left_them(tmp_path: Path) -> None:
    async with a_box(tmp_path, LAYER) as box:
        await sh(box, SETUP)
        before = await _tree(box)
        await box.checkpoint()
        assert await _tree(box) == before
        await sh(
            box,
            f"cd {WORK}; echo changed > src/a; rm b; mkdir new; echo n > new/n; ln -s /etc/passwd link; rm -rf ~/d; "
            "mkdir -p ~/.config/evil/x; echo alias > ~/.bashrc; echo evil > ~/tools/run; rm -r ~/tools/deep; "
            "mkdir ~/tools/deep; echo fresh > ~/tools/deep/fresh; chmod 700 ~/tools; echo t > /tmp/t; chmod 711 ~",
        )
        work = await _tree(box, WORK)
        changed = await box.rewind([WORK])
        assert changed == (
            "/home/user",
            "/home/user/.bashrc",
            "/home/user/.config",
            "/home/user/d",
            "/home/user/tools",
            "/home/user/tools/deep",
            "/home/user/tools/run",
        )
        assert await _tree(box, WORK) == work
        assert await box.read(f"{WORK}/src/a") == b"changed\n"
        outside = [line for line in (await _tree(box)).splitlines() if not line.startswith("workdir")]
        assert outside == [line for line in before.splitlines() if not line.startswith("workdir")]
        assert await box.read("/home/user/tools/run") == b"original"
        assert (await sh(box, "ls -A /tmp; stat -c %a ~")).stdout.text == "755\n"
        await sh(box, f"cd {WORK}; rm -rf src new; mkdir src; echo again > src/z; mv src moved")
        assert (await sh(box, f"ls {WORK}/moved")).stdout.text == "z\n"


async def test_an_untouched_home_reports_nothing_and_a_second_rewind_works(tmp_path: Path) -> None:
    async with a_box(tmp_path, LAYER) as box:
        with pytest.raises(SandboxError, match="no checkpoint"):
            await box.rewind([])
        await sh(box, SETUP)
        before = await _tree(box)
        await box.checkpoint()
        assert await box.rewind([WORK]) == ()
        assert await _tree(box) == before
        await sh(box, "rm -rf ~/* ~/.b*")
        assert len(await box.rewind([])) == 4
        assert await _tree(box) == before
        await sh(box, "echo mine > ~/mine; echo t > /tmp/t")
        assert await box.rewind(["/home/user"]) == ()
        assert await box.read("/home/user/mine") == b"mine\n"
        with pytest.raises(FileMissing):
            await box.read("/tmp/t")


async def test_a_running_command_forbids_both(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box, box.spawn(["sleep", "9"]):
        for change in (box.checkpoint(), box.checkpoint()):
            with pytest.raises(SandboxError, match="running"):
                await change
        for path in ("/etc", "/home/user/../x", "workdir"):
            with pytest.raises(SandboxError):
                await box.rewind([path])


@pytest.mark.parametrize(
    "attack",
    [
        "rm -rf {work}; ln -s {host} {work}",
        "rm -rf {work}; ln -s /usr {work}",
        "rm -rf {work}; ln -s ../../proc/1/root {work}",
        "rm -rf {work}; mkfifo {work}",
        "rm -rf {work}; python3 -c \"import socket; socket.socket(1).bind('{work}')\"",
    ],
)
async def test_a_kept_path_turned_into_something_else_is_absent_and_reported(tmp_path: Path, attack: str) -> None:
    host = tmp_path / "host"
    host.mkdir()
    host.chmod(0o777)
    (host / "file").write_text("host")
    async with a_box(tmp_path / "state") as box:
        await sh(box, SETUP)
        await box.checkpoint()
        assert (await sh(box, attack.format(work=WORK, host=host))).code == 0
        assert WORK in await box.rewind([WORK])
        assert (await sh(box, f"ls -A {WORK}")).code != 0
        assert (await sh(box, f"mkdir {WORK} && ls -A {WORK}")).stdout.text == ""
    assert [path.name for path in host.iterdir()] == ["file"]


async def test_symlinks_above_a_kept_path_lead_nowhere(tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "c").mkdir(parents=True)
    (host / "c" / "file").write_text("host")
    for folder in (host, host / "c"):
        folder.chmod(0o777)
    async with a_box(tmp_path / "state") as box:
        await sh(box, "mkdir -p ~/a/b/c ~/other; echo 1 > ~/a/b/c/f; echo 2 > ~/a/b/g")
        before = await _tree(box)
        await box.checkpoint()
        await sh(box, f"rm -rf ~/a/b; ln -s {host} ~/a/b")
        assert await box.rewind(["/home/user/a/b/c"]) == ("/home/user/a/b", "/home/user/a/b/c")
        kept = [line for line in before.splitlines() if not line.startswith("a/b/c")]
        assert (await _tree(box)).splitlines() == kept
        await sh(box, f"rm -rf ~/a; ln -s {host} ~/a; ln -s {host} ~/missing")
        assert "/home/user/a" in await box.rewind(["/home/user/a/b/c", "/home/user/missing/c"])
        assert (await _tree(box)).splitlines() == kept
    assert (host / "c" / "file").read_text() == "host"


async def test_a_kept_path_below_a_folder_that_was_made_again_does_not_mix_with_the_old(tmp_path: Path) -> None:
    async with a_box(tmp_path, LAYER) as box:
        await sh(box, "mkdir -p ~/a/b; echo old > ~/a/b/old; echo side > ~/a/side")
        await box.checkpoint()
        await sh(box, "rm -rf ~/a; mkdir -p ~/a/b ~/p/q/r; echo new > ~/a/b/new; echo s > ~/a/s")
        await sh(box, "echo r > ~/p/q/r/r; echo o > ~/p/o")
        changed = await box.rewind(["/home/user/a/b", "/home/user/p/q/r", "/home/user/a/b/new"])
        assert changed == ("/home/user/a", "/home/user/a/s", "/home/user/p/o")
        assert (await sh(box, "cd ~; find a p -type f | sort")).stdout.text == "a/b/new\na/side\np/q/r/r\n"


async def test_deleting_a_kept_path_is_kept_too_and_single_files_can_be(tmp_path: Path) -> None:
    async with a_box(tmp_path, LAYER) as box:
        await sh(box, SETUP)
        await box.checkpoint()
        await sh(box, f"rm -rf {WORK}; echo mine > ~/tools/run; echo evil > ~/.profile; echo z > ~/d/z")
        changed = await box.rewind([WORK, "/home/user/tools/run", "/home/user/never"])
        assert changed == ("/home/user/.profile", "/home/user/d/z")
        assert (await sh(box, f"ls {WORK}")).code != 0
        assert await box.read("/home/user/tools/run") == b"mine\n"
        assert await box.read("/home/user/tools/deep/file") == b"deep"


async def test_depth_numbers_odd_names_and_a_full_disk_do_not_stop_it(tmp_path: Path) -> None:
    async with a_box(tmp_path, disk_mb=20) as box:
        await sh(box, SETUP)
        await box.checkpoint()
        deep = "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')"
        await sh(box, f'cd ~; mkdir deep; cd deep; python3 -c "{deep}"; cd ~; for i in $(seq 300); do : > f$i; done')
        await sh(
            box, "cd ~; printf x > $'bad\\xff'; mkdir locked; : > locked/x; chmod 000 locked; cat /dev/zero > full"
        )
        changed = await box.rewind([WORK])
        assert len(changed) == 200
        ran = await sh(box, "ls -A ~; head -c 15M /dev/zero > ~/room && echo room")
        assert ran.stdout.text == ".bashrc\nd\nworkdir\nroom\n"


async def test_using_up_every_inode_does_not_prevent_it(tmp_path: Path) -> None:
    use_up = "n=0; while touch $(seq $n $((n+999))) 2>/dev/null; do n=$((n+1000)); done; echo over $n"
    async with a_box(tmp_path, disk_mb=20) as box:
        await sh(box, SETUP)
        await box.checkpoint()
        ran = await sh(box, f"mkdir ~/many; cd ~/many; {use_up}; cd ~/workdir; {use_up}")
        assert "over 1" in ran.stdout.text
        assert await box.rewind([WORK]) == ("/home/user/many",)
        await box.write("/home/user/more", b"room")


async def test_it_takes_hardly_any_time(tmp_path: Path) -> None:
    async with a_box(tmp_path, LAYER) as box:
        await sh(box, SETUP)
        times = []
        await box.checkpoint()
        for _ in range(5):
            await sh(
                box, f"echo more >> {WORK}/src/a; mkdir -p ~/.cache/x; for i in $(seq 50); do : > ~/.cache/x/$i; done"
            )
            started = time.monotonic()
            await box.rewind([WORK])
            times.append(time.monotonic() - started)
        # Some milliseconds, but for what else the machine does.
        assert min(times) < 1
        assert await box.read(f"{WORK}/src/a") == b"one\n" + b"more\n" * 5
