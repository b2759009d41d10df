"""What isolation costs: a whole rollout beside the naked agent, and boxes beside plain processes, in one run.

    python bench/rollout.py [--json] [--quick] [--rounds 20] [--only boxes|pairs|warm|eights]

The naked agent is the same OpenCode binary with the same lean configuration, started by hand on this machine and
answered by the same scripted model, which runs in a process of its own and costs both sides the same.
Pairs are alternated, so that a noisy machine disturbs both sides alike: the ratio is that within pairs, its median and
its quartiles. CPU of the naked agent is that of its processes; CPU of a rollout is all that this process and its boxes
used. `warm` is a rollout in a box of the warm pool, whose server was started before; that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from pydantic import SecretStr

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.agent import OpenCode
from rollcage.agents.opencode.config import BINARY, config_of, environment_of
from rollcage.gateway import Gateway
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import run
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.sandboxes.pool import Pool
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.store.work import WorkStore
from rollcage.types import HOME, AgentSpec, Endpoint, Job, SandboxSpec, ScriptedCall, ScriptedTurn, Task

SCRIPT = (
    ScriptedTurn(
        tool_calls=(ScriptedCall(name="bash", arguments={"command": "echo hello > hello.txt", "description": "write"}),)
    ),
    ScriptedTurn(
        tool_calls=(ScriptedCall(name="bash", arguments={"command": "cat hello.txt", "description": "read"}),)
    ),
    ScriptedTurn(text="hello.txt says hello."),
)
ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
TASK = Task(instruction="Write hello to hello.txt and read it back.", verify=("grep -qx hello hello.txt",))

SERVER = """
import sys, anyio
from rollcage.simulators import ScriptedModel
from bench_script import SCRIPT
async def main():
    async with ScriptedModel() as model:
        endpoint = model.endpoint(SCRIPT)
        print(endpoint.base_url, endpoint.key.get_secret_value(), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)
anyio.run(main)
"""


@asynccontextmanager
async def scripted_model() -> AsyncIterator[Endpoint]:
    """The scripted model in another process."""
    folder = str(Path(__file__).parent)
    code = SERVER.replace("bench_script", "rollout")
    environment = {**os.environ, "PYTHONPATH": folder}
    process = await anyio.to_thread.run_sync(
        lambda: subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    )
    assert process.stdout and process.stdin
    base_url, key = process.stdout.readline().split()
    try:
        yield Endpoint(base_url=base_url, model="scripted", key=SecretStr(key), kind="scripted")
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def cpu_seconds() -> float:
    """Processor time this machine has spent in all: what boxes run is nobody's child that could be asked."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


