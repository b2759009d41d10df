"""`rollcage eval`, `report` and `compare` as processes: what they print, their exit codes, and kills at any moment."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import anyio
import pytest

from rollcage.cli.batch_screen import BatchScreen
from rollcage.evaluation.batches import BatchPlan, BatchView, TaskRef
from rollcage.evaluation.rows import BatchEntry, BatchRow
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.store.batches import batch_rows
from rollcage.types import Outcome, Stage
from support.commands import environ, rest, rollcage, rollcage_running, until

EVAL = ["eval", "tasks", "-m", "scripted", "--agent", "shell"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "good.toml").write_text('instruction = "touch a.txt"\nverify = ["test -e a.txt"]\n')
    (tasks / "poor.toml").write_text('instruction = "true"\nverify = ["test -e a.txt", "true"]\n')
    return tmp_path


async def rows(home: Path, name: str) -> list[BatchRow]:
    async with Store.open(home / "state" / "rollouts.db") as store:
        return await batch_rows(store, name)


def test_a_batch_is_run_shown_reported_and_compared(home: Path) -> None:
    ended = rollcage(home, *EVAL, "-n", "2", "--name", "one", "-o", "one.csv")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for words in ("batch one: 4 rollouts", "[4/4]", "good", "reward 0.5", "one  done  4 done, 0 running, 0 queued"):
        assert words in ended.stdout, ended.stdout
    with (home / "one.csv").open() as file:
        assert sorted(float(row["reward"]) for row in csv.DictReader(file)) == [0.5, 0.5, 1.0, 1.0]
    again = rollcage(home, *EVAL, "-n", "2", "--name", "one", "--json", "--require", "0.9")
    report = json.loads(again.stdout)
    assert again.returncode == 4 and report["overall"]["mean"] == 0.75 and report["overall"]["done"] == 4
    assert len(anyio.run(rows, home, "one")) == 4, "nothing ran twice"
    shown = rollcage(home, "report", "one")
    assert shown.returncode == 0 and "| good | scripted (shell) | 1.000 |" in shown.stdout
    (home / "tasks" / "poor.toml").write_text('instruction = "touch a.txt"\nverify = ["test -e a.txt", "true"]\n')
    changed = rollcage(home, *EVAL, "-n", "2", "--name", "one")
    assert changed.returncode == 2 and "task poor: " in changed.stderr and "--accept-changes" in changed.stderr
    assert rollcage(home, *EVAL, "--name", "two").returncode == 0
    found = rollcage(home, "compare", "one", "two")
    assert "2 tasks: 0.750 -> 1.000, difference +0.250" in found.stdout and "| poor | fixed |" in found.stdout
    assert json.loads(rollcage(home, "compare", "one", "two", "--json").stdout)["changed"] == ["poor"]
    assert "No task differs." in rollcage(home, "compare", "two", "two").stdout


def test_mistakes_are_said_before_anything_is_started(home: Path) -> None:
    (home / "none").mkdir()
    for arguments, words in (
        (["eval", "none", "-m", "scripted"], "no task file"),
        (["eval", "tasks", "-m", "gpt-9"], "names no endpoint"),
        (["eval", "tasks"], "no model is named"),
        (["eval", "--resume", "nothing"], "no batch 'nothing'"),
        (["eval", "tasks", "-m", "vllm", "--budget", "1"], "has no price"),
        (["report", "nothing"], "no"),
    ):
        ended = rollcage(home, *arguments)
        assert ended.returncode == 2 and words in ended.stderr, (arguments, ended.stdout, ended.stderr)
        assert "Traceback" not in ended.stderr


async def test_ctrl_c_stops_in_order_and_resume_goes_on(home: Path) -> None:
    (home / "tasks" / "slow.toml").write_text(
        'instruction = "until test -e /home/user/never; do sleep 0.1; done"\nverify = ["true"]\n'
    )
    async with rollcage_running(home, *EVAL, "--name", "cut") as process:
        await until(process, "[2/3]")
        os.kill(process.pid, signal.SIGINT)
        code, out, error = await rest(process)
    assert code == 130 and "--resume cut" in out, out + error
    assert "cut  interrupted  2 done, 0 running, 1 not run, 0 broken" in out and out.count("interrupted") == 2, out
    before = await rows(home, "cut")
    assert Counter(row.interrupted for row in before) == {False: 2, True: 1}
    (home / "tasks" / "slow.toml").write_text('instruction = "true"\nverify = ["true"]\n')
    ended = await anyio.to_thread.run_sync(lambda: rollcage(home, "eval", "--resume", "cut", "--accept-changes"))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(await rows(home, "cut")) == 4


async def test_the_second_process_on_a_batch_follows_the_first(home: Path) -> None:
    (home / "tasks" / "slow.toml").write_text('instruction = "sleep 3"\nverify = ["true"]\n')
    async with (
        rollcage_running(home, *EVAL, "--name", "both") as first,
        rollcage_running(home, *EVAL, "--name", "both") as second,
    ):
        codes = [(await rest(process))[0] for process in (first, second)]
    assert codes == [0, 0]
    assert Counter(row.cell for row in await rows(home, "both")).most_common(1)[0][1] == 1


async def test_whoever_follows_and_leaves_stops_nothing(home: Path) -> None:
    (home / "tasks" / "slow.toml").write_text('instruction = "until test -e /home/user/never; do sleep 0.1; done"\n')
    async with rollcage_running(home, *EVAL, "--name", "both") as first:
        await until(first, "[2/3]")
        async with rollcage_running(home, *EVAL, "--name", "both") as second:
            await until(second, "another process runs it")
            os.kill(second.pid, signal.SIGINT)
            code, out, error = await rest(second)
        assert code == 130 and "interrupted" not in out, out + error
        assert [row.outcome is None for row in await rows(home, "both")].count(True) == 1, "the first goes on"


@pytest.mark.slow
def test_killed_at_random_moments_nothing_is_lost_and_nothing_is_run_twice(home: Path) -> None:
    chance = random.Random(7)
    command = [sys.executable, "-m", "rollcage", *EVAL, "-n", "12", "--at-once", "4", "--name", "killed"]
    ended_before: dict[str, str] = {}
    for _ in range(10):
        child = subprocess.Popen(
            command, env=environ(home), cwd=home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert child.stdout
        # A number of lines is a moment in the batch's life, however slow the machine is; then it is any moment
        # of what comes next.
        for _ in range(chance.randint(1, 3)):
            child.stdout.readline()
        time.sleep(chance.random() * 0.5)
        child.kill()
        child.communicate()
        found = anyio.run(rows, home, "killed")
        results = {row.cell: row.rollout_id for row in found if row.outcome and not row.interrupted}
        assert ended_before.items() <= results.items(), "a result was lost"
        ended_before = results
    last = rollcage(home, *EVAL, "-n", "12", "--at-once", "4", "--name", "killed")
    assert last.returncode == 0, last.stdout + last.stderr
    found = anyio.run(rows, home, "killed")
    once = Counter(row.cell for row in found if not row.interrupted)
    assert len(once) == 24 and set(once.values()) == {1}, "every cell has one result"
    assert all(row.outcome for row in found) and any(row.interrupted for row in found)


@pytest.fixture
def small_disk(home: Path) -> Iterator[tuple[Path, list[str]]]:
    """A disk of its own for the state, as others reach it, and what runs a command that sees it in its place."""
    state = home / "state"
    state.mkdir()
    mounted = f"mount -t tmpfs -o size=32m none {state} && echo there && exec sleep infinity"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", mounted]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout and holder.stdout.readline() == "there\n"
            yield Path(f"/proc/{holder.pid}/root{state}"), ["nsenter", f"--mount=/proc/{holder.pid}/ns/mnt"]
        finally:
            holder.kill()


def fill(path: Path) -> None:
    """Take all the room there is."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 16))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
