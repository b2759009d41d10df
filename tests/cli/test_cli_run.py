"""`rollcage run` with real boxes: what it prints, how it leaves, and that nothing stays behind."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from rollcage.cli.request import typed_task
from rollcage.endpoints import EndpointRequest
from rollcage.results.result import RolloutResult
from rollcage.store import Store
from support.commands import environ, rest, rollcage, rollcage_running, until

SHELL = ["--agent", "shell", "--endpoint", "scripted"]
"""An agent that runs the instruction as a script: the box is real, and no package need be fetched."""


def rare() -> str:
    """Seconds that nobody else sleeps for."""
    return f"7{secrets.randbelow(10**9)}.25"


def leftovers(marker: str) -> list[str]:
    """Processes of this machine whose command line has these words in it."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and "pytest" not in line:
            found.append(line)
    return found


async def outcomes(home: Path) -> list[str | None]:
    async with Store.open(home / "state" / "rollouts.db") as store:
        return [row.outcome for row in await store.list()]


def test_a_rollout_is_shown_and_summed_up(tmp_path: Path) -> None:
    ended = rollcage(
        tmp_path, "run", "-i", "echo hello > a.txt", *SHELL, "--setup", "true", "--verify", "test -e a.txt"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == "" and "\x1b" not in ended.stdout
    for words in ("● provision", "✓ true", "● agent", "✓ test -e a.txt", "◆ finished   reward 1.0", "a.txt  1 line"):
        assert words in ended.stdout, words


def test_with_json_stdout_is_one_result_and_nothing_else(tmp_path: Path) -> None:
    arguments = [
        "-i",
        "echo hello > a.txt",
        *SHELL,
        "--verify",
        "test -e a.txt",
        "--verify",
        "false",
        "--task-id",
        "t9",
    ]
    ended = rollcage(tmp_path, "run", *arguments, "--json")
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    result = RolloutResult.model_validate_json(ended.stdout)
    assert (result.task_id, result.outcome, result.reward) == ("t9", "finished", 0.5)
    assert result.files == {"/home/user/workdir/a.txt": "hello\n"} and [
        row.exit_code for row in result.verify_results
    ] == [0, 1]
    again = rollcage(tmp_path, "show", result.rollout_id, "--json")
    assert RolloutResult.model_validate_json(again.stdout) == result


def test_show_names_what_was_asked_and_gives_the_patch_and_every_prompt(tmp_path: Path) -> None:
    curl = (
        """curl -sf $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" -d "$(cat body)" > a"""
    )
    body = json.dumps({"model": "m", "messages": [{"role": "system", "content": "Be brief."}], "max_tokens": 50})
    ask = ["-i", f"echo '{body}' > body; {curl}", "--agent", "shell", "-m", "scripted", "--task-id", "asking"]
    result = RolloutResult.model_validate_json(rollcage(tmp_path, "run", *ask, "--json").stdout)
    shown = rollcage(tmp_path, "show", result.rollout_id).stdout
    for words in ("asking", "scripted", "shell", "cat body"):
        assert words in shown.partition("turns")[0]
    patch = rollcage(tmp_path, "show", result.rollout_id, "--patch")
    assert patch.stdout == result.patch and "+++ b/body" in patch.stdout
    prompt = rollcage(tmp_path, "show", result.rollout_id, "--prompt", "1").stdout
    assert "turn 1" in prompt and "system\n    Be brief." in prompt and "max_tokens" in prompt
    asked = json.loads(rollcage(tmp_path, "show", result.rollout_id, "--prompt", "1", "--json").stdout)
    assert asked["messages"] == [{"role": "system", "content": "Be brief."}]
    missing = rollcage(tmp_path, "show", result.rollout_id, "--prompt", "2")
    assert missing.returncode == 2 and "no such turn; it has 1" in missing.stderr


def test_a_model_is_named_in_one_word_as_for_eval(tmp_path: Path) -> None:
    def asked(*options: str) -> EndpointRequest:
        given = dict(zip(options[::2], options[1::2], strict=True))
        return typed_task(None, {"instruction": "true", **given}).endpoint

    named = asked("model", "openai/gpt-4o-mini")
    assert (named.endpoint, named.model) == ("openai", "gpt-4o-mini")
    assert (asked("model", "vllm").endpoint, asked("model", "vllm").model) == ("vllm", "")
    address = asked("model", "http://host:1/v1#a/b")
    assert (address.base_url, address.model) == ("http://host:1/v1", "a/b")
    beside = asked("model", "openai/gpt-oss-20b", "endpoint", "vllm")
    assert (beside.endpoint, beside.model) == ("vllm", "openai/gpt-oss-20b")
    assert (asked("model", "Qwen/Qwen3-4B").endpoint, asked("model", "Qwen/Qwen3-4B").model) == ("", "Qwen/Qwen3-4B")


def test_with_json_and_follow_every_event_is_a_line(tmp_path: Path) -> None:
    ended = rollcage(tmp_path, "run", "-i", "true", *SHELL, "--json", "--follow")
    entries = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
    assert (entries[0]["event"]["kind"], entries[-1]["event"]["kind"]) == ("queued", "ended")


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        (["--setup", "echo because >&2; exit 3"], "setup_failed"),
        (["--test-script", "banana.sh"], "verify_failed"),
        (["--timeout", "2", "--setup", "sleep 60"], "timed_out"),
        (["--agent-timeout", "0.5", "-i", "sleep 60"], "agent_timeout"),
        (["-i", "exit 4"], "agent_failed"),
    ],
)
def test_another_outcome_is_exit_code_1_and_says_why(tmp_path: Path, arguments: list[str], outcome: str) -> None:
    (tmp_path / "banana.sh").write_text('echo banana > "$REWARD_FILE"')
    ended = rollcage(tmp_path, "run", "-i", "true", *SHELL, *arguments)
    assert ended.returncode == 1, ended.stdout
    assert f"◆ {outcome}" in ended.stdout and f"  {outcome}: " in ended.stdout
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_model_that_does_not_answer_is_said_plainly(tmp_path: Path) -> None:
    options = ["--agent", "shell", "--endpoint", "vllm", "--base-url", "http://127.0.0.1:9"]
    ended = rollcage(tmp_path, "run", "-i", "true", *options)
    assert ended.returncode == 3 and "◆ model_unreachable   no reward" in ended.stdout
    assert "127.0.0.1:9" in ended.stdout


