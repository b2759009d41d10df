"""What boxes cost, each thing beside what it would cost without: one run, interleaved rounds; compare the ratios.

    python bench/sandboxes.py [--json] [--quick] [--only PART]

A box beside a plain subprocess; a connection through the stdio relay beside the listener that needs none; a box from
the warm pool, with the agent's server running in it, beside one that is opened and started when it is asked for; a box
of the base system, and the agent in it, beside one of the machine's own, by the clock and by processor time, which a
busy machine does not change much (as root, where cgroups of version 1 count it).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from socket import socket

import anyio

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.agent import OpenCode
from rollcage.conformance.sandboxes.peers import Peer, serve
from rollcage.sandboxes.base import Sandbox, run
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.sandboxes.pool import Pool
from rollcage.sandboxes.relay import relayed
from rollcage.settings import Settings
from rollcage.types import BASE, SandboxSpec, System

AT_ONCE = 8
PORT = 7000
Result = dict[str, float]
Listen = Callable[[Sandbox, int], AbstractAsyncContextManager[socket]]


class Processor:
    """Processor seconds of this process and all it starts, by a cgroup of its own; none where there can be none."""

    def __init__(self) -> None:
        self._folder = Path("/sys/fs/cgroup/cpuacct", f"rollcage-bench-{os.getpid()}")
        try:
            self._folder.mkdir()
            (self._folder / "cgroup.procs").write_text(str(os.getpid()))
            self.counts = True
        except OSError:
            self.counts = False

    def seconds(self) -> float:
        """So far."""
        return int((self._folder / "cpuacct.usage").read_text()) / 1e9 if self.counts else 0.0

    def close(self) -> None:
        """Go back to the group above."""
        if self.counts:
            (self._folder.parent / "cgroup.procs").write_text(str(os.getpid()))
            with suppress(OSError):  # something of ours is still ending
                self._folder.rmdir()


async def clocked(work: Callable[[], Awaitable[object]]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def plain() -> None:
    """What a box is compared with."""
    await anyio.run_process(["/bin/true"])


async def steps(provider: LocalProvider, layers: Sequence[Layer], rounds: int) -> Result:
    """Medians of create, exec and close; exec and the whole cycle beside a plain subprocess."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", "create", "exec", "close")}
    for _ in range(rounds):
        times["plain"].append(await clocked(plain))
        opening = provider.open(SandboxSpec(), layers)
        started = time.perf_counter()
        box = await opening.__aenter__()
        times["create"].append(time.perf_counter() - started)
        started = time.perf_counter()
        await run(box, ["/bin/true"])
        times["exec"].append(time.perf_counter() - started)
        started = time.perf_counter()
        await opening.__aexit__(None, None, None)
        times["close"].append(time.perf_counter() - started)
    cycles = [sum(row) for row in zip(times["create"], times["exec"], times["close"], strict=True)]
    result = {f"{name}_ms": statistics.median(values) * 1000 for name, values in times.items()}
    result["exec_ratio"] = statistics.median(a / b for a, b in zip(times["exec"], times["plain"], strict=True))
    result["cycle_ratio"] = statistics.median(a / b for a, b in zip(cycles, times["plain"], strict=True))
    return result


async def rate(work: Callable[[], Awaitable[None]], count: int) -> float:
    """How many per second, eight at a time."""
    left = count

    async def some() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await work()

    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(AT_ONCE):
            tasks.start_soon(some)
    return count / (time.perf_counter() - started)


async def parallel(provider: LocalProvider, layers: Sequence[Layer], rounds: int) -> Result:
    """Boxes opened, used and closed per second, beside plain subprocesses, and commands in one box."""

    async def cycle() -> None:
        async with provider.open(SandboxSpec(), layers) as box:
            await run(box, ["/bin/true"])

    async with provider.open(SandboxSpec(), layers) as one:

        async def command() -> None:
            await run(one, ["/bin/true"])

        rows = [(await rate(plain, 64), await rate(cycle, 48), await rate(command, 64)) for _ in range(rounds)]
    return {
        "plain_per_s_8": statistics.median(row[0] for row in rows),
        "boxes_per_s_8": statistics.median(row[1] for row in rows),
        "execs_per_s_8": statistics.median(row[2] for row in rows),
        "boxes_ratio_8": statistics.median(row[0] / row[1] for row in rows),
    }


