"""What the gateway costs beside doing without, the published design, and proxies that only copy bytes; in one run.

    python bench/gateway.py [--json] [--quick] [--rounds 2] [--tools DIR]

A fast fake engine streams what vLLM sends: the prompt's ids, then one token with its id, its logprob and five
alternatives per chunk, then the count of tokens; so every turn is trainable. A fast client reads them; each
proxy in turn stands between, on a core of its own where there are two. Rounds are interleaved, and of each proxy's the
one with the lowest median latency counts, which is the one in which others disturbed it least: compare rows, not
absolute times. (A disturbed proxy is slower and yet cheaper: chunks pile up and go through several at a time.) The
client and the proxy in C come as source (`loadgen.c`, `ctee.c`) in the tools folder, the engine (`fakeup.c`) is here.

CPU is that of the proxy's process until it is idle again, so that what it does after the last byte (parsing, storing,
and syncing the log) is in it. Streams start spread over the length of one answer, as agents do. `lockstep` holds back
each chunk until the one before has arrived: a service time without idling that no proxy can better by being late.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import anyio
from pydantic import SecretStr

HERE = Path(__file__).resolve().parent
TOOLS = ("fakeup", "loadgen", "ctee")
LEASES = 2
"""A box may have 256 connections open, so 512 streams take two."""
TOKENS = 200
RATE = 100
TIME_S = 150
"""After this many seconds no further round is begun that would not fit."""


Table = dict[str, dict[str, dict[str, float]]]
"""By mode, proxy and quantity."""


class Mode(NamedTuple):
    """One way to load a proxy."""

    name: str
    streams: int
    seconds: float
    lockstep: bool = False
    """The next chunk leaves only when the last has arrived: no proxy gains by being late."""


@dataclass
class Proxy:
    """A running proxy."""

    name: str
    process: subprocess.Popen[str]
    ports: list[int]
    keys: list[str]
    start_ms: float

    @property
    def cpu(self) -> float:
        """CPU seconds of all its threads so far."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    @property
    def memory_kb(self) -> int:
        """What it occupies now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])

    def settled_cpu(self, wait_s: float = 8.0) -> float:
        """The same, once it has nothing left to do."""
        until = time.monotonic() + wait_s
        before, quiet = self.cpu, 0
        while quiet < 10 and time.monotonic() < until:
            time.sleep(0.02)
            now = self.cpu
            # Without progress it may still be waiting for its core.
            quiet = quiet + 1 if now - before < 0.0005 and self._asleep() else 0
            before = now
        return before

    def _asleep(self) -> bool:
        tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "S" for task in tasks)


class Bench:
    """The tools, the folder and the ports of one run."""

    def __init__(self, stack: ExitStack, tools: Path) -> None:
        self._stack = stack
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollcage-bench-")))
        if missing := [name for name in ("fastapi", "httpx") if importlib.util.find_spec(name) is None]:
            sys.exit(f"gateway.py: the published design needs {' and '.join(missing)}; install rollcage[dev]")
        cores = sorted(os.sched_getaffinity(0))
        self._own, self._theirs = {cores[-1]}, {cores[0]}
        for name in TOOLS:
            source = (HERE if name == "fakeup" else tools) / f"{name}.c"
            if not source.is_file():
                sys.exit(f"gateway.py: no {source}; say where the C tools are with --tools DIR")
            compiler = shutil.which("cc") or sys.exit("gateway.py: no C compiler `cc` on the path")
            subprocess.run([compiler, "-O2", "-w", "-o", self.folder / name, source], check=True)
        self.upstream = free_port()
        self._spawn([self.folder / "fakeup", "--port", str(self.upstream)], self._theirs)
        answers(self.upstream)

    def proxy(self, name: str) -> Proxy:
        """Start one of the proxies; it ends with the run."""
        port, record = free_port(), self.folder / f"{name}-{time.monotonic_ns()}"
        python, own, upstream = sys.executable, str(port), str(self.upstream)
        commands: dict[str, list[Any]] = {
            "published": [python, HERE / "published_proxy.py", own, upstream, record],
            "tee": [python, HERE / "tee.py", own, upstream, record],
            "C tee": [self.folder / "ctee", "--port", own, "--upstream", upstream, "--trace", record],
            "gateway": [python, __file__, "--serve", upstream, record],
        }
        started = time.perf_counter()
        process = self._spawn(commands[name], self._own)
        if name == "gateway":
            assert process.stdout is not None
            line = json.loads(process.stdout.readline())
            return Proxy(name, process, line["ports"], line["keys"], (time.perf_counter() - started) * 1e3)
        answers(port)
        return Proxy(name, process, [port] * LEASES, ["none"] * LEASES, (time.perf_counter() - started) * 1e3)

    def load(self, proxy: Proxy | None, mode: Mode, *options: str) -> dict[str, Any]:
        """One load through a proxy (or none): what the client saw, and what it cost."""
        before = proxy.settled_cpu() if proxy else 0.0
        client = self.client(proxy, mode, *options)
        seen: dict[str, Any] = json.loads(client.communicate()[0])
        cost = proxy.settled_cpu() - before if proxy else 0.0
        return {**seen, "cpu_us": cost * 1e6 / max(1, seen["chunks"])}

    def client(self, proxy: Proxy | None, mode: Mode, *options: str, lease: int = 0) -> subprocess.Popen[str]:
        """Start the client."""
        port, key = (proxy.ports[lease], proxy.keys[lease]) if proxy else (self.upstream, "none")
        command = [self.folder / "loadgen", "--port", str(port), "--key", key, "-c", str(mode.streams)]
        command += ["-n", str(TOKENS), "--duration", str(mode.seconds)]
        if mode.lockstep:
            command += ["--lockstep", str(self.upstream)]
        else:
            spread = TOKENS / RATE * 1000 if mode.streams > 1 else 0
            command += ["--rate", str(RATE), "--ramp", str(spread), "--warm", str(spread)]
        return self._spawn([*command, *options], self._theirs)

    def _spawn(self, command: list[Any], cores: set[int]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if "fakeup" in str(command[0]) else None,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        self._stack.enter_context(ended(process))
        return process


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """The process lives no longer than the block."""
    with process:
        try:
            yield
        finally:
            process.kill()


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def answers(port: int) -> None:
    """Wait until somebody listens there."""
    for _ in range(2000):
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.005)
    sys.exit(f"gateway.py: nothing came up on port {port}")


async def serve(upstream: str, folder: str) -> None:
    """The gateway as it runs in a server, its turns going into a real log."""
    from rollcage.events import Queued, TurnEnded
    from rollcage.gateway import Gateway
    from rollcage.server.interpreter import share_arenas, tuned_for_streams
    from rollcage.store import Store
    from rollcage.types import Endpoint, Job, Limits, Task, Turn

    endpoint = Endpoint(
        base_url=f"http://127.0.0.1:{upstream}/v1", model="fake", key=SecretStr("sk-" + "0123456789abcdef" * 2)
    )
    job = Job(task=Task(instruction="bench"), model=endpoint)
    share_arenas()
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(Store.open(Path(folder) / "log.sqlite"))
        stack.enter_context(tuned_for_streams())
        gateway = await stack.enter_async_context(Gateway.open())
        ports, keys = [], []
        for number in range(LEASES):
            rollout = f"rollout{number}"
            await store.append(rollout, Queued(job=job, owner="bench"))

            async def record(turn: Turn, rollout: str = rollout) -> None:
                await store.append(rollout, TurnEnded(turn=turn))

            sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
            lease = gateway.lend(endpoint, sock, limits=Limits(), mode="transparent_proxy", record=record)
            lent = await stack.enter_async_context(lease)
            ports.append(sock.getsockname()[1])
            keys.append(lent.endpoint.key.get_secret_value())
        print(json.dumps({"ports": ports, "keys": keys}), flush=True)
        await anyio.sleep_forever()


def memory(bench: Bench) -> dict[str, float]:
    """What an open stream occupies, beyond the request and the part of the answer that have come: 512 at a time."""
    proxy = bench.proxy("gateway")
    half = Mode("memory", 256, 4)
    options = ("--rate", "20", "--ramp", "1000")
    bench.load(proxy, Mode("warm-up", 1, 0.5))
    before = proxy.memory_kb
    clients = [bench.client(proxy, half, *options, lease=lease) for lease in range(LEASES)]
    time.sleep(half.seconds - 0.3)
    during = proxy.memory_kb
    seen = [json.loads(client.communicate()[0]) for client in clients]
    turns = sum(each["bytes"] for each in seen) / 1024 + 512 * 32
    return {"memory_kb_per_stream": (during - before - turns) / 512, "memory_mb_512": during / 1024}


def stall(bench: Bench, proxy: Proxy) -> float:
    """By how many ms a request of 10 MB delays the others' chunks, at worst."""
    others = bench.client(proxy, Mode("others", 32, 3), "--ramp", "300", "--warm", "600")
    time.sleep(1)
    large = bench.client(proxy, Mode("large", 1, 2), "--pad", str(10 << 20), "-n", "5", "--requests", "3", lease=1)
    large.communicate()
    return float(json.loads(others.communicate()[0])["lat_max"]) / 1e3


