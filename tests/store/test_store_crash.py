"""The log under real trouble: killed processes, several writers, full disks, read-only files, exhausted limits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from rollcage.errors import StoreError
from rollcage.events import AgentEmitted, Ended, Queued
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Outcome, Task

JOB = Job(task=Task(instruction="do it"), model=Endpoint(base_url="http://127.0.0.1:1/v1", model="tiny"))

PROLOGUE = """
import os, resource, sys
from pathlib import Path
import anyio
from rollcage.errors import StoreError
from rollcage.events import AbortRequested, AgentEmitted, Ended, Queued, TurnEnded
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Outcome, Task, Turn
path, args = Path(sys.argv[1]), sys.argv[2:]
JOB = Job(task=Task(instruction="do it"), model=Endpoint(base_url="http://127.0.0.1:1/v1", model="tiny"))
def say(*words):
    print(*words, flush=True)
"""


def program(body: str) -> str:
    """A Python program in which `store` is the log named by its first argument."""
    return f"{PROLOGUE}\nasync def main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\nanyio.run(main)\n"


APPEND_FOREVER = program("""
    async with Store.open(path) as store:
        await store.append("r", Queued(job=JOB))
        for number in range(10**9):
            entry = await store.append("r", AgentEmitted(raw={"number": number, "text": f"{number} " * 300}))
            say(entry.seq)
""")

APPEND_SOME = program("""
    async with Store.open(path) as store, anyio.create_task_group() as tasks:
        await store.append(args[0], Queued(job=JOB))
        say("ready")
        await anyio.to_thread.run_sync(sys.stdin.readline)
        for number in range(int(args[1])):
            event = AgentEmitted(raw={"from": args[0], "number": number, "text": f"shared {number} " * 100})
            tasks.start_soon(store.append, args[0], event)
            tasks.start_soon(store.append, "both", event)