class Cost:
    """Wall and CPU. What boxes run is nobody's child that could be asked: a control group counts it."""

    def __init__(self) -> None:
        self._group = ACCOUNTS / f"rollcage-bench-{os.getpid()}"
        if (ACCOUNTS / "cpuacct.usage").exists():
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(os.getpid()))

    def used(self) -> float:
        """Seconds so far, of this process and all that it started; without such a group, of the whole machine."""
        counter = self._group / "cpuacct.usage"
        return int(counter.read_text()) / 1e9 if counter.exists() else cpu_seconds()

    def close(self) -> None:
        """Leave the group, and remove it."""
        if self._group.exists():
            (ACCOUNTS / "cgroup.procs").write_text(str(os.getpid()))
            self._group.rmdir()

    async def caged(self, work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
        """Of a rollout."""
        wall, cpu = time.perf_counter(), self.used()
        await work()
        return time.perf_counter() - wall, self.used() - cpu

    async def naked(self, work: Callable[[], Awaitable[object]]) -> tuple[float, float]:
        """Of a child and all that it waited for."""
        wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        await work()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - wall, used


@asynccontextmanager
async def counted() -> AsyncIterator[Cost]:
    """Counts what is started in the block; the scripted model is started before."""
    cost = Cost()
    try:
        yield cost
    finally:
        cost.close()


async def naked(layer: Path, endpoint: Endpoint) -> None:
    """`opencode run` on this machine, in a new home directory, with the same configuration."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        environment = {
            name: value.replace(HOME, home) for name, value in environment_of(config_of(AgentSpec(), endpoint)).items()
        }
        environment |= {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"}
        await anyio.to_thread.run_sync(lambda: subprocess.run(["cp", "-r", str(layer / ".config"), home], check=True))
        binary = str(layer / Path(BINARY).relative_to(HOME))
        done = await anyio.run_process(
            [binary, "run", "--format", "json", "--thinking"],
            input=TASK.instruction.encode(),
            env=environment,
            cwd=home,
            start_new_session=True,
        )
        assert b"says hello" in done.stdout, done


async def caged(runner: Runner, endpoint: Endpoint) -> dict[str, float]:
    """A whole rollout; the seconds of its stages."""
    rollout = await runner.wait(await runner.start(Job(task=TASK, model=endpoint)))
    assert rollout.reward == 1, rollout.error
    return rollout.timings


async def eights(runner: Runner, layer: Path, endpoint: Endpoint, rounds: int) -> dict[str, float]:
    """Processor seconds of a rollout where eight run at once, beside eight naked agents."""

    async def cost(work: Callable[[], Coroutine[Any, Any, object]]) -> float:
        before = cpu_seconds()
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(work)
        return (cpu_seconds() - before) / 8

    rows = [
        (await cost(lambda: naked(layer, endpoint)), await cost(lambda: caged(runner, endpoint))) for _ in range(rounds)
    ]
    return {
        "naked_cpu_s_8": statistics.median(bare for bare, _ in rows),
        "caged_cpu_s_8": statistics.median(boxed for _, boxed in rows),
        "cpu_ratio_8": statistics.median(boxed / bare for bare, boxed in rows),
    }


async def pairs(
    runner: Runner, layer: Path, endpoint: Endpoint, rounds: int, cost: Cost, pool: Pool | None = None
) -> dict[str, float]:
    """A naked agent and a rollout in turn, one at a time, the first of each pair in turn too: ratios within pairs."""
    kind, stages = ("warm" if pool else "caged"), list[dict[str, float]]()

    async def boxed() -> None:
        stages.append(await caged(runner, endpoint))

    async def one(side: int) -> tuple[float, float]:
        while pool and pool.ready < 2:
            await anyio.sleep(0.05)
        return await (cost.caged(boxed) if side else cost.naked(lambda: naked(layer, endpoint)))

    rows = list[tuple[tuple[float, float], tuple[float, float]]]()
    for number in range(-1, rounds):
        order = (0, 1) if number % 2 else (1, 0)
        found = {side: await one(side) for side in order}
        if number >= 0:
            rows.append((found[0], found[1]))
    result = {}
    for place, what in enumerate(("wall", "cpu")):
        result[f"{kind}_{what}_s"] = statistics.median(row[1][place] for row in rows)
        result[f"{kind}_naked_{what}_s"] = statistics.median(row[0][place] for row in rows)
        ratios = sorted(row[1][place] / row[0][place] for row in rows)
        low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
        result |= {f"{kind}_{what}_ratio": middle, f"{kind}_{what}_low": low, f"{kind}_{what}_high": high}
        naked_alone = [row[0][place] for row in rows]
        result[f"{kind}_naked_{what}_spread"] = (max(naked_alone) - min(naked_alone)) / statistics.median(naked_alone)
    for stage in stages[-1]:
        result[f"{kind}_{stage}_ms"] = statistics.median(row[stage] for row in stages[1:]) * 1000
    return result


def available_mb() -> float:
    """Memory the kernel could still give out."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no MemAvailable")


async def boxes(provider: LocalProvider, layers: list[object], rounds: int) -> dict[str, float]:
    """Medians of create, exec and close, beside a plain subprocess."""
    times: dict[str, list[float]] = {name: [] for name in ("plain", "create", "exec", "close")}
    for _ in range(rounds):
        times["plain"].append(await clocked(lambda: anyio.run_process(["/bin/true"])))
        opening = provider.open(SandboxSpec(), layers)  # type: ignore[arg-type]
        started = time.perf_counter()
        box = await opening.__aenter__()
        times["create"].append(time.perf_counter() - started)
        times["exec"].append(await clocked(lambda box=box: run(box, ["/bin/true"])))  # type: ignore[misc]
        times["close"].append(await clocked(lambda opening=opening: opening.__aexit__(None, None, None)))  # type: ignore[misc]
    return {f"box_{name}_ms": statistics.median(values) * 1000 for name, values in times.items()}


