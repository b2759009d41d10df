"""What each way of driving OpenCode costs: `run`, `serve`, and a warm server of the pool, in one run.

    python bench/drivers.py [--json] [--rounds 5]

The same task, answered by the same scripted model, which runs in a process of its own. Rounds are interleaved; of each
quantity the median counts. Compare ratios, not seconds: others may use the machine too.

`first` is the time from the start of the rollout to the model's first call; `agent` the AGENT stage; `total` the
rollout. `cpu` is what this process and everything in the boxes used until the rollout was over, looked at twenty times
a second; `ahead` is what of it had been spent before the rollout was asked for.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.agent import OpenCode
from rollcage.events import StageStarted, TurnEnded
from rollcage.gateway import Gateway
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import Provider
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.sandboxes.pool import Pool
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.types import AgentSpec, Endpoint, Job, SandboxSpec
from rollout import TASK, scripted_model

WAYS = ("run", "serve", "warm")


class Usage:
    """Processor time of this process and of all that it started, the scripted model aside."""

    def __init__(self, apart: int) -> None:
        self._apart, self._ticks = apart, os.sysconf("SC_CLK_TCK")
        self._used: dict[tuple[int, str], float] = {}

    def look(self) -> float:
        """Seconds so far. What lived and died between two looks is missed."""
        rows: dict[int, tuple[int, str, float]] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            rows[int(path.parent.name)] = (
                int(fields[1]),
                fields[19],
                (int(fields[11]) + int(fields[12])) / self._ticks,
            )
        for pid, (_, since, used) in rows.items():
            above: int | None = pid
            while above in rows and above not in (os.getpid(), self._apart):
                above = rows[above][0]
            if above == os.getpid():
                self._used[pid, since] = used
        return sum(self._used.values())

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await anyio.sleep(0.05)


async def measure(way: str, endpoint: Endpoint, store: Store, usage: Usage) -> dict[str, float]:
    """One rollout."""
    home = Settings.from_environ(os.environ).home
    before = usage.look()
    agent = OpenCode(Downloads(home / "cache"))
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway.open())
        boxes: Provider = await stack.enter_async_context(LocalProvider(home))
        if way == "warm":
            pool = await stack.enter_async_context(Pool.over(boxes, size=1, warmer=agent))
            pool.prepare(SandboxSpec(), agent.layers())
            pool.prepare(SandboxSpec())
            while pool.ready < 2:
                await anyio.sleep(0.01)
            boxes = pool
        else:
            async with boxes.open(SandboxSpec(), agent.layers()):
                pass  # the fork server is up
        backends = Registry({"local": boxes}, {"opencode": agent}, gateway)
        runner = await stack.enter_async_context(Runner.open(store, backends))
        job = Job(task=TASK, model=endpoint, agent=AgentSpec(driver="" if way == "warm" else way))
        asked = usage.look()
        rollout = await runner.wait(await runner.start(job))
        after = usage.look()
        assert rollout.reward == 1, rollout.error
    entries = await store.read(rollout.id)
    began = next(entry.time for entry in entries if isinstance(entry.event, StageStarted))
    first = next(entry.event.turn.started_at for entry in entries if isinstance(entry.event, TurnEnded))
    agent_s, total = rollout.timings["agent"], rollout.timings["total"]
    return {
        "first": first - began,
        "agent": agent_s,
        "total": total,
        "cpu": after - before,
        "ahead": asked - before,
    }


async def main(rounds: int, *, as_json: bool) -> None:
    """Measure and print."""
    rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            scripted_model() as endpoint,
            Store.open(Path(folder) / "log.db") as store,
            anyio.create_task_group() as tasks,
        ):
            children = (path.read_text().split() for path in Path("/proc/self/task").glob("*/children"))
            [model] = (int(pid) for pids in children for pid in pids)
            usage = Usage(model)
            tasks.start_soon(usage.watch)
            await measure("run", endpoint, store, usage)
            for _ in range(rounds):
                for way in WAYS:
                    rows[way].append(await measure(way, endpoint, store, usage))
            tasks.cancel_scope.cancel()
    table = {way: {name: statistics.median(row[name] for row in rows[way]) for name in rows[way][0]} for way in WAYS}
    if as_json:
        print(json.dumps(table))
        return
    print(f"{'':8}" + "".join(f"{name:>16}" for name in table["run"]))
    for way, row in table.items():
        cells = (f"{value:7.2f} s {value / table['run'][name]:5.2f}x" for name, value in row.items())
        print(f"{way:8}" + "".join(f"{cell:>16}" for cell in cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    anyio.run(lambda: main(arguments.rounds, as_json=arguments.json))