def available_mb() -> float:
    """Memory the kernel could still give out."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("MemAvailable"))


async def memory(provider: LocalProvider, layers: Sequence[Layer], count: int, rounds: int) -> Result:
    """Megabytes per box: idle, and with a sleeping command; beside a plain sleeping process."""
    rows = [await _memory(provider, layers, count) for _ in range(rounds)]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


async def _memory(provider: LocalProvider, layers: Sequence[Layer], count: int) -> Result:
    result: Result = {"boxes": count}
    before = available_mb()
    sleepers = [subprocess.Popen(["sleep", "1000"]) for _ in range(count)]
    await anyio.sleep(0.5)
    result["plain_process_mb"] = (before - available_mb()) / count
    for sleeper in sleepers:
        sleeper.kill()
        sleeper.wait()
    await anyio.sleep(0.5)
    async with AsyncExitStack() as stack:
        before = available_mb()
        boxes = [await stack.enter_async_context(provider.open(SandboxSpec(), layers)) for _ in range(count)]
        await anyio.sleep(0.5)
        result["idle_box_mb"] = (before - available_mb()) / count
        for box in boxes:
            await stack.enter_async_context(box.spawn(["sleep", "1000"]))
        await anyio.sleep(0.5)
        result["running_box_mb"] = (before - available_mb()) / count
    return result


CLIENT = """
import json, socket, statistics, sys, time
def connect():
    s = socket.create_connection(("127.0.0.1", 7000))
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s
def rate(kind, size):
    s, started = connect(), time.perf_counter()
    s.sendall(kind)
    if kind == b"d":
        while s.recv(1 << 18): pass
    else:
        block = bytes(1 << 18)
        for _ in range(size >> 18): s.sendall(block)
        s.shutdown(socket.SHUT_WR)
        while s.recv(1): pass
    return size / (time.perf_counter() - started) / 1e6
def ping(s):
    started = time.perf_counter()
    s.sendall(b"p" * 200)
    got = 0
    while got < 200: got += len(s.recv(200))
    return time.perf_counter() - started
def fresh():
    started = time.perf_counter()
    with connect() as s:
        s.sendall(b"p")
        ping(s)
    return time.perf_counter() - started
size = int(sys.argv[1])
s = connect(); s.sendall(b"p")
pings = [ping(s) for _ in range(500)]
print(json.dumps({
    "down_mb_s": rate(b"d", size), "up_mb_s": rate(b"u", size), "round_trip_ms": 1000 * statistics.median(pings),
    "connect_ms": 1000 * statistics.median(fresh() for _ in range(50)),
}))
"""
BLOCK = bytes(1 << 18)


@asynccontextmanager
async def served(listen: AbstractAsyncContextManager[socket], size: int) -> AsyncIterator[None]:
    """Answer the client: d for data down, u for data up, p for what comes back as it is."""

    async def answer(peer: Peer) -> None:
        kind = await peer.exactly(1)
        if kind == b"d":
            for _ in range(size >> 18):
                await peer.send(BLOCK)
            return
        while data := await peer.receive():
            if kind == b"p":
                await peer.send(data)

    async with listen as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(serve, listener, answer)
        yield
        tasks.cancel_scope.cancel()


async def relay(provider: LocalProvider, rounds: int, size: int) -> Result:
    """Throughput, round trip and new connections: directly, and through the relay."""
    ways: dict[str, Listen] = {"direct": lambda box, port: box.listen(port), "relay": relayed}
    rows: dict[str, list[Result]] = {name: [] for name in ways}
    async with provider.open(SandboxSpec()) as box:
        for _ in range(rounds):
            for name, listen in ways.items():
                async with served(listen(box, PORT), size):
                    ran = await run(box, ["python3", "-I", "-c", CLIENT, str(size)], timeout_s=300)
                    assert ran.code == 0, ran.stderr.text
                    rows[name].append(json.loads(ran.stdout.text))

    def median(name: str, what: str) -> float:
        return statistics.median(row[what] for row in rows[name])

    whats = ("down_mb_s", "up_mb_s", "round_trip_ms", "connect_ms")
    result = {f"{name}_{what}": median(name, what) for name in ways for what in whats}
    result["relay_down_ratio"] = result["relay_down_mb_s"] / result["direct_down_mb_s"]
    result["relay_up_ratio"] = result["relay_up_mb_s"] / result["direct_up_mb_s"]
    result["relay_added_ms"] = result["relay_round_trip_ms"] - result["direct_round_trip_ms"]
    return result


async def pool(provider: LocalProvider, agent: OpenCode, rounds: int) -> Result:
    """Seconds until a box with the agent's server in it is there: opened when asked for, and taken from the pool."""
    layers, cold, warm = agent.layers(), [], []
    for _ in range(rounds):
        started = time.perf_counter()
        async with provider.open(SandboxSpec(), layers) as box, anyio.create_task_group() as tasks:
            await tasks.start(agent.warm, box)
            cold.append(time.perf_counter() - started)
            tasks.cancel_scope.cancel()
        async with Pool.over(provider, size=1, warmer=agent, pause_s=60) as kept:
            kept.prepare(SandboxSpec(), layers)
            while not kept.ready:
                await anyio.sleep(0.05)
            started = time.perf_counter()
            async with kept.open(SandboxSpec(), layers):
                warm.append(time.perf_counter() - started)
    return {
        "cold_agent_ms": statistics.median(cold) * 1000,
        "warm_agent_ms": statistics.median(warm) * 1000,
        "cold_over_warm": statistics.median(a / b for a, b in zip(cold, warm, strict=True)),
    }


