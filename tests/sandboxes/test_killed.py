"""What is killed from outside its box is no failure of the agent's; what kills itself is."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from rollcage.locks import hold
from rollcage.sandboxes.local import fork_server
from rollcage.sandboxes.local.cgroups import Cgroup, Cgroups, _beside, _sweep
from rollcage.store import Store
from rollcage.types import Blame, Outcome, Task
from support.commands import rollcage
from support.playing import Play
from support.processes import alive


async def test_an_agent_that_somebody_outside_kills_is_not_scored(play: Play) -> None:
    mark = f"mark-{secrets.token_hex(6)}"

    async def kill() -> None:
        with anyio.fail_after(120):
            while not (found := alive(mark)):
                await anyio.sleep(0.02)
        # Its monitor is the parent of the first process of its pid namespace.
        os.kill(parent_of(parent_of(found[0])), signal.SIGKILL)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        rollout = await play(Task(instruction=f"exec -a {mark} sleep 1000", verify=("true",)), agent="shell")
    assert (rollout.outcome, rollout.reward, rollout.blame) == (Outcome.SANDBOX_LOST, None, Blame.INFRASTRUCTURE)
    assert "from outside its box" in (rollout.error or "")


def test_an_agent_that_a_machine_without_memory_kills_is_not_scored(tmp_path: Path) -> None:
    """A group around all of it stands for the machine: it is out of memory long before the box is."""
    groups = Cgroups(("memory",))
    trees = groups.trees()
    if not trees or trees[0].version != 1:
        pytest.skip("no memory cgroup of version 1 that we may write")
    machine = trees[0].folder.parent / f"machine-{secrets.token_hex(6)}"
    machine.mkdir()
    try:
        (machine / "memory.limit_in_bytes").write_text(str(400 << 20))
        enter = ("sh", "-c", f'echo $$ >{machine}/cgroup.procs && exec "$@"', "enter")
        eat = 'exec python3 -c "bytearray(800 << 20)"'
        words = ("--agent", "shell", "--endpoint", "scripted", "--verify", "false", "--json")
        ran = rollcage(tmp_path, "run", "-i", eat, *words, under=enter)
    finally:
        with suppress(OSError):
            machine.rmdir()
        groups.close()
    result = json.loads(ran.stdout)
    assert (result["error_code"], result["reward"], result["blame"]) == ("sandbox_lost", None, "infrastructure")
    assert "ran out of memory" in result["error"]


async def test_an_agent_that_kills_itself_is_scored_as_it_stands(play: Play) -> None:
    rollout = await play(Task(instruction="kill -9 $$", verify=("false",)), agent="shell")
    assert (rollout.outcome, rollout.reward) == (Outcome.AGENT_FAILED, 0.0)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(
    ("files", "machine"),
    [
        ({"memory.events": "low 0\nmax 0\noom 0\noom_kill 1\n"}, True),
        ({"memory.events": "low 0\nmax 9\noom 1\noom_kill 1\n"}, False),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", "memory.failcnt": "0\n"}, True),
        ({"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n", "memory.failcnt": "7\n"}, False),
        ({}, False),
    ],
)
def test_the_kernel_says_whether_the_box_or_the_machine_was_out_of_memory(
    tmp_path: Path, files: dict[str, str], machine: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert Cgroup(folders=[tmp_path]).killed_by_machine() is machine


def test_groups_that_the_dead_left_beside_ours_are_swept(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    left, ours = (tmp_path / f"session/{name}/rollcage-{process.pid}-1-ff" for name in ("other", "mine"))
    for folder in (left / "box", ours / "box"):
        folder.mkdir(parents=True)
    living = tmp_path / f"session/other/rollcage-{os.getpid()}-{started(os.getpid())}-ff"
    living.mkdir()
    for folder in _beside(ours.parent, tmp_path):
        _sweep(folder)
    assert not left.exists()
    assert not ours.exists()
    assert living.exists()


def test_groups_are_not_swept_where_their_owner_lives_unseen(tmp_path: Path) -> None:
    """In another container, its process has another id or none; and who cannot open a file sees no process at all."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    held = tmp_path / f"rollcage-{process.pid}-1-ff"
    held.mkdir()
    lock = hold(held)
    assert lock is not None
    _sweep(tmp_path)
    assert held.exists()
    os.close(lock)
    living = tmp_path / f"rollcage-{os.getpid()}-{started(os.getpid())}-ff"
    living.mkdir()
    sweep = "import rollcage.sandboxes.local.cgroups as it, resource, types; left = [*Path.iterdir(folder)]"
    listed = f"from pathlib import Path; folder = Path({str(tmp_path)!r})"
    full = "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3)); it._sweep(types.SimpleNamespace(glob=lambda _: left))"
    subprocess.run([sys.executable, "-c", f"{listed}; {sweep}; {full}"], check=True)
    assert living.exists()
    _sweep(tmp_path)
    assert living.exists()
    assert not held.exists()


def started(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_fork_server_whose_parent_died_meanwhile_leaves_without_a_word(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    source = Path(fork_server.__file__).parents[3]
    for parent in (process.pid, 1):
        ended = subprocess.run(
            [sys.executable, "-I", "-S", "-c", fork_server._START, str(source), str(parent), "/gone", "/bin/true", "-"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_clock_that_is_set_back_makes_no_negative_times(
    play: Play, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [2_000_000_000.0]

    def stepping() -> float:
        now[0] -= 100_000
        return now[0]

    monkeypatch.setattr("rollcage.store.writer.time.time", stepping)
    rollout = await play(Task(instruction="true"), agent="shell")
    total, stages = (
        rollout.timings["total"],
        [rollout.timings[name] for name in ("provision", "setup", "agent", "verify")],
    )
    assert 0 < sum(stages) <= total < 1000
    row = await store.summary(rollout.id)
    assert row.ended_at is not None
    assert row.ended_at - row.created_at == pytest.approx(total)