async def clocked(work: Callable[[], Awaitable[object]]) -> float:
    """Wall seconds of one call."""
    started = time.perf_counter()
    await work()
    return time.perf_counter() - started


async def growth(provider: LocalProvider, layers: list[object], counts: list[int]) -> list[dict[str, float]]:
    """How create, exec and memory grow with the number of open boxes."""
    rows = []
    async with AsyncExitStack() as stack:
        open_boxes, before, created = 0, available_mb(), list[float]()
        for count in counts:
            while open_boxes < count:
                started = time.perf_counter()
                box = await stack.enter_async_context(provider.open(SandboxSpec(), layers))  # type: ignore[arg-type]
                created.append(time.perf_counter() - started)
                open_boxes += 1
            execs = [await clocked(lambda box=box: run(box, ["/bin/true"])) for _ in range(5)]  # type: ignore[misc]
            rows.append(
                {
                    "boxes": count,
                    "create_ms": statistics.median(created[-10:]) * 1000,
                    "exec_ms": statistics.median(execs) * 1000,
                    "idle_mb": (before - available_mb()) / count,
                }
            )
    return rows


PARTS = ("boxes", "pairs", "warm", "eights")


async def measure(parts: Sequence[str], rounds: int) -> dict[str, object]:
    """Everything that is asked for, as one object."""
    state = Settings.from_environ(os.environ).home
    agent = OpenCode(Downloads(state / "cache"))
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            scripted_model() as endpoint,
            Store.open(Path(folder) / "log.db") as store,
            Gateway.open() as gateway,
            counted() as cost,
            LocalProvider(state) as provider,
        ):
            layers = list(agent.layers())
            layer = await provider.layers.ensure(layers[0])
            if "boxes" in parts:
                result |= await boxes(provider, list(layers), max(10, rounds))
                counts = [1, 10, 50, 100, 200] if rounds >= 20 else [1, 10]
                result["growth"] = await growth(provider, list(layers), counts)
                result["box_idle_mb"] = result["growth"][-1]["idle_mb"]  # type: ignore[index]
            # As `rollcage run` and `rollcage serve` do, it keeps the agent's work.
            kept: dict[str, Any] = {"gateway": gateway, "work": WorkStore(Path(folder) / "work", 1 << 30)}
            backends = Registry(providers={"local": provider}, agents={"opencode": agent}, **kept)
            async with Runner.open(store, backends, at_once=8) as runner:
                if "pairs" in parts:
                    result |= await pairs(runner, layer, endpoint, rounds, cost)
                if "eights" in parts:
                    result |= await eights(runner, layer, endpoint, max(1, rounds // 6))
            if "warm" in parts:
                async with Pool.over(provider, size=1, warmer=agent, pause_s=2) as pool:
                    pool.prepare(SandboxSpec(), layers)
                    pool.prepare(SandboxSpec())
                    backends = Registry(providers={"local": pool}, agents={"opencode": agent}, **kept)
                    async with Runner.open(store, backends, at_once=8) as runner:
                        result |= await pairs(runner, layer, endpoint, rounds, cost, pool)
    return result


GOALS = {"caged_wall_ratio": 1.05, "warm_wall_ratio": 0.6, "cpu_ratio_8": 1.10, "box_create_ms": 25, "box_exec_ms": 20}
GOALS |= {"box_idle_mb": 2}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a measurement")
    parser.add_argument("--rounds", type=int, default=0, help="how many pairs (20)")
    parser.add_argument("--only", choices=PARTS, action="append", help="not all of it")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (3 if arguments.quick else 20)
    result = anyio.run(measure, arguments.only or PARTS, rounds)
    for name, value in result.items():
        if isinstance(value, float):
            goal = f"   goal <= {GOALS[name]:g}" if name in GOALS else ""
            print(f"{name:>24} {value:10.3f}{goal}")
    for row in result.get("growth", ()):  # type: ignore[attr-defined]
        print("  ".join(f"{name} {value:.2f}" for name, value in row.items()))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