async def test_a_full_disk_stops_the_batch_and_it_goes_on_when_there_is_room(
    home: Path, small_disk: tuple[Path, list[str]]
) -> None:
    disk, nsenter = small_disk
    under = [*nsenter, "env", "-C", str(home)]

    def results() -> dict[str, str]:
        said = rollcage(home, "report", "full", "--format", "csv", under=under).stdout
        return {row["cell"]: row["rollout_id"] for row in csv.DictReader(said.splitlines()) if row["reward"]}

    async with rollcage_running(home, *EVAL, "-n", "12", "--at-once", "2", "--name", "full", under=under) as process:
        await until(process, "[3/24]")
        await anyio.to_thread.run_sync(fill, disk / "ballast")
        code, out, error = await rest(process)
    assert code not in (0, None) and "the disk is full" in error and "--resume full" in out, (code, out, error)
    before = await anyio.to_thread.run_sync(results)
    assert 3 <= len(before) < 24
    still = await anyio.to_thread.run_sync(lambda: rollcage(home, "eval", "--resume", "full", under=under))
    assert still.returncode and "the disk is full" in still.stderr, still.stdout + still.stderr
    (disk / "ballast").unlink()
    last = await anyio.to_thread.run_sync(lambda: rollcage(home, "eval", "--resume", "full", under=under))
    assert last.returncode == 0 and "[24/24]" in last.stdout and "[25/24]" not in last.stdout, last.stdout + last.stderr
    after = await anyio.to_thread.run_sync(results)
    assert len(after) == 24 and before.items() <= after.items(), "a result was lost, or run twice"


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_a_narrow_terminal_goes_without_columns_and_cuts_no_number(width: int, tmp_path: Path) -> None:
    plan = BatchPlan(
        name="b", tasks=(TaskRef(id="a-task-with-a-long-name" * 2, digest="d"),), models=("scripted",), n=12
    )
    cell = next(plan.cells())
    row = BatchRow("r", cell.key, cell.task.id, "scripted", "mini", 1, 1, *([None] * 10))  # type: ignore[arg-type]
    row = row._replace(reward=0.5, outcome=Outcome.FINISHED, turns=1, tokens=1234567, prompt_tokens=1, created_at=1.0)
    view = BatchView([BatchEntry(1, 1.0, "planned", plan.model_dump(mode="json"))], [row._replace(ended_at=100.0)])
    settings = Settings.from_environ({"HOME": str(tmp_path)})
    said = io.StringIO()
    shown = BatchScreen(settings, quiet=False)
    shown._console.file, shown._console.width = said, width
    shown.finish(view.report())
    lines = said.getvalue().splitlines()
    titles = next(line for line in lines if line.startswith("task")).split()
    assert {"mean", "pass@12", "done"} <= set(titles) and ("time" in titles) == (width >= 100), titles
    numbers = " ".join(line.split("scripted")[1] for line in lines if "scripted" in line)
    assert "0.500" in numbers and "1/12" in numbers and "…" not in numbers, lines


