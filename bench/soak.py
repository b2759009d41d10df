"""Wears a server out: rollouts, kills and faults in a loop, then a table of what was lost, doubled, orphaned or grew.

    python bench/soak.py [--seconds 3600] [--json] [--seed 0]      (make soak, make soak SECONDS=120)

Rollouts of the agent `shell`, many at once, are started over HTTP under idempotency keys, half of them twice. Meanwhile
the server is killed, asked to stop and started again on the same port; rollouts are aborted, their monitors killed from
outside, connections hung up amid requests and streams. At the end every rollout that was acknowledged must be in the
log and ended, once, and nothing that it started may live. Exit code 1 where a limit is passed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import anyio

from rollcage import Client
from rollcage.client import ServerError
from rollcage.errors import QueueFull, UnknownRollout
from rollcage.store import Store

LIMITS = {
    "lost": 0,
    "doubled": 0,
    "orphaned": 0,
    "tracebacks": 0,
    "memory_mb_per_1000": 10.0,
    "descriptors_per_1000": 5.0,
    "disk_mb_per_1000": 40.0,
}
"""What fails the run; growth is that of a server that lives on, from the rollout `WARM` to its last."""
AT_ONCE, WAITING = 4, 24
WARM, LIFE = 600, 150
"""Rollouts until a server has loaded all that it needs and its memory has filled up; and until it may be ended in a run
of ten minutes or more. The first server of such a run lives until its growth is known: `WARM + MEASURED` rollouts."""
MEASURED = 400
WINDOW = 50
"""Readings of which the least is taken: what a rollout has open while it runs is no growth."""
MARK = "rollcage-soak"


class Server:
    """The process under test, on one port over all its lives."""

    def __init__(self, home: Path, rng: random.Random) -> None:
        self.home, self._rng = home, rng
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = home / "server.log"
        self.growth: list[tuple[int, float, float]] = []
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "rollcage", "serve", "--port", str(self.port), "--home", str(self.home)]
        command += ["--json", "--quiet", "--at-once", str(AT_ONCE), "--queue", "1000", "--grace", "1"]
        with self.log.open("ab") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr)
        assert self.process.stdout is not None
        self.process.stdout.readline()
        self.first: tuple[int, float, float] | None = None
        self.latest = (0, 0.0, 0.0)
        self._recent = deque[tuple[float, float]](maxlen=WINDOW)

    def measure(self, ended: int) -> None:
        """Note what it occupies after so many rollouts of the whole run."""
        with suppress(OSError, StopIteration):
            status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
            memory = int(next(line for line in status if line.startswith("VmRSS")).split()[1]) / 1024
            self._recent.append((memory, float(len(os.listdir(f"/proc/{self.process.pid}/fd")))))
            now = (ended, *(min(column) for column in zip(*self._recent, strict=True)))
            if self.first is None:
                self._born = getattr(self, "_born", ended)
                if ended - self._born >= WARM:
                    self.first = now
            self.latest = now

    def end(self, how: signal.Signals) -> None:
        """Kill it, or ask it to stop."""
        if self.first is not None and self.latest[0] > self.first[0]:
            self.growth.append(tuple(b - a for a, b in zip(self.first, self.latest, strict=True)))  # type: ignore[arg-type]
        if hasattr(self, "_born"):
            del self._born
        self.process.send_signal(how)
        self.process.wait()

    def restart(self) -> None:
        """End it in one of two ways and start it again."""
        self.end(self._rng.choice((signal.SIGKILL, signal.SIGTERM)))
        self._start()


class Soak:
    """One run."""

    def __init__(self, home: Path, seconds: float, rng: random.Random) -> None:
        self.server, self.rng, self.until = Server(home, rng), rng, time.monotonic() + seconds
        self.seconds = seconds
        self.acknowledged: set[str] = set()
        self.by_key: dict[str, set[str]] = {}
        self.ended = 0
        self.faults: Counter[str] = Counter()
        self.tracebacks: Counter[str] = Counter()
        """What the server said last in each, and how often."""

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until

    async def work(self, client: Client) -> None:
        """Start one rollout after the other, and wait for each."""
        while not self.over:
            key, seconds = secrets.token_hex(8), self.rng.choice((0, 0, 0.2, 1))
            script = f"exec -a {MARK}-{key} sleep {seconds}" if seconds else "echo done > a.txt"
            arguments: dict[str, Any] = {"agent": "shell", "endpoint": "scripted", "verify": ["true"]}
            try:
                for _ in range(self.rng.choice((1, 2))):
                    started = await client.start(script, idempotency_key=key, **arguments)
                    self.acknowledged.add(started.rollout_id)
                    self.by_key.setdefault(key, set()).add(started.rollout_id)
                if self.rng.random() < 0.1:
                    self.faults["aborted"] += 1
                    await client.abort(started.rollout_id, "soak")
                await client.wait(started.rollout_id)
                self.ended += 1
                self.server.measure(self.ended)
            except (ServerError, QueueFull):
                await anyio.sleep(0.2)
            except UnknownRollout:
                self.faults["unknown"] += 1

    async def harm(self) -> None:
        """Faults at random, the rarest of them a new server."""
        last, before = time.monotonic(), self.ended
        least = WARM + MEASURED if self.seconds >= 600 else 0
        while not self.over:
            await anyio.sleep(self.rng.uniform(0.1, 0.6))
            pick = self.rng.random()
            if pick < 0.3:
                self.faults["hung up"] += 1
                self._hang_up()
            elif pick < 0.45 and (pids := marked(f"{MARK}-")):
                self.faults["monitor killed"] += 1
                with suppress(OSError):
                    os.kill(parent_of(parent_of(self.rng.choice(pids))), signal.SIGKILL)
            elif time.monotonic() - last > max(8, self.seconds / 20) and self.ended - before >= least:
                self.faults["restarted"] += 1
                await anyio.to_thread.run_sync(self.server.restart)
                last, before, least = time.monotonic(), self.ended, min(least, LIFE)

    def _hang_up(self) -> None:
        rollout = self.rng.choice(sorted(self.acknowledged) or ["none"])
        asked = self.rng.choice(
            (
                f"GET /rollouts/{rollout}/events HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\n\r\n",
                f"POST /rollouts HTTP/1.1\r\nHost: 127.0.0.1:{self.server.port}\r\nContent-Length: 9\r\n\r\n{{",
            )
        )
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.port), 1) as sock:
            sock.sendall(asked.encode())

    async def run(self) -> dict[str, float]:
        """All of it; what it came to."""
        address = f"http://127.0.0.1:{self.server.port}"
        async with Client(address, retry_s=120) as client:
            async with anyio.create_task_group() as tasks:
                for _ in range(WAITING):
                    tasks.start_soon(self.work, client)
                tasks.start_soon(self.harm)
            with anyio.move_on_after(300):
                for each in self.acknowledged:
                    with suppress(UnknownRollout):
                        await client.wait(each)
        self.server.end(signal.SIGTERM)
        return await self._judged()

    async def _judged(self) -> dict[str, float]:
        lost = doubled = 0
        async with Store.open(self.server.home / "rollouts.db") as store:
            rows = {row.id: row for row in await store.list(limit=1_000_000)}
            for each in self.acknowledged:
                if each not in rows or rows[each].outcome is None:
                    lost += 1
                    continue
                kinds = Counter(entry.event.kind for entry in await store.read(each))
                doubled += kinds["ended"] > 1 or kinds["agent_started"] > 1
        doubled += sum(len(ids) - 1 for ids in self.by_key.values())
        rollouts, memory, descriptors = (sum(column) for column in zip(*self.server.growth or [(0, 0, 0)], strict=True))
        self.tracebacks.update(tracebacks(self.server.log.read_text(errors="replace")))
        disk = sum(path.stat().st_size for path in self.server.home.rglob("*") if path.is_file() and ours(path))
        return {
            "rollouts": len(self.acknowledged),
            "lost": lost,
            "doubled": doubled,
            "orphaned": len(marked(MARK)),
            "tracebacks": self.tracebacks.total(),
            "memory_mb_per_1000": 1000 * memory / max(1, rollouts),
            "descriptors_per_1000": 1000 * descriptors / max(1, rollouts),
            "disk_mb_per_1000": 1000 * disk / 2**20 / max(1, len(self.acknowledged)),
            "measured_over": rollouts,
        }


def ours(path: Path) -> bool:
    """Whether a file grows with rollouts; layers and downloads do not."""
    return not {"layers", "cache", "images"} & set(path.parts)


def tracebacks(log: str) -> list[str]:
    """The last line of each, and where it was raised."""
    found = []
    for each in log.split("Traceback (most recent call last):")[1:]:
        lines = list(takewhile(lambda line: line.startswith((" ", "|", "+")) or not line, each.splitlines()))
        place = next((line.strip() for line in reversed(lines) if line.lstrip(" |").startswith("File ")), "")
        said = each.splitlines()[len(lines)] if len(lines) < len(each.splitlines()) else ""
        found.append(f"{said.strip()[:200]} ({place})")
    return found


def marked(mark: str) -> list[int]:
    """The processes whose command line begins so."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(mark.encode()):
                found.append(int(entry.name))
    return found


def parent_of(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollcage-soak-", ignore_cleanup_errors=True) as home:
        soak = Soak(Path(home), arguments.seconds, random.Random(arguments.seed))
        try:
            found = anyio.run(soak.run)
        finally:
            soak.server.process.kill()
            soak.server.process.wait()
    failed = [name for name, limit in LIMITS.items() if found[name] > limit]
    if arguments.seconds >= 600 and not found["measured_over"]:
        failed.append("measured_over")  # no server lived long enough to grow: nothing was shown
    if arguments.json:
        print(json.dumps({**found, "faults": dict(soak.faults), "said": dict(soak.tracebacks), "failed": failed}))
    else:
        for name, value in found.items():
            limit = f"{LIMITS[name]:>8g}" if name in LIMITS else ""
            print(f"{name:<22} {value:>10.1f} {limit} {'FAILED' if name in failed else ''}".rstrip())
        for said, count in soak.tracebacks.most_common(10):
            print(f"  {count} x {said}")
        print("faults: " + ", ".join(f"{count} {name}" for name, count in soak.faults.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