def stall_by_event(bench: Bench, proxy: Proxy, megabytes: int = 40) -> float:
    """By how many ms an event of so many megabytes in one answer delays the others' chunks, at worst."""
    others = bench.client(proxy, Mode("others", 32, 4), "--ramp", "300", "--warm", "600")
    time.sleep(1.2)
    said = f"bench:n=3;rate=0;big={megabytes};"
    body = {"model": "fake", "stream": True, "messages": [{"role": "user", "content": said}]}
    line = http.client.HTTPConnection("127.0.0.1", proxy.ports[1], timeout=60)
    headers = {"Authorization": f"Bearer {proxy.keys[1]}", "Content-Type": "application/json"}
    line.request("POST", "/v1/chat/completions", json.dumps(body).replace('": ', '":'), headers)
    received = len(line.getresponse().read())
    line.close()
    if received < megabytes << 20:
        sys.exit(f"gateway.py: the large event did not come through: {received} bytes")
    return float(json.loads(others.communicate()[0])["lat_max"]) / 1e3


def fixed(bench: Bench, proxy: Proxy) -> float:
    """CPU of one request beside its chunks, in us: requests of one chunk, one after the other on a few connections."""
    before = proxy.settled_cpu()
    seen = json.loads(bench.client(proxy, Mode("fixed", 4, 2), "-n", "1", "--rate", "0").communicate()[0])
    return (proxy.settled_cpu() - before) * 1e6 / max(1, int(seen["requests_ok"]))