def test_the_live_table_says_what_runs_by_task_and_model(tmp_path: Path) -> None:
    plan = BatchPlan(name="b", tasks=(TaskRef(id="t", digest="d"), TaskRef(id="u", digest="d")), models=("m",), n=3)
    open_row = (Stage.AGENT, None, None, None, 1, 1, 1, 1.0, None, None)
    rows = [
        BatchRow(cell.key, cell.key, cell.task.id, "m", "mini", cell.sample, 1, *open_row)
        for cell in plan.cells()
        if cell.task.id == "t" and cell.sample < 3
    ]
    view = BatchView([BatchEntry(1, 1.0, "planned", plan.model_dump(mode="json"))], rows)
    shown, said = BatchScreen(Settings.from_environ({"HOME": str(tmp_path)}), quiet=False), io.StringIO()
    shown._console.file, shown._console.width = said, 120
    shown._console.print(shown._table(view.report(running=True), mine=True))
    head, titles, *lines = (line.split() for line in said.getvalue().splitlines())
    assert " ".join(head).startswith("b new 0 done, 2 running, 4 queued")
    at = titles.index("running")
    assert [(line[0], line[at]) for line in lines] == [("t", "2"), ("u", "0"), ("all", "2")]


async def test_lines_say_when_a_model_goes_away_and_when_it_is_back(tmp_path: Path) -> None:
    plan = BatchPlan(name="b", tasks=(TaskRef(id="t", digest="d"),), models=("m",), n=1)
    view = BatchView([BatchEntry(1, 1.0, "planned", plan.model_dump(mode="json")), BatchEntry(2, 2.0, "began", {})], [])
    said = io.StringIO()
    shown = BatchScreen(Settings.from_environ({"HOME": str(tmp_path)}), quiet=False)
    shown._console.file, shown._console.width = said, 80
    for kind in ("back", "paused", "paused", "back"):
        view.apply(BatchEntry(3, 3.0, kind, {"model": "m", "why": "connection refused"}))
        await shown.show(view, True)
    assert [line.split(":")[0] for line in said.getvalue().splitlines()] == ["! paused", "! goes on"], said.getvalue()
    shown.finish(view.report())
    titles = next(line for line in said.getvalue().splitlines() if line.startswith("task"))
    assert titles.count("pass@") == 1, "of one sample each, pass@k is pass@1"
