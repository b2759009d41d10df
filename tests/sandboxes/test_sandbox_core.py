"""What a box does for those who behave."""

from __future__ import annotations

import os
import secrets
import socket
import stat
import threading
from pathlib import Path

import anyio
import pytest

from rollcage.errors import FileMissing, SandboxError, SandboxLost, UsageError
from rollcage.sandboxes.base import Provider, Rewindable, Sandbox, run, sh
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.fork_server import ForkServer
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec
from support.boxes import ROOT, a_box, descriptors, living, python


async def test_a_command_has_exactly_the_environment_it_was_given(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        ran = await run(box, ["env", "-0"], env={"A": "b=c\nd", "ÜMLAUT": "é"})
        given = dict(line.split("=", 1) for line in ran.stdout.text.split("\0") if line)
        assert given == {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/home/user",
            "USER": "user",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "A": "b=c\nd",
            "ÜMLAUT": "é",
        }


async def test_standard_streams_are_pipes_and_nothing_else_is_inherited(tmp_path: Path) -> None:
    # Trap 4: bubblewrap hands every descriptor it inherits to the command, namespaces included.
    look = "import os;print([(n, os.readlink(f'/proc/self/fd/{n}')[:5]) for n in os.listdir('/proc/self/fd')[:3]])"
    with open("/etc/passwd") as ours:
        os.set_inheritable(ours.fileno(), True)
        async with a_box(tmp_path) as box:
            ran = await python(box, look + ";print(len(os.listdir('/proc/self/fd')))")
            assert ran.stdout.text == "[('0', 'pipe:'), ('1', 'pipe:'), ('2', 'pipe:')]\n4\n"


async def test_exit_codes_are_those_a_shell_would_give(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        assert (await sh(box, "exit 7")).code == 7
        assert (await sh(box, "kill -9 $$")).code == 137
        assert (await sh(box, "kill -TERM $$")).code == 143
        assert (await run(box, ["no-such-program"])).code == 127
        assert (await run(box, ["/etc/passwd"])).code == 126


async def test_a_missing_folder_and_nonsense_arguments_are_clear_errors(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        with pytest.raises(SandboxError, match="no such folder in the box: /home/user/nowhere"):
            await run(box, ["true"], cwd="/home/user/nowhere")
        with pytest.raises(SandboxError, match="no such folder"):
            await run(box, ["true"], cwd="/etc/passwd")
        for argv in ([], [""], ["a=b"], ["echo", "a\0b"]):
            with pytest.raises(SandboxError, match="cannot run"):
                await run(box, argv)
        with pytest.raises(SandboxError, match="cannot run"):
            await run(box, ["echo", "x" * (1 << 18)])
        assert (await run(box, ["echo", "x" * 100_000])).code == 0


async def test_input_goes_in_and_output_comes_out_however_large(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        data = os.urandom(3 << 20)
        ran = await run(box, ["cat"], stdin=data, limit=4 << 20)
        assert ran.stdout.data == data
        ran = await run(box, ["head", "-c", str(100 << 20), "/dev/zero"], limit=1000)
        assert ran.stdout == (b"\0" * 1000, True)
        # It does not read what it is fed: its exit code tells, nothing hangs.
        assert (await run(box, ["true"], stdin=data)).code == 0


async def test_commands_of_one_box_share_home_and_tmp_and_run_side_by_side(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        await sh(box, "mkfifo /tmp/a; echo kept > ~/file")
        codes = []

        async def note(script: str) -> None:
            codes.append((await sh(box, script)).code)

        async with anyio.create_task_group() as tasks:
            for number in range(8):
                tasks.start_soon(note, f"echo {number} > ~/n{number}; cat ~/file > /dev/null")
            tasks.start_soon(note, "read x < /tmp/a; [ $x = hello ]")
            tasks.start_soon(note, "echo hello > /tmp/a")
        assert codes == [0] * 10
        assert (await sh(box, "ls ~ | wc -l")).stdout.text == "9\n"


async def test_files_are_written_with_their_folders_and_mode_and_read_back(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        path = "/home/user/dé ep/日本/\n'x\".sh"
        await box.write(path, b"#!/bin/sh\necho ran\n", mode=0o755)
        assert await box.read(path) == b"#!/bin/sh\necho ran\n"
        assert (await run(box, [path])).stdout.text == "ran\n"
        await box.write(path, b"shorter")
        assert await box.read(path, limit=3) == b"sho"
        assert (await run(box, ["stat", "-c", "%a %U", path])).stdout.text == "644 user\n"
        await box.write("/tmp/t", b"")
        assert await box.read("/tmp/t") == b""
        assert b"user:x:1000" in await box.read("/etc/passwd")


async def test_what_is_no_regular_file_is_missing_and_never_hangs(tmp_path: Path) -> None:
    # Trap 12: a naive read follows symlinks out of the box and blocks on a FIFO.
    secret = tmp_path / "secret"
    secret.write_text("secret")
    async with a_box(tmp_path / "state") as box:
        await sh(box, f"mkfifo fifo; mkdir folder; ln -s {secret} out; ln -s /proc/self/mem mem; ln -s loop loop")
        await sh(box, "ln -s /dev/zero zero; ln -s ../../../../../../../etc/shadow up; echo in > file; ln -s file link")
        for name in ("none", "fifo", "folder", "out", "mem", "zero", "up", "file/x", "folder/../fifo"):
            with pytest.raises(FileMissing), anyio.fail_after(120):
                await box.read(f"/home/user/{name}")
        with pytest.raises(SandboxError), anyio.fail_after(120):
            await box.read("/home/user/loop")
        for path in ("/dev/zero", "/proc/self/environ", "/proc/1/root/etc/shadow", "/etc/shadow", "/layers", "/disk"):
            with pytest.raises(FileMissing):
                await box.read(path)
        assert await box.read("/home/user/link") == b"in\n"
        assert await box.read("/home/user/folder/../../../home/user/file") == b"in\n"
        await sh(box, "truncate -s 900M sparse; chmod 000 file")
        assert await box.read("/home/user/sparse", limit=10) == b"\0" * 10
        assert await box.read("/home/user/file") == b"in\n"
        with pytest.raises(SandboxError, match="absolute"):
            await box.read("file")


async def test_a_write_replaces_what_stands_there_and_follows_no_link_out(tmp_path: Path) -> None:
    # Trap 3: a symlink in the agent's home must never make us create anything on the host.
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    async with a_box(tmp_path / "state") as box:
        await sh(box, f"mkfifo fifo; mkdir folder; ln -s {outside} out; ln -s {outside}/file file")
        for name in ("fifo", "file"):
            await box.write(f"/home/user/{name}", b"new")
            assert await box.read(f"/home/user/{name}") == b"new"
        with pytest.raises(SandboxError):
            await box.write("/home/user/out/deep/file", b"new")
        with pytest.raises(SandboxError):
            await box.write("/home/user/folder", b"new")
        for path in ("/etc/passwd", "/usr/x", "/x"):
            with pytest.raises(SandboxError, match="read-only"):
                await box.write(path, b"new")
        await sh(box, f"rm -rf ~/* ~/.config; ln -s {outside} ~/.config; ln -s {outside} ~/.cache; true")
        assert (await sh(box, "true")).code == 0
        assert list(outside.iterdir()) == []
        assert (await sh(box, "ls -A ~ | sort")).stdout.text == ".cache\n.config\n"


async def test_a_listener_in_the_box_is_served_by_this_process(tmp_path: Path) -> None:
    talk = "import socket;s=socket.create_connection(('127.0.0.1',7000));s.send(b'ping');print(s.recv(9))"
    async with a_box(tmp_path) as box:
        async with box.listen(7000) as listener, anyio.create_task_group() as tasks:

            async def serve() -> None:
                await anyio.wait_readable(listener)
                connection, _ = listener.accept()
                with connection:
                    assert connection.recv(9) == b"ping"
                    connection.sendall(b"pong")

            tasks.start_soon(serve)
            assert (await python(box, talk)).stdout.text == "b'pong'\n"
            with pytest.raises(SandboxError, match="port 7000 in the box: it is already in use"):
                async with box.listen(7000):
                    pass
        assert "Connection refused" in (await python(box, talk)).stderr.text
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", 7000), 1).close()


async def test_a_port_that_a_command_took_is_reported(tmp_path: Path) -> None:
    take = "import socket,sys;s=socket.create_server(('127.0.0.1',7000));print('up',flush=True);sys.stdin.read()"
    async with a_box(tmp_path) as box, box.spawn(["python3", "-I", "-c", take]) as process:
        assert await process.stdout.receive() == b"up\n"
        with pytest.raises(SandboxError, match="in use"):
            async with box.listen(7000):
                pass


async def test_leaving_the_block_kills_everything_the_command_started(tmp_path: Path) -> None:
    # Trap 6: bubblewrap is gone before its processes are; the block must wait for the last of them.
    marker = f"9{secrets.randbelow(10**9)}.5"
    daemons = f"for i in $(seq 20); do setsid nohup sleep {marker} >/dev/null 2>&1 & done; (sleep {marker} &) &"
    async with a_box(tmp_path) as box:
        async with box.spawn(
            ["bash", "-c", f"{daemons} trap '' TERM INT HUP; echo up; while :; do sleep 1; done"]
        ) as p:
            assert await p.stdout.receive() == b"up\n"
            assert living(marker)
        assert living(marker) == []
        for _ in range(5):
            async with box.spawn(["bash", "-c", f"{daemons} exit 3"]) as p:
                assert await p.wait() == 3
                assert living(marker) == []


async def test_a_loop_that_ignores_signals_ends_at_its_time_limit(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        ended = await sh(box, "trap '' TERM INT; while :; do :; done", timeout_s=0.3)
        assert (ended.code, ended.timed_out) == (124, True)
        assert ended.seconds < 60


async def test_cancelling_still_waits_for_the_death_of_all(tmp_path: Path) -> None:
    marker = f"8{secrets.randbelow(10**9)}.5"
    async with a_box(tmp_path) as box:
        with anyio.move_on_after(0.3) as scope:
            await sh(box, f"sleep {marker} & sleep {marker}")
        assert scope.cancelled_caught
        assert living(marker) == []


async def test_closing_a_busy_box_ends_its_commands_and_says_so(tmp_path: Path) -> None:
    marker = f"7{secrets.randbelow(10**9)}.5"
    async with LocalProvider(tmp_path) as provider:
        outcomes: list[str] = []
        async with provider.open(SandboxSpec()):
            pass
        before = descriptors()
        async with anyio.create_task_group() as tasks, provider.open(SandboxSpec()) as box:
            started = [anyio.Event() for _ in range(3)]

            async def work(event: anyio.Event) -> None:
                async with box.spawn(["bash", "-c", f"echo up; sleep {marker}"]) as process:
                    await process.stdout.receive()
                    event.set()
                    try:
                        await process.wait()
                    except SandboxLost as lost:
                        outcomes.append(str(lost))

            for event in started:
                tasks.start_soon(work, event)
            for event in started:
                await event.wait()
            before_close = living(marker)
            await box.close()
            assert before_close and living(marker) == []
            await box.close()
        assert len(outcomes) == 3 and "closed" in outcomes[0]
        for use in (box.read("/x"), box.write("/x", b""), box.checkpoint(), sh(box, "true")):
            with pytest.raises(SandboxLost):
                await use
        with pytest.raises(SandboxLost):
            async with box.listen(1):
                pass
        assert descriptors() == before


async def test_a_dead_keeper_loses_its_boxes_and_the_next_box_works(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider:
        async with provider.open(SandboxSpec()) as box:
            fork_server = provider._fork_server
            assert fork_server is not None
            async with box.spawn(["sleep", "100"]) as process:
                os.kill(fork_server.pid, 9)
                with anyio.fail_after(120), pytest.raises(SandboxLost, match="fork server"):
                    await process.wait()
            with pytest.raises(SandboxLost, match="fork server"):
                await sh(box, "true")
        async with provider.open(SandboxSpec()) as box:
            assert (await sh(box, "echo again")).stdout.text == "again\n"


async def test_the_keeper_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    # Trap 5: a parent-death signal follows the thread. Commands are started by the fork server, which has only one.
    keepers: list[ForkServer] = []
    order = {"layers": [], "disk": 1 << 20, "tmp": 1 << 20}
    boxes: list[int] = []

    def start() -> None:
        keepers.append(ForkServer(tmp_path, 61234 if ROOT else None))
        boxes.extend(keepers[0].ask_now("build", order).fds)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    boxes.extend((await keepers[0].ask("build", order)).fds)
    assert len(boxes) == 6
    for fd in boxes:
        os.close(fd)
    keepers[0].close()


def test_ctrl_c_in_a_terminal_does_not_reach_a_fork_server_that_is_starting(tmp_path: Path) -> None:
    server = ForkServer(tmp_path, 61234 if ROOT else None)
    try:
        assert os.getsid(server.pid) == server.pid != os.getsid(0)
    finally:
        server.close()


async def test_a_layer_below_a_closed_folder_is_the_home_and_can_be_changed(tmp_path: Path) -> None:
    # Trap 9: lower files must belong to the box's user and be reachable by it.
    async def build(folder: Path) -> None:
        (folder / "bin").mkdir(mode=0o700)
        (folder / "bin" / "tool").write_text("#!/bin/sh\necho tool\n")
        (folder / "bin" / "tool").chmod(0o700)
        (folder / "link").symlink_to("bin/tool")
        (folder / "shared").write_text("bottom")

    async def build_top(folder: Path) -> None:
        (folder / "shared").write_text("top")

    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    layers = Layer("top", "1", build_top), Layer("tools", "1", build)
    async with LocalProvider(closed) as provider:
        async with provider.open(SandboxSpec(), layers) as box:
            ran = await sh(
                box, "~/link; cat ~/shared; echo changed > ~/bin/tool; rm -r ~/bin; mkdir ~/bin; ls -A ~/bin"
            )
            assert (ran.code, ran.stdout.text, ran.stderr.text) == (0, "tool\ntop", "")
        async with provider.open(SandboxSpec(), layers) as box:
            assert (await sh(box, "~/bin/tool")).stdout.text == "tool\n"


async def test_nothing_is_left_on_disk_when_a_box_is_closed(tmp_path: Path) -> None:
    # Trap 10: an overlay's work folder on disk cannot even be deleted by its own user; ours is in memory.
    async with a_box(tmp_path) as box:
        await sh(box, "head -c 5000000 /dev/zero > ~/big; mkdir -p ~/a/b; rm -rf ~/a")
        await box.checkpoint()
    assert [path.name for path in tmp_path.rglob("*")] == ["layers"]
    mounts = Path("/proc/self/mounts").read_text()
    assert "overlay" not in mounts or "/disk/" not in mounts


async def test_fifty_boxes_at_once_are_apart_and_leave_nothing(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as provider:
        seen: dict[str, str] = {}
        async with provider.open(SandboxSpec()):
            pass
        before = descriptors()
        limit = anyio.CapacityLimiter(8)
        barrier = [anyio.Event() for _ in range(50)]

        async def live(number: int) -> None:
            async with provider.open(SandboxSpec()) as box:
                async with limit:
                    await box.write("/home/user/mine", str(number).encode())
                barrier[number].set()
                for event in barrier:
                    await event.wait()
                async with limit:
                    seen[box.id] = (await sh(box, "cat ~/mine; ls ~ /tmp | wc -l")).stdout.text

        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(live, number)
        assert sorted(seen.values()) == sorted(f"{number}4\n" for number in range(50))
        assert descriptors() == before


async def test_it_is_what_the_protocols_say(tmp_path: Path) -> None:
    async with LocalProvider(tmp_path) as local:
        provider: Provider = local
        assert provider.name == "local"
        async with provider.open(SandboxSpec()) as opened:
            box: Sandbox = opened
            assert isinstance(box, Rewindable) and box.id.startswith("local-")
    with pytest.raises(UsageError):
        LocalProvider(tmp_path, uid=0)


async def test_modes_of_kept_secrets_hold_within_the_box(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        await box.write("/home/user/key", b"k", mode=0o600)
        ran = await python(box, "import os;print(oct(os.stat('key').st_mode))")
        assert ran.stdout.text.strip() == oct(stat.S_IFREG | 0o600)


async def test_names_in_a_folder_are_told_without_a_command(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        assert await box.names_in(f"{HOME}/new/deep") == ()
        assert (await sh(box, "cd ~/new/deep && touch b $'\\xff' && ln -s /etc out && ln -s ~/new ~/to")).code == 0
        assert set(await box.names_in(f"{HOME}/to/deep") or ()) == {"b", "\udcff", "out"}
        await box.write(f"{HOME}/file", b"")
        with pytest.raises(SandboxError):
            await box.names_in(f"{HOME}/file")
        with pytest.raises(SandboxError):
            await box.names_in("/made")
        await sh(box, "mkdir ~/many && cd ~/many && seq 1001 | xargs touch")
        assert await box.names_in(f"{HOME}/many") is None
