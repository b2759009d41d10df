"""Two machines by hand: each has a network, processes and disks of its own. The wire between them is cut."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio
import pytest

from rollcage.cluster.view import read_view
from rollcage.events import Requeued
from rollcage.store import Store
from support.commands import environ
from support.processes import alive

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="namespaces of networks need root and ip"),
]
MARK = "rollcage-two-machines-sleep"
FIRST, SECOND = "10.213.0.1", "10.213.0.2"
TASK = f"""
instruction = "nothing"
setup = ["bash -c 'exec -a {MARK} sleep 15'; touch done"]
verify = ["test -f done"]
"""


@contextmanager
def wire() -> Iterator[tuple[str, str]]:
    """Two networks that have nothing but each other; their names."""
    first, second = (f"rollcage{os.getpid()}{side}" for side in "ab")

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    with ExitStack() as stack:
        for name in (first, second):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", first, "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", second)
        for name, address in ((first, FIRST), (second, SECOND)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            ip("-n", name, "route", "add", "default", "dev", "wire")  # Ray looks there for its own address
        yield first, second


@contextmanager
def machine(network: str, home: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """What a machine does from its boot on; it loses its power at the end of the block."""
    home.mkdir()
    ray = f"{sys.executable} -m ray.scripts.scripts"
    disk = "mkdir -p /tmp/ray; mount -t tmpfs ray /tmp/ray"
    command = ["ip", "netns", "exec", network, "unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    environment = environ(home, {"RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "120"})
    with (home / "said").open("wb") as said:
        process = subprocess.Popen(
            [*command, "bash", "-c", f'set -e; {disk}; ray() {{ {ray} "$@"; }}; {script}'],
            cwd=home,
            env=environment,
            stdout=said,
            stderr=said,
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


async def test_a_cut_wire_ends_what_runs_behind_it_and_only_then_the_other_machine_begins_it(tmp_path: Path) -> None:
    (tmp_path / "task.toml").write_text(TASK)
    start = "ray start --num-cpus 1 --resources '{\"place\": 2}'"
    evaluate = f"{sys.executable} -m rollcage eval {tmp_path}/task.toml --agent nop -n 6 --name two"
    cluster = f"--ray {FIRST}:6379 --ray-resource place=1 --ray-lease 15"
    first, second = tmp_path / "first", tmp_path / "second"
    waits = "until [ -e joined ]; do sleep 0.1; done;"
    with wire() as (near, far):
        begins = f"{start} --head --node-ip-address {FIRST} --port 6379 --include-dashboard=false"
        joins = f"until {start} --address {FIRST}:6379 --node-ip-address {SECOND}; do sleep 1; done; sleep 10000"
        with machine(near, first, f"{begins}; {waits} {evaluate} {cluster}") as running, machine(far, second, joins):

            def at_work() -> int:
                """Rollouts on the second machine."""
                nodes, _ = read_view(first / "state", time.time())
                return sum(node.running for node in nodes if node.address == SECOND)

            def told() -> str:
                return "\n".join((home / "said").read_text() for home in (first, second))

            with anyio.fail_after(300):
                while "Ray runtime started" not in (second / "said").read_text():
                    await anyio.sleep(0.1)
                (first / "joined").touch()
                while at_work() != 2 or len(alive(MARK)) < 2:
                    assert running.poll() is None, told()
                    await anyio.sleep(0.1)
            subprocess.run(["ip", "-n", near, "link", "set", "wire", "down"], check=True)
            cut = time.time()
            code = await anyio.to_thread.run_sync(lambda: running.wait(300), abandon_on_cancel=True)
            assert code == 0, told()
            # The second machine is still up, alone; it has ended what it ran.
            assert not alive(MARK)
    async with Store.open(first / "state" / "rollouts.db") as store:
        rollouts = await store.list()
        logs = [await store.read(each.id) for each in rollouts]
    assert [each.reward for each in rollouts] == [1.0] * 6
    again = [entry.time - cut for log in logs for entry in log if isinstance(entry.event, Requeued)]
    assert len(again) == 2 and all(10 < after < 60 for after in again), again
    assert all([entry.event.kind for entry in log].count("ended") == 1 for log in logs)