""")


@asynccontextmanager
async def running(code: str, *args: str) -> AsyncIterator[tuple[Process, BufferedByteReceiveStream]]:
    """A child process and what it prints; dead at the end of the block."""
    async with await anyio.open_process([sys.executable, "-c", code, *args], stderr=None) as process:
        assert process.stdout is not None
        try:
            yield process, BufferedByteReceiveStream(process.stdout)
        finally:
            if process.returncode is None:
                process.kill()


async def line(output: BufferedByteReceiveStream) -> str:
    return (await output.receive_until(b"\n", 1 << 16)).decode()


async def test_every_append_that_returned_survives_a_kill(tmp_path: Path) -> None:
    for attempt in range(3):
        path = tmp_path / f"log{attempt}.db"
        told = 0
        async with running(APPEND_FOREVER, str(path)) as (process, output):
            while told < 50 + 70 * attempt:
                told = int(await line(output))
            process.send_signal(signal.SIGKILL)
            with pytest.raises((anyio.EndOfStream, anyio.IncompleteRead)):
                while True:
                    told = int(await line(output))
            await process.wait()
        async with Store.open(path) as store:
            log = await store.read("r")
            assert [entry.seq for entry in log] == list(range(1, len(log) + 1))
            assert len(log) in (told, told + 1)
            for number, entry in enumerate(log[1:]):
                assert entry.event == AgentEmitted(raw={"number": number, "text": f"{number} " * 300})
            assert (await store.append("r", Ended(outcome=Outcome.CRASHED))).seq == len(log) + 1
            assert (await store.list())[0].outcome is Outcome.CRASHED


async def test_several_processes_lose_nothing_and_number_without_gaps(tmp_path: Path) -> None:
    path, count = tmp_path / "log.db", 150
    async with Store.open(path) as store:
        await store.append("both", Queued(job=JOB))
        async with (
            running(APPEND_SOME, str(path), "a", str(count)) as (one, told_by_one),
            running(APPEND_SOME, str(path), "b", str(count)) as (other, told_by_other),
        ):
            for process, output in ((one, told_by_one), (other, told_by_other)):
                assert await line(output) == "ready"
                assert process.stdin is not None
            for process in (one, other):
                assert process.stdin is not None
                await process.stdin.send(b"go\n")
            assert (await one.wait(), await other.wait()) == (0, 0)
        logs = {name: await store.read(name) for name in ("a", "b", "both")}
    for log in logs.values():
        assert [entry.seq for entry in log] == list(range(1, len(log) + 1))
    for name in ("a", "b"):
        expected = [
            AgentEmitted(raw={"from": name, "number": number, "text": f"shared {number} " * 100})
            for number in range(count)
        ]
        assert [entry.event for entry in logs[name][1:]] == expected
        mine = [entry.event for entry in logs["both"] if entry.event in expected]
        assert mine == expected


async def test_several_processes_may_make_the_log_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.db"
    code = program("""
        async with Store.open(path) as store:
            await store.append(args[0], Queued(job=JOB))
    """)
    children = [subprocess.Popen([sys.executable, "-c", code, str(path), f"r{number}"]) for number in range(5)]
    assert [await anyio.to_thread.run_sync(child.wait) for child in children] == [0] * 5
    async with Store.open(path) as store:
        assert sorted(one.id for one in await store.list()) == [f"r{number}" for number in range(5)]


async def test_a_follower_hears_another_process_at_once_and_sleeps_in_between(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    code = program("""
        async with Store.open(path) as store:
            for command in iter(sys.stdin.readline, ""):
                if command == "abort\\n":
                    await store.append("r", AbortRequested())
                elif command == "end\\n":
                    await store.append("r", Ended(outcome=Outcome.ABORTED))
                else:
                    await store.append("r", AgentEmitted(raw={}))
    """)
    async with Store.open(path) as store, running(code, str(path)) as (process, _):
        await store.append("r", Queued(job=JOB))
        assert process.stdin is not None
        follower, aborts = store.follow("r"), store.follow_kind("abort_requested")
        assert (await anext(follower)).seq == 1
        await process.stdin.send(b"say\n")
        assert (await anext(follower)).seq == 2
        for seq in range(3, 53):
            await process.stdin.send(b"abort\n")
            with anyio.fail_after(120):
                assert (await anext(follower)).seq == seq
                assert (await anext(aborts)).seq == seq
        counts: list[int] = []
        while not counts or (counts[-1] > 4 and len(counts) < 20):
            before = _wakeups()
            await anyio.sleep(0.5)
            counts.append(_wakeups() - before)
        # Threads that were still on their way to sleep, or not of the store; a poll of the disk would show every time.
        assert counts[-1] <= 4, counts
        await process.stdin.send(b"end\n")
        with anyio.fail_after(120):
            assert [entry.seq async for entry in follower] == [53]


def _wakeups() -> int:
    """How often the threads of this process, but for the event loop's, have gone to sleep so far."""
    others = [task for task in Path("/proc/self/task").iterdir() if task.name != str(os.getpid())]
    counts = [re.search(r"^voluntary_ctxt_switches:\s+(\d+)", (one / "status").read_text(), re.M) for one in others]
    return sum(int(count[1]) for count in counts if count)


