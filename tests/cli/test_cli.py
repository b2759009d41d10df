"""The command as people run it: real processes, real logs, exit codes, and one line where something is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import click
import pytest

from rollcage.cli import rollcage as cli
from rollcage.events import AbortRequested, Ended, Event, Queued, StageStarted
from rollcage.results.result import RolloutResult
from rollcage.runner import Owners
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Outcome, Stage, Task
from support.commands import environ, rest, rollcage, rollcage_running, until

JOB = Job(task=Task(id="t1", instruction="Do it."), model=Endpoint(base_url="http://h/v1", model="m1", kind="vllm"))


def complaint(ended: subprocess.CompletedProcess[str], code: int) -> str:
    """The one line on stderr."""
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith("rollcage: ") and ended.stderr.count("\n") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.removeprefix("rollcage: ").strip()


@asynccontextmanager
async def log_with(home: Path, *events: Event, rollout_id: str = "0a1b2c3d") -> AsyncIterator[Store]:
    """A log with one rollout in it that this process owns."""
    async with Store.open(home / "state" / "rollouts.db") as store:
        with Owners.beside(store).hold() as owner:
            await store.append(rollout_id, Queued(job=JOB, owner=owner))
            for event in events:
                await store.append(rollout_id, event)
            yield store


def test_help_comes_at_once_and_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rollcage.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'pydantic', 'anyio', 'rich', 'asyncio', 'uvicorn', 'msgspec'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "Exit codes:" in ended.stdout and "130" in ended.stdout
    took = []
    for _ in range(5):
        before = os.times()
        assert rollcage(tmp_path, "--help").returncode == 0
        after = os.times()
        took.append(after.children_user + after.children_system - before.children_user - before.children_system)
    # The processor's time: how long one waits for it depends on what else the machine does.
    assert min(took) < 0.4, took


GROUPS = [name for name, command in cli.commands.items() if isinstance(command, click.Group)]


@pytest.mark.parametrize("group", ["", *GROUPS])
def test_help_says_what_each_command_does_in_one_whole_line(tmp_path: Path, group: str) -> None:
    shown = rollcage(tmp_path, *group.split(), "--help").stdout
    rows = re.search(r"^Commands:\n((?:  .*\n?)+)", shown, re.MULTILINE)
    assert rows
    assert [row for row in rows[1].splitlines() if not row.endswith((".", "?")) or row.endswith("...")] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu"], "did you mean 'run'"),
        (["run", "--tmeout", "3"], "--timeout"),
        (["run"], "--instruction"),
        (["run", "-i", "   ", "-e", "scripted"], "instruction is empty"),
        (["run", "-i", "x"], "--endpoint"),
        (["run", "-i", "x", "-e", "vlm"], "did you mean 'vllm'"),
        (["run", "-i", "x", "-e", "vllm"], "VLLM_URL"),
        (["run", "-i", "x", "-e", "openai"], "OPENAI_API_KEY"),
        (["run", "-i", "x", "-e", "hf_router"], "HF_ROUTER_API_KEY"),
        (["run", "-i", "x", "--base-url", "http://h", "--api-key", "k"], "--model"),
        (["run", "-i", "x", "-e", "scripted", "--timeout", "nan"], "--timeout"),
        (["run", "-i", "x", "-e", "scripted", "--agent-timeout", "-1"], "--agent-timeout"),
        (["run", "-i", "x", "-e", "scripted", "--mode", "open"], "transparent_proxy"),
        (["run", "-i", "x", "-e", "scripted", "--test-script", "gone.sh"], "gone.sh"),
        (["run", "-i", "x", "-e", "scripted", "--agent", "nobody"], "nobody"),
        (["run", "-i", "x", "-e", "scripted", "--sandbox", "nowhere"], "nowhere"),
        (["run", "gone.toml"], "gone.toml: no such file"),
        (["run", "examples/paginate.toml"], "rollcage/examples/paginate.toml"),
        (["eval", "examples", "-m", "scripted"], "it comes with rollcage: "),
        (["run", "-i", "x", "-e", "scripted", "--follow"], "--json"),
        (["show", "x", "--events", "--turns"], "do not go together"),
        (["show", "abc"], "no rollouts yet"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy_and_exit_code_2(
    tmp_path: Path, arguments: list[str], words: str
) -> None:
    assert words.lower() in complaint(rollcage(tmp_path, *arguments), 2).lower()


def test_bad_input_leaves_nothing_behind(tmp_path: Path) -> None:
    assert rollcage(tmp_path, "run", "-i", "x", "-e", "vllm").returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_every_problem_of_a_task_file_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('instrution = "x"\nsetup = 3\n')
    ended = rollcage(tmp_path, "run", "t.toml")
    assert ended.returncode == 2
    lines = ended.stderr.strip().split("\n")
    assert len(lines) == 3 and all(line.startswith("rollcage: t.toml: ") for line in lines), lines
    assert any("did you mean 'instruction'?" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["run", "gone.toml", "--json"], 2, "bad_task"),
        (["run", "-i", "x", "--json"], 2, "usage"),
        (["run", "--json", "--nonsense"], 2, "usage"),
        (["show", "abc", "--json"], 2, "unknown_rollout"),
    ],
)
def test_with_json_an_error_is_a_document_too(tmp_path: Path, arguments: list[str], code: int, word: str) -> None:
    ended = rollcage(tmp_path, *arguments)
    assert ended.returncode == code
    document = json.loads(ended.stdout)
    assert document["error_code"] == word and document["error"] and ended.stderr.startswith("rollcage: ")


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    ended = rollcage(tmp_path, "run", "gone.toml", env={"ROLLCAGE_DEBUG": "1"})
    assert ended.returncode == 2 and "Traceback" in ended.stderr and "TaskError" in ended.stderr


def test_an_error_cannot_smuggle_codes_into_the_terminal(tmp_path: Path) -> None:
    ended = rollcage(tmp_path, "run", "\x1b[2J\x9b31m.toml")
    assert "\x1b" not in ended.stderr and "\x9b" not in ended.stderr and "no such file" in ended.stderr


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    options = ["--base-url", "ftp://h", "--api-key", "sk-hidden", "--model", "m"]
    for debug in ("", "1"):
        ended = rollcage(tmp_path, "run", "-i", "x", *options, "--json", env={"ROLLCAGE_DEBUG": debug})
        assert ended.returncode == 2 and "sk-hidden" not in ended.stdout + ended.stderr


def test_a_state_folder_that_cannot_be_is_a_machine_that_is_not_ready(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    said = complaint(rollcage(tmp_path, "run", "-i", "x", "-e", "scripted"), 3)
    assert "state" in said


def test_an_empty_log_is_said_kindly(tmp_path: Path) -> None:
    ended = rollcage(tmp_path, "ls")
    assert ended.returncode == 0 and "no rollouts yet" in ended.stdout
    assert json.loads(rollcage(tmp_path, "ls", "--json").stdout) == []
    assert not (tmp_path / "state").exists()


async def test_ls_and_show_read_the_log_of_another_process(tmp_path: Path) -> None:
    async with log_with(tmp_path, StageStarted(stage=Stage.AGENT)):
        table = rollcage(tmp_path, "ls").stdout
        assert "0a1b2c3d" in table and "agent" in table and "m1" in table
        [row] = json.loads(rollcage(tmp_path, "ls", "--open", "--json").stdout)
        assert (row["id"], row["task_id"], row["outcome"]) == ("0a1b2c3d", "t1", None)
        assert "running: agent" in rollcage(tmp_path, "show", "0a1b").stdout
        result = RolloutResult.model_validate_json(rollcage(tmp_path, "show", "0a", "--json").stdout)
        assert (result.rollout_id, result.task_id, result.outcome) == ("0a1b2c3d", "t1", None)
        events = json.loads(rollcage(tmp_path, "show", "0a", "--events", "--json").stdout)
        assert [entry["event"]["kind"] for entry in events] == ["queued", "stage_started"]
        assert "stage_started" in rollcage(tmp_path, "show", "0a", "--events").stdout
        assert json.loads(rollcage(tmp_path, "show", "0a", "--turns", "--json").stdout) == []
        assert rollcage(tmp_path, "show", "0a", "--turns").returncode == 0
        assert "no rollout ffff" in complaint(rollcage(tmp_path, "show", "ffff"), 2)


async def test_what_a_dead_process_left_open_is_shown_as_crashed(tmp_path: Path) -> None:
    async with log_with(tmp_path, StageStarted(stage=Stage.AGENT)):
        pass
    [row] = json.loads(rollcage(tmp_path, "ls", "--json").stdout)
    assert row["outcome"] == "crashed"
    assert rollcage(tmp_path, "watch", "0a").returncode == 1


async def test_watch_follows_a_rollout_of_another_process_to_its_end(tmp_path: Path) -> None:
    async with (
        log_with(tmp_path, StageStarted(stage=Stage.SETUP)) as store,
        rollcage_running(tmp_path, "watch", "0a1b") as process,
    ):
        await until(process, "● setup")
        await store.append("0a1b2c3d", StageStarted(stage=Stage.AGENT))
        await until(process, "● agent")
        await store.append("0a1b2c3d", Ended(outcome=Outcome.FINISHED))
        code, seen, _ = await rest(process)
        assert code == 0 and "◆ finished" in seen and "\x1b" not in seen


async def test_watch_with_json_gives_one_entry_per_line(tmp_path: Path) -> None:
    async with log_with(tmp_path, Ended(outcome=Outcome.SETUP_FAILED, error="x", error_code="y")):
        ended = rollcage(tmp_path, "watch", "0a", "--json")
    kinds = [json.loads(line)["event"]["kind"] for line in ended.stdout.splitlines()]
    assert kinds == ["queued", "ended"] and ended.returncode == 1


async def test_leaving_a_watch_does_not_touch_the_rollout(tmp_path: Path) -> None:
    async with (
        log_with(tmp_path, StageStarted(stage=Stage.SETUP)) as store,
        rollcage_running(tmp_path, "watch", "0a1b") as process,
    ):
        await until(process, "● setup")
        process.send_signal(signal.SIGINT)
        code, _, said = await rest(process)
        assert code == 130 and "Traceback" not in said
        rollout = await store.rollout("0a1b2c3d")
        assert not rollout.ended and not rollout.abort_requested


async def test_abort_asks_the_process_that_runs_it_and_waits_for_the_end(tmp_path: Path) -> None:
    async with log_with(tmp_path, StageStarted(stage=Stage.AGENT)) as store:
        requests = store.follow_kind("abort_requested")
        async with rollcage_running(tmp_path, "abort", "0a", "--reason", "enough", "--json") as process:
            async with aclosing(requests):
                asked = await anext(requests)
            assert isinstance(asked.event, AbortRequested) and asked.event.reason == "enough"
            assert process.returncode is None
            await store.append("0a1b2c3d", Ended(outcome=Outcome.ABORTED, error="aborted: x", error_code="aborted"))
            code, document, _ = await rest(process)
            assert code == 0 and json.loads(document)["outcome"] == "aborted"
    ended = rollcage(tmp_path, "abort", "0a")
    assert ended.returncode == 0 and "had ended already: aborted" in ended.stdout


async def test_abort_says_so_when_nobody_obeys(tmp_path: Path) -> None:
    async with log_with(tmp_path, StageStarted(stage=Stage.AGENT)):
        assert "--wait" in complaint(rollcage(tmp_path, "abort", "0a", "--wait", "0.2"), 3)


async def test_a_reader_who_leaves_is_no_error(tmp_path: Path) -> None:
    many = [StageStarted(stage=Stage.AGENT) for _ in range(3000)]
    async with log_with(tmp_path, *many):
        for arguments in (["show", "0a", "--events"], ["show", "0a", "--events", "--json"], ["watch", "0a", "--json"]):
            command = " ".join([sys.executable, "-m", "rollcage", *arguments])
            ended = subprocess.run(
                ["bash", "-c", f"{command} | head -c 10; exit ${{PIPESTATUS[0]}}"],
                env=environ(tmp_path),
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert ended.stderr == "" and ended.returncode == 141, (arguments, ended)


def test_doctor_says_what_is_wrong_with_an_endpoint(tmp_path: Path) -> None:
    options = ["--endpoint", "vllm", "--base-url", "http://127.0.0.1:9"]
    ended = rollcage(tmp_path, "doctor", *options, "--json")
    findings: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(ended.stdout)["findings"]}
    assert ended.returncode == 3 and not findings["endpoint vllm"]["ok"]
    assert "127.0.0.1:9" in findings["endpoint vllm"]["detail"] and findings["endpoint vllm"]["remedy"]
    assert findings["state"]["ok"] and findings["bwrap"]["ok"] and findings["box"]["ok"]
    assert findings["agent"]["remedy"] == "run: rollcage setup"
    text = rollcage(tmp_path, "doctor", "--endpoint", "openai")
    assert text.returncode == 3 and "OPENAI_API_KEY" in text.stdout


def test_setup_can_be_asked_whether_it_was_done(tmp_path: Path) -> None:
    assert "rollcage setup" in complaint(rollcage(tmp_path, "setup", "--check"), 3)