def measured(bench: Bench, modes: list[Mode], rounds: int) -> tuple[Table, Proxy]:
    """The quietest of the rounds by mode, proxy and quantity; and the gateway, still running."""
    proxies: dict[str, Proxy | None] = {"none": None}
    proxies |= {name: bench.proxy(name) for name in ("published", "tee", "C tee", "gateway")}
    runs: dict[str, dict[str, list[dict[str, float]]]] = {mode.name: {name: [] for name in proxies} for mode in modes}
    for proxy in proxies.values():
        bench.load(proxy, Mode("warm-up", 4, 0.5))
    began = time.monotonic()
    for done in range(rounds):
        if done and (time.monotonic() - began) * (done + 1) / done > TIME_S:
            break
        for mode in modes:
            for name, proxy in proxies.items():
                runs[mode.name][name].append(bench.load(proxy, mode))
    found = {mode: {name: quietest(seen) for name, seen in by_name.items()} for mode, by_name in runs.items()}
    found["start"] = {name: {"ms": running.start_ms} for name, running in proxies.items() if running}
    gateway = proxies["gateway"]
    assert gateway is not None
    return found, gateway


def quietest(runs: list[dict[str, float]]) -> dict[str, float]:
    """The round in which the machine let chunks through fastest. A latency of -1 says that none arrived."""
    return min(runs, key=lambda run: run["lat_p50"] if run["lat_p50"] >= 0 else float("inf"))