async def test_a_follower_hears_a_process_that_was_killed_between_its_commit_and_the_bell(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    code = program("""
        import sqlite3
        async with Store.open(path) as store:
            # What the log's writer does, without what it does afterwards.
            connection = sqlite3.connect(path)
            connection.execute(
                "INSERT INTO entries (rollout_id, seq, time, kind, body) VALUES ('r', 2, 1.0, 'agent_said', ?)",
                ('{"kind":"agent_said","data":{}}',))
            connection.commit()
            say("committed")
            await anyio.sleep(60)
    """)
    async with Store.open(path) as store, running(code, str(path)) as (process, output):
        await store.append("r", Queued(job=JOB))
        follower = store.follow("r")
        assert (await anext(follower)).seq == 1
        assert await line(output) == "committed"
        process.kill()
        with anyio.fail_after(120):
            assert (await anext(follower)).seq == 2


def run(code: str, *args: str, prefix: tuple[str, ...] = ()) -> str:
    """What a child process prints; it must succeed."""
    done = subprocess.run([*prefix, sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


FILL = """
    big = [AgentEmitted(raw={"noise": os.urandom(60_000).hex()}) for _ in range(100)]
    async with Store.open(path) as store:
        await store.append("r", Queued(job=JOB))
        await store.append("other", Queued(job=JOB))
        limit()
        refused = []
        async def append(event, name):
            try:
                await store.append(name, event)
            except StoreError as error:
                refused.append(str(error))
        async with anyio.create_task_group() as tasks:
            for event in big:
                tasks.start_soon(append, event, "r")
        assert refused, "the limit was never met"
        say(refused[0])
        assert len(await store.read("r")) == 101 - len(refused)
        lift()
        await append(big[0], "other")
        entry = await store.append("r", AgentEmitted(raw={"number": 1}))
        assert entry.seq == 102 - len(refused), entry.seq
        log = await store.read("r")
        assert [one.seq for one in log] == list(range(1, len(log) + 1))
        assert (await store.read("other"))[-1].event == big[0]
"""


async def test_a_file_that_may_not_grow_fails_single_appends_and_no_later_ones(tmp_path: Path) -> None:
    body = """
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))
    def lift():
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """
    path = tmp_path / "log.db"
    said = await anyio.to_thread.run_sync(run, program(textwrap.dedent(body) + textwrap.dedent(FILL)), str(path))
    assert re.match(rf"cannot write {re.escape(str(path))}: the disk (is full|refused .*): .*space", said)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root; the same is shown with a file size limit above")
async def test_a_full_disk_fails_single_appends_and_no_later_ones(tmp_path: Path) -> None:
    body = """
    import subprocess
    def limit():
        Path(path.parent / "ballast").write_bytes(bytes(1_500_000))
    def lift():
        Path(path.parent / "ballast").unlink()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", path.parent], check=True)
    """
    code = program(textwrap.dedent(body) + textwrap.dedent(FILL))

    def child() -> str:
        return run(code, str(tmp_path / "log.db"), prefix=("unshare", "--mount", "--propagation", "private"))

    said = await anyio.to_thread.run_sync(child)
    assert said.startswith(f"cannot write {tmp_path}/log.db: the disk is full: free some space")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user may look into."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


async def test_a_read_only_log_is_named_with_the_remedy(open_folder: Path) -> None:
    path = open_folder / "log.db"
    async with Store.open(path) as store:
        await store.append("r", Queued(job=JOB))
    code = program("""
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        try:
            async with Store.open(path) as store:
                await store.append("r", AgentEmitted(raw={}))
        except StoreError as error:
            say(error)
    """)
    os.chmod(path, 0o444)
    os.chmod(f"{path}-wake", 0o666)
    said = await anyio.to_thread.run_sync(run, code, str(path))
    # Who owns the folder gets as far as the first append.
    assert re.fullmatch(rf"cannot (open|write) {re.escape(str(path))}: it is read-only: make it writable .*\n", said)


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=rf"^cannot open {re.escape(str(tmp_path))}/file/log.db: Not a directory"):
        async with Store.open(tmp_path / "file" / "log.db"):
            pass


async def test_a_damaged_log_is_named_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    async with Store.open(path) as store:
        await store.append("r", Queued(job=JOB))
        for number in range(200):
            await store.append("r", AgentEmitted(raw={"text": f"{number} " * 100}))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(path.stat().st_size - 4096))
    with pytest.raises(StoreError, match=rf"^cannot \w+ {re.escape(str(path))}: it is damaged .*: move it away"):
        async with Store.open(path) as store:
            await store.read("r")


FOLLOW = """
    async with Store.open(path) as store:
        await store.append("r", Queued(job=JOB))
        limit()
        try:
            await anext(store.follow("r"))
        except StoreError as error:
            say(error)
        await store.append("r", AgentEmitted(raw={}))
"""


async def test_no_inotify_instance_left_is_named_with_the_sysctl(tmp_path: Path) -> None:
    body = """
    def limit():
        Path("/proc/sys/user/max_inotify_instances").write_text("0")
    """
    code = program(textwrap.dedent(body) + textwrap.dedent(FOLLOW))

    def child() -> str:
        return run(code, str(tmp_path / "log.db"), prefix=("unshare", "--user", "--map-root-user"))

    assert "sysctl -w fs.inotify.max_user_instances=" in await anyio.to_thread.run_sync(child)


async def test_no_file_descriptor_left_is_named_as_such(tmp_path: Path) -> None:
    body = """
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1, 4096))
    """
    code = program(textwrap.dedent(body) + textwrap.dedent(FOLLOW))
    said = await anyio.to_thread.run_sync(run, code, str(tmp_path / "log.db"))
    assert "raise `ulimit -n`" in said
