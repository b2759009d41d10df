"""What a batch costs beside the same rollouts started one by one, and what a large one takes.

    python bench/eval.py [--rollouts 200] [--finished 10000] [--json]

- overhead: time and processor time (of this process, boxes left out) of a batch of cheap rollouts (agent `nop`, no
  model) over that of as many `runner.start` calls with the same number at once: `PAIRS` batches, each beside its calls,
  in turn and in one process; medians and quartiles of their ratios.
- first row: from the start of `BatchRun.run` to the first rollout that is told of.
- memory: resident memory of a process that runs a batch of `--finished` rollouts, with a tenth of them finished and
  with all; and what it costs to read such a batch from its log and to report it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import anyio

from rollcage.evaluation.batches import BatchPlan, Cell, TaskRef
from rollcage.evaluation.rows import BatchRow
from rollcage.events import Ended, Queued, Scored
from rollcage.runner import Runner
from rollcage.runner.batch import BatchLimits, BatchRun, CellJob, batch_view
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.store.batches import add_to_batch, batch_rows
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome, Reward, Task
from rollcage.wiring import opened_runner

AT_ONCE = 4
PAIRS = 6


def used() -> float:
    """Processor seconds of this process and of all its children that have ended."""
    return sum(each.ru_utime + each.ru_stime for each in map(resource.getrusage, (0, resource.RUSAGE_CHILDREN)))


def job(name: str) -> Job:
    """A rollout that does nothing and is verified."""
    task = Task(id=name, instruction="Nothing.", verify=("true",))
    return Job(task=task, model=NO_MODEL, agent=AgentSpec(name="nop"))


async def singles(runner: Runner, count: int) -> dict[str, float]:
    """As many `runner.start` calls; the queue of the runner holds the number at once."""
    began = time.monotonic()
    ids = [await runner.start(job(f"t{n}")) for n in range(count)]
    for n, each in enumerate(ids):
        await runner.over(each)
        if n == 0:
            first = time.monotonic() - began
    return {"first_s": first}


async def batch(runner: Runner, store: Store, count: int, name: str) -> dict[str, float]:
    """The same as a batch."""
    plan = BatchPlan(name=name, tasks=tuple(TaskRef(id=f"t{n}", digest="d") for n in range(count)))
    await add_to_batch(store, plan.name, "planned", plan.model_dump(mode="json"))

    def make(cell: Cell) -> CellJob:
        return CellJob(job(cell.task.id), lambda: None)

    run = BatchRun(runner, store, await batch_view(store, plan.name), make, BatchLimits(at_once=AT_ONCE))
    told: list[float] = []

    def on_row(row: BatchRow) -> None:
        told.append(time.monotonic())

    run.on_row = on_row
    began = time.monotonic()
    await run.run()
    report = run.view.report()
    if report.overall.scored != count:
        raise SystemExit(f"only {report.overall.scored} of {count} were scored")
    return {"first_s": told[0] - began}


async def pairs(runner: Runner, store: Store, count: int) -> dict[str, Any]:
    """Batches of so many rollouts, each beside as many calls; what comes first alternates."""
    first = []
    ratios: dict[str, list[float]] = {"cpu_ratio": [], "wall_ratio": []}
    for number in range(PAIRS):
        took: dict[str, tuple[float, float]] = {}
        for kind in ("singles", "batch")[:: 1 if number % 2 else -1]:
            before = used(), time.monotonic()
            found = await (singles(runner, count) if kind == "singles" else batch(runner, store, count, f"b{number}"))
            took[kind] = used() - before[0], time.monotonic() - before[1]
            if kind == "batch":
                first.append(found["first_s"])
        for each, one, other in zip(ratios.values(), took["batch"], took["singles"], strict=True):
            each.append(one / other)
    spread = {
        name: dict(zip(("low", "median", "high"), quantiles(each, n=4), strict=True)) for name, each in ratios.items()
    }
    return {**spread, "first_row_s": median(first)}


async def part(kind: str, count: int) -> dict[str, Any]:
    """One measurement, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(home=Path(folder))
        async with Store.open(settings.log_path) as store:
            if kind == "memory":
                return await memory(store, count)
            async with opened_runner(settings, store, at_once=AT_ONCE) as runner:
                await runner.wait(await runner.start(job("warm")))
                return await pairs(runner, store, count)


async def memory(store: Store, count: int) -> dict[str, float]:
    """A batch of so many rollouts that end one after the other, told and reported as whoever runs it does."""
    tasks = tuple(TaskRef(id=f"t{n}", digest="d") for n in range(count // 10))
    plan = BatchPlan(name="bench", tasks=tasks, n=10)
    await add_to_batch(store, plan.name, "planned", plan.model_dump(mode="json"))
    one, view = job("t"), await batch_view(store, plan.name)

    async def end(name: str, cell: Cell) -> None:
        await store.append(name, Queued(job=one, batch=cell.place(plan.name, "nop", 1)))
        await store.append(name, Scored(reward=Reward(total=1.0)))
        await store.append(name, Ended(outcome=Outcome.FINISHED))
        view.add((await batch_rows(store, plan.name, rollout_id=name))[0])

    resident = []
    cells = plan.cells()
    for at in range(0, count, 100):
        async with anyio.create_task_group() as ending:
            for number, cell in enumerate(islice(cells, 100), at):
                ending.start_soon(end, f"{number:032x}", cell)
        if at + 100 in (count // 10, count):
            view.report()
            resident.append(_resident())
    began = used()
    again = await batch_view(store, plan.name)
    read = used()
    report = again.report()
    done = used()
    again.add(again.current[0])
    again.report()
    if report.overall.done != count or report != view.report():
        raise SystemExit(f"only {report.overall.done} of {count}")
    return {
        "tenth_mb": resident[0],
        "rss_mb": resident[1],
        "read_cpu_s": read - began,
        "report_cpu_s": done - read,
        "report_again_cpu_s": used() - done,
    }


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measured(kind: str, count: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--part", kind, "--count", str(count)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def main() -> None:
    """Measure, and say it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--finished", type=int, default=10_000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(anyio.run(part, asked.part, asked.count)))
        return
    found = {
        "rollouts": asked.rollouts,
        **measured("pairs", asked.rollouts),
        "finished": measured("memory", asked.finished),
    }
    if asked.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            print(f"{name:<14} {value}")


if __name__ == "__main__":
    main()