def summary(found: Table) -> dict[str, float]:
    """The numbers that have goals.

    CPU is compared at 256 streams, where it decides how many a core can carry. With few, most of it is waking up,
    which costs everybody the same.
    """
    paced, many, lock = found["paced 32"], found["paced 256"], found["lockstep 32"]

    def ratio(row: dict[str, dict[str, float]], above: str, below: str) -> float:
        return row[above]["cpu_us"] / max(0.001, row[below]["cpu_us"])

    return {
        "cpu_vs_published": ratio(many, "published", "gateway"),
        "cpu_vs_tee": ratio(many, "gateway", "tee"),
        "delivered": many["gateway"]["chunks_per_s"] / many["none"]["chunks_per_s"],
        "p50_us_32": paced["gateway"]["lat_p50"] - paced["none"]["lat_p50"],
        "p99_us_256": many["gateway"]["lat_p99"] - many["none"]["lat_p99"],
        "start_ms": found["start"]["gateway"]["ms"],
        "cpu_vs_published_32": ratio(paced, "published", "gateway"),
        "cpu_vs_tee_32": ratio(paced, "gateway", "tee"),
        "cpu_vs_published_lockstep": ratio(lock, "published", "gateway"),
        "cpu_vs_tee_lockstep": ratio(lock, "gateway", "tee"),
        "cpu_vs_c_real": ratio(lock, "gateway", "C tee"),
        "ttft_us_256": many["gateway"]["ttft_p50"] - many["none"]["ttft_p50"],
        "p99_us_256_tee": many["tee"]["lat_p99"] - many["none"]["lat_p99"],
        "p99_us_256_c": many["C tee"]["lat_p99"] - many["none"]["lat_p99"],
    }


def table(found: Table) -> None:
    """For people."""
    for mode, by_name in found.items():
        if mode == "start":
            continue
        print(f"\n{mode:<12} {'chunks/s':>9} {'p50 us':>10} {'p99 us':>10} {'first us':>10} {'CPU us/chunk':>13}")
        for name, row in by_name.items():
            times = f"{row['lat_p50']:>10.0f} {row['lat_p99']:>10.0f} {row['ttft_p50']:>10.0f}"
            print(f"  {name:<10} {row['chunks_per_s']:>9.0f} {times} {row['cpu_us']:>13.1f}")
    print("\nstart: " + ", ".join(f"{name} {row['ms']:.0f} ms" for name, row in found["start"].items()))


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tools", type=Path, default=HERE.parents[1] / "shared" / "bench", help="the C sources")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        anyio.run(serve, *arguments.serve, backend_options={"use_uvloop": True})
        return
    seconds = 3.0 if arguments.quick else 4.0
    modes = [Mode("paced 1", 1, seconds / 2), Mode("paced 32", 32, seconds), Mode("paced 256", 256, seconds)]
    modes.append(Mode("lockstep 32", 32, seconds / 3, lockstep=True))
    with ExitStack() as stack:
        bench = Bench(stack, arguments.tools)
        found, gateway = measured(bench, modes, 1 if arguments.quick else arguments.rounds)
        goals = {**summary(found), "stall_ms_10mb": stall(bench, gateway)}
        goals["stall_ms_event_40mb"] = stall_by_event(bench, gateway)
        goals["fixed_us_per_request"] = fixed(bench, gateway)
        tee = bench.proxy("C tee")
        goals["fixed_us_per_request_c"] = fixed(bench, tee)
        goals |= memory(bench)
    table(found)
    rounded = {name: round(value, 3) for name, value in goals.items()}
    print("\n" + (json.dumps(rounded) if arguments.json else "\n".join(f"{k:<26} {v}" for k, v in rounded.items())))


if __name__ == "__main__":
    main()