def test_the_instruction_can_come_from_stdin_and_options_add_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text('instruction = "false"\nsetup = ["echo 1 > order"]\nagent = { name = "shell" }\n')
    more = ["--setup", "echo 2 >> order", "--verify", "test $(wc -l < order) = 2", "--verify", "test -e made"]
    ended = rollcage(tmp_path, "run", "t.toml", "-i", "-", "-e", "scripted", *more, "--json", stdin="touch made")
    result = RolloutResult.model_validate_json(ended.stdout)
    assert (result.task_id, result.reward, result.error) == ("t", 1.0, None)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
async def test_ctrl_c_ends_a_rollout_cleanly(tmp_path: Path, number: signal.Signals, code: int) -> None:
    marker = rare()
    async with rollcage_running(tmp_path, "run", "-i", f"echo started; sleep {marker}", *SHELL) as process:
        await until(process, "is at work")
        process.send_signal(number)
        left, out, error = await rest(process)
    assert left == code and "◆ aborted   no reward" in out and error == ""
    assert await outcomes(tmp_path) == ["aborted"]
    assert leftovers(marker) == [] and leftovers(str(tmp_path)) == []


async def test_ctrl_c_before_the_agent_runs_is_clean_too(tmp_path: Path) -> None:
    marker = rare()
    async with rollcage_running(tmp_path, "run", "-i", "true", *SHELL, "--setup", f"sleep {marker}") as process:
        await until(process, "● setup")
        process.send_signal(signal.SIGINT)
        left, out, _ = await rest(process)
    assert left == 130 and "◆ aborted" in out
    assert leftovers(marker) == []