async def base(provider: LocalProvider, agent: OpenCode, rounds: int, processor: Processor) -> Result:
    """Opening a box, and starting the agent's server in it: in the base system beside the machine's own."""
    if not provider.images.has(BASE):
        print("no base system here: rollcage setup --base makes it")
        return {}
    times: dict[str, list[float]] = defaultdict(list)
    layers = agent.layers()

    async def timed(system: System, *, started: bool) -> None:
        what = "agent" if started else "open"
        clock, spent = time.perf_counter(), processor.seconds()
        async with provider.open(SandboxSpec(system=system), layers) as box, anyio.create_task_group() as tasks:
            if started:
                clock, spent = time.perf_counter(), processor.seconds()
                await tasks.start(agent.warm, box)
            times[f"{system}_{what}_ms"].append((time.perf_counter() - clock) * 1000)
            tasks.cancel_scope.cancel()
        times[f"{system}_{what}_cpu_ms"].append((processor.seconds() - spent) * 1000)

    systems: tuple[System, ...] = ("host", "base")
    for started, count in ((False, 10 * rounds), (True, rounds)):
        for number in range(count):
            for system in systems if number % 2 else reversed(systems):
                await timed(system, started=started)
    result = {name: statistics.median(values) for name, values in times.items()}
    for what in ("open", "agent"):
        pairs = zip(times[f"base_{what}_ms"], times[f"host_{what}_ms"], strict=True)
        result[f"base_{what}_ratio"] = statistics.median(a / b for a, b in pairs)
        if processor.counts:
            spent = (sum(times[f"{system}_{what}_cpu_ms"]) for system in ("base", "host"))
            result[f"base_{what}_cpu_ratio"] = next(spent) / next(spent)
    return result


async def measure(quick: bool, only: str = "") -> dict[str, Result]:
    """Everything, part by part."""
    settings = Settings.from_environ(os.environ)
    agent = OpenCode(Downloads(settings.cache_dir))
    processor = Processor()
    try:
        async with LocalProvider(settings.home) as provider:
            layers = list(agent.layers())
            for layer in layers:
                await provider.layers.ensure(layer)
            parts: dict[str, Callable[[], Awaitable[Result]]] = {
                "box": lambda: steps(provider, layers, 10 if quick else 40),
                "parallel": lambda: parallel(provider, layers, 1 if quick else 5),
                "memory": lambda: memory(provider, layers, 20 if quick else 200, 1 if quick else 3),
                "relay": lambda: relay(provider, 1 if quick else 5, (16 if quick else 128) << 20),
                "pool": lambda: pool(provider, agent, 1 if quick else 5),
                "base": lambda: base(provider, agent, 3 if quick else 15, processor),
            }
            return {name: await part() for name, part in parts.items() if only in ("", name)}
    finally:
        processor.close()


GOALS = {
    "create_ms": "<= 25",
    "exec_ms": "<= 20",
    "idle_box_mb": "<= 2",
    "relay_down_mb_s": ">= 50",
    "relay_up_mb_s": ">= 50",
    "base_open_ratio": "<= 1.2",
    "base_agent_ratio": "<= 1.05",
    "base_open_cpu_ratio": "<= 1.2",
    "base_agent_cpu_ratio": "<= 1.05",
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a measurement")
    parser.add_argument("--only", default="", help="one part: box, parallel, memory, relay, pool, base")
    arguments = parser.parse_args()
    result = anyio.run(measure, arguments.quick, arguments.only)
    for part, values in result.items():
        print(part)
        for name, value in values.items():
            goal = f"   goal {GOALS[name]}" if name in GOALS else ""
            print(f"{name:>22} {value:10.3f}{goal}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
