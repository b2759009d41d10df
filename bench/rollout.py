"""What isolation costs: a whole rollout beside the naked agent, and boxes beside plain processes, in one run.

    python bench/rollout.py [--json] [--quick]

The naked agent is the same OpenCode binary with the same lean configuration, started by hand on this machine and
answered by the same scripted model, which runs in a process of its own and costs both sides the same.
Rounds are interleaved, so that a noisy machine disturbs both sides alike; compare ratios, not seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from pydantic import SecretStr

from rollcage.agents.opencode.agent import OpenCode
from rollcage.agents.opencode.config import BINARY, config_of, environment_of
from rollcage.gateway import Gateway
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import run
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import Settings
from rollcage.store import Store
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


async def caged(runner: Runner, endpoint: Endpoint) -> None:
    """A whole rollout."""
    rollout = await runner.wait(await runner.start(Job(task=TASK, model=endpoint)))
    assert rollout.reward == 1, rollout.error


async def cost(work: Callable[[], Coroutine[Any, Any, None]], at_once: int = 1) -> tuple[float, float]:
    """Wall and processor seconds."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(work)
    return time.perf_counter() - wall, cpu_seconds() - cpu


async def rollouts(runner: Runner, layer: Path, endpoint: Endpoint, rounds: int) -> dict[str, float]:
    """Interleaved rounds of caged and naked, one at a time and eight at a time."""

    async def bare() -> None:
        await naked(layer, endpoint)

    async def boxed() -> None:
        await caged(runner, endpoint)

    await bare()
    await boxed()
    singles = [(await cost(bare), await cost(boxed)) for _ in range(rounds)]
    eights = [(await cost(bare, 8), await cost(boxed, 8)) for _ in range(max(1, rounds // 2))]

    def median(rows: list[tuple[tuple[float, float], tuple[float, float]]], side: int, what: int) -> float:
        return statistics.median(row[side][what] for row in rows)

    return {
        "naked_wall_s": median(singles, 0, 0),
        "caged_wall_s": median(singles, 1, 0),
        "wall_ratio": statistics.median(boxed[0] / bare[0] for bare, boxed in singles),
        "naked_cpu_s_8": median(eights, 0, 1) / 8,
        "caged_cpu_s_8": median(eights, 1, 1) / 8,
        "cpu_ratio_8": statistics.median(boxed[1] / bare[1] for bare, boxed in eights),
    }


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


async def measure(quick: bool) -> dict[str, object]:
    """Everything, as one object."""
    state = Settings.from_environ(os.environ).home
    agent = OpenCode(state / "cache")
    with tempfile.TemporaryDirectory() as folder:
        async with (
            scripted_model() as endpoint,
            Store.open(Path(folder) / "log.db") as store,
            Gateway.open() as gateway,
            LocalProvider(state) as provider,
        ):
            layers = list(agent.layers())
            layer = await provider.layers.ensure(layers[0])
            backends = Registry(providers={"local": provider}, agents={"opencode": agent}, gateway=gateway)
            result: dict[str, object] = {}
            result |= await boxes(provider, list(layers), 10 if quick else 30)
            result["growth"] = await growth(provider, list(layers), [1, 10] if quick else [1, 10, 50, 100, 200])
            result["box_idle_mb"] = result["growth"][-1]["idle_mb"]  # type: ignore[index]
            async with Runner.open(store, backends, at_once=8) as runner:
                result |= await rollouts(runner, layer, endpoint, 2 if quick else 7)
            return result


GOALS = {"wall_ratio": 1.10, "cpu_ratio_8": 1.10, "box_create_ms": 25, "box_exec_ms": 20, "box_idle_mb": 2}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a measurement")
    arguments = parser.parse_args()
    result = anyio.run(measure, arguments.quick)
    for name, value in result.items():
        if isinstance(value, float):
            goal = f"   goal <= {GOALS[name]:g}" if name in GOALS else ""
            print(f"{name:>16} {value:10.3f}{goal}")
    for row in result["growth"]:  # type: ignore[attr-defined]
        print("  ".join(f"{name} {value:.2f}" for name, value in row.items()))
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