async def test_a_rollout_can_be_aborted_from_another_process(tmp_path: Path) -> None:
    marker = rare()
    async with rollcage_running(tmp_path, "run", "-i", f"sleep {marker}", *SHELL) as process:
        await until(process, "is at work")
        [row] = json.loads(rollcage(tmp_path, "ls", "--open", "--json").stdout)
        aborted = rollcage(tmp_path, "abort", row["id"][:6], "--reason", "enough", "--json")
        assert aborted.returncode == 0 and json.loads(aborted.stdout)["outcome"] == "aborted"
        left, out, _ = await rest(process)
    assert left == 1 and "abort requested: enough" in out and leftovers(marker) == []


async def test_a_rollout_whose_reader_leaves_is_aborted_quietly(tmp_path: Path) -> None:
    marker = rare()
    command = " ".join([sys.executable, "-m", "rollcage", "run", "-i", f"'sleep {marker}'", *SHELL])
    ended = subprocess.run(
        ["bash", "-c", f"{command} | head -n 1; exit ${{PIPESTATUS[0]}}"],
        env=environ(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 141 and ended.stderr == ""
    assert await outcomes(tmp_path) == ["aborted"] and leftovers(marker) == []


async def test_a_killed_command_leaves_nothing_alive_and_its_log_is_closed(tmp_path: Path) -> None:
    marker = rare()
    async with rollcage_running(tmp_path, "run", "-i", f"sleep {marker}", *SHELL) as process:
        await until(process, "is at work")
        process.kill()
        await process.wait()
    [row] = json.loads(rollcage(tmp_path, "ls", "--json").stdout)
    assert row["outcome"] == "crashed"
    with anyio.fail_after(120):
        while leftovers(marker):
            await anyio.sleep(0.05)


def test_a_full_disk_is_one_line_and_ends_the_rollout(tmp_path: Path) -> None:
    setup = "head -c 900000 /dev/urandom | base64"
    command = [sys.executable, "-m", "rollcage", "run", "-i", "true", *SHELL, "--setup", setup]
    ended = subprocess.run(
        ["bash", "-c", 'ulimit -f 130; exec "$@"', "bash", *command],
        env=environ(tmp_path),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 3, ended
    said = ended.stdout + ended.stderr
    assert "rollouts.db" in said and "space" in said and "Traceback" not in said
    [row] = json.loads(rollcage(tmp_path, "ls", "--json").stdout)
    assert row["outcome"] in ("internal_error", "crashed"), "its last words fitted, or the next start said them"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--verify", "false"], 0),
        (["--verify", "false", "--require", "1"], 4),
        (["--verify", "false", "--verify", "true", "--require", "0.5"], 0),
        (["--verify", "true", "--require", "1"], 0),
        (["--require", "0"], 4),
        (["--setup", "false", "--require", "1"], 1),
        (["--verify", "true", "-i", "exit 4"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_exit_code_says_whether_it_broke_and_with_require_what_it_earned(
    tmp_path: Path, arguments: list[str], code: int
) -> None:
    ended = rollcage(tmp_path, "run", "-i", "true", *SHELL, *arguments, "--json")
    assert ended.returncode == code, ended.stdout
    [row] = json.loads(rollcage(tmp_path, "ls", "--json").stdout)
    watched = [arguments[at : at + 2] for at, word in enumerate(arguments) if word == "--require"]
    again = rollcage(tmp_path, "watch", row["id"], *(watched[0] if watched else ()))
    assert again.returncode == code, "watching it says the same"


def test_a_required_reward_is_a_number(tmp_path: Path) -> None:
    for word in ("nan", "all"):
        ended = rollcage(tmp_path, "run", "-i", "true", *SHELL, "--require", word)
        assert ended.returncode == 2 and "--require" in ended.stderr and list(tmp_path.iterdir()) == []
