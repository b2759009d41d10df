"""Task folders in Harbor's format: what is read of them, what is refused, and how they run."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollcage.api.run import read
from rollcage.errors import TaskError, UsageError
from rollcage.results.fold import Rollout
from rollcage.runner import Runner
from rollcage.sandboxes.images.catalog import ImageStore
from rollcage.sandboxes.layers import LayerStore
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.tasks import harbor_images, load, open_source, trees
from rollcage.tasks.cheats import cheats_for
from rollcage.tasks.harbor_files import strip_canary
from rollcage.tasks.trees import tree_of
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome
from rollcage.wiring import opened_runner
from support.commands import rollcage
from support.paths import ROOT

FOLDERS = ROOT / "tests" / "data" / "harbor"
SECOND_SERVER = '[[environment.mcp_servers]]\nname = "b"\ntransport = "stdio"\ncommand = "x"'
REFUSED = {
    "needs-gpu": "gpus = 1",
    "many-services": "the services main, db",
    "windows": "windows",
}


def copied(tmp_path: Path, name: str) -> Path:
    return Path(shutil.copytree(FOLDERS / name, tmp_path / name, symlinks=True))


def test_a_folder_of_folders_is_a_source_and_says_what_cannot_run() -> None:
    found = {task.where.rpartition("/")[2]: task for task in open_source(FOLDERS)}
    assert len(found) >= 12
    assert {name for name, task in found.items() if task.problem} == set(REFUSED)
    for name, words in REFUSED.items():
        assert words in found[name].problem and name in found[name].problem
    assert found["greeting"].verifier == found["several-steps"].verifier == "commands"
    assert "rollcage image build" in found["dockerfile"].why_not(lambda name: False)
    assert "run with --build" in found["dockerfile"].why_not(lambda name: False)
    assert not found["greeting"].why_not(lambda name: False) and found["greeting"].size > 100


def test_fields_come_to_what_a_task_has() -> None:
    file = load(FOLDERS / "with-env")
    task, sandbox = file.task, file.sandbox
    assert (task.id, task.workdir, task.paths) == ("rollcage/with-env", "/workspace/value", "system")
    assert (task.limits.agent_timeout_s, task.limits.verify_timeout_s) == (120, 60)
    assert sandbox.env == {"GREETING": "bonjour"} and task.verify_env == {"MODE": "strict"}
    assert load(FOLDERS / "greeting").task.instruction == "Write a file /app/hello.txt that says hello.\n"
    old = load(FOLDERS / "terminal-bench-1").task
    assert old.instruction == "Make the file /app/old." and old.limits.agent_timeout_s == 90
    assert any("shade, environment.weather" in notice for notice in load(FOLDERS / "unknown-fields").notices)


def test_in_python_a_folder_may_be_named_by_a_text_and_every_other_text_is_an_instruction(tmp_path: Path) -> None:
    folder = copied(tmp_path, "greeting").rename(tmp_path / "a task of mine")
    assert read(str(folder)).task.id == "rollcage/greeting"
    for text in (str(tmp_path), "x" * 5000, "a/" + "y" * 300, "a\0b"):
        assert read(text).task.instruction == text and not read(text).task.id


def test_an_image_that_was_not_built_is_told_with_what_builds_it(tmp_path: Path) -> None:
    images = ImageStore(tmp_path / "images", LayerStore(tmp_path / "layers"))
    with pytest.raises(UsageError, match=r"^the image of this task's Dockerfile is not here.*; run with --build"):
        images.get(load(FOLDERS / "dockerfile").sandbox.template)


def test_scripts_that_fetch_something_are_told_by_line_before_they_run(tmp_path: Path) -> None:
    folder = copied(tmp_path, "greeting")
    assert not any("network:" in notice for notice in load(folder).notices)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\n# curl is not used\ncd /app && pip install attrs\n")
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\napt-get update\nuvx pytest\n")
    told = "\n".join(load(folder).notices)
    assert "solve.sh:3: `pip install` may want a network" in told
    assert "test.sh:2: `apt-get update` may want a network: the verifier reaches only what --verify-hosts" in told


def test_only_comments_that_mark_a_public_task_are_left_out_of_its_instruction() -> None:
    marks = "<!-- a canary 12-34 -->\n# canary GUID 56\n\n"
    assert strip_canary(f"{marks}Keep a canary.\n# canary of the text\n") == "Keep a canary.\n# canary of the text\n"
    assert strip_canary("The canary sings.\n") == "The canary sings.\n"


def test_the_log_has_digests_of_files_and_not_the_files() -> None:
    task = load(FOLDERS / "binary-tests").task
    assert task.tests_tree and task.tests_tree.size > 4096 and task.tests_tree.files == 3
    written = task.model_dump_json()
    assert task.tests_tree.digest in written and str(FOLDERS) not in written and "blob.bin" not in written


def test_the_same_files_have_the_same_digest_wherever_they_lie(tmp_path: Path) -> None:
    other = copied(tmp_path, "binary-tests")
    assert tree_of(other / "tests").digest == tree_of(FOLDERS / "binary-tests" / "tests").digest
    (other / "tests" / "tool").chmod(0o644)
    assert tree_of(other / "tests").digest != tree_of(FOLDERS / "binary-tests" / "tests").digest


@pytest.mark.parametrize("missing", ["instruction.md", "tests/test.sh"])
def test_a_folder_without_what_it_needs_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    folder = copied(tmp_path, "greeting")
    (folder / missing).unlink()
    with pytest.raises(TaskError, match=f"{missing}: is missing"):
        load(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[environment\n", r"task.toml: is no valid TOML: .*line 1"),
        ("[environment]\ncpus = 'many'\n", r"task.toml:2: environment.cpus"),
        ("schema_version = '2.0'\n", r"task.toml:1: schema_version '2.0'"),
        ("[environment]\ngpus = 1\n", r"task.toml:2: environment.gpus = 1"),
        ("[environment]\nenv = { KEY = '${SECRET}' }\n", r"task.toml:2: environment.env: .*SECRET"),
        ("[environment]\nworkdir = '/proc/x'\n", r"workdir"),
    ],
)
def test_what_is_wrong_in_task_toml_is_said_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    folder = copied(tmp_path, "greeting")
    (folder / "task.toml").write_text(text)
    with pytest.raises(TaskError, match=words):
        load(folder)


def test_what_an_image_is_built_from_may_be_larger_than_what_is_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(tmp_path, "dockerfile")
    (folder / "environment" / "data").write_bytes(bytes(5000))
    monkeypatch.setattr(trees, "MOST_BYTES", 4000)
    before = load(folder).sandbox.template
    (folder / "environment" / "data").write_bytes(bytes(5001))
    assert load(folder).sandbox.template not in ("", before)
    monkeypatch.setattr(harbor_images, "MOST_CONTEXT", 4000)
    with pytest.raises(TaskError, match=r"environment: is more than .* have the Dockerfile fetch what is large"):
        load(folder)


def test_files_that_cannot_be_taken_as_they_are_are_refused(tmp_path: Path) -> None:
    folder = copied(tmp_path, "greeting")
    link = folder / "tests" / "out"
    link.symlink_to("../../../etc/passwd")
    with pytest.raises(TaskError, match=r"tests/out: is a link .* leads out"):
        load(folder)
    link.unlink()
    with socket.socket(socket.AF_UNIX) as special:
        os.chdir(folder / "tests")
        special.bind("special")
        os.chdir(ROOT)
    with pytest.raises(TaskError, match="special: is neither"):
        load(folder)
    (folder / "tests" / "special").unlink()
    with (folder / "tests" / "huge").open("wb") as huge:
        huge.truncate(1 << 30)
    with pytest.raises(TaskError, match="is more than 512 MB"):
        load(folder)


def test_names_with_spaces_and_letters_of_any_script_are_fine(tmp_path: Path) -> None:
    folder = copied(tmp_path, "greeting").rename(tmp_path / "ein Gruß 你好")
    (folder / "tests" / "ä b.txt").write_text("x")
    task = load(folder).task
    assert task.tests_tree and task.tests_tree.files == 2


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ('transport = "sse"\nurl = "http://localhost:1/sse"', "speaks SSE"),
        ('transport = "http"\nurl = "http://desk:8000/mcp"', "'http://desk:8000/mcp'; a box reaches itself alone"),
        ('transport = "stdio"', "is no command"),
        (f'transport = "http"\nurl = "http://localhost:1"\n{SECOND_SERVER}', "stands alone"),
    ],
)
def test_servers_that_are_not_in_the_box_are_refused_by_name(tmp_path: Path, server: str, words: str) -> None:
    folder = copied(tmp_path, "greeting")
    (folder / "task.toml").write_text(f'version = "1.0"\n[[environment.mcp_servers]]\nname = "a"\n{server}\n')
    with pytest.raises(TaskError) as refused:
        load(folder)
    assert words in str(refused.value) and "task.toml:2: environment.mcp_servers: 'a'" in str(refused.value)
    (folder / "task.toml").write_text(
        '[[environment.mcp_servers]]\nname = "a"\ntransport = "http"\nurl = "http://localhost:9/mcp"'
    )
    assert [each.url for each in load(folder).task.mcp_servers] == ["http://localhost:9/mcp"]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def runner(tmp_path: Path) -> AsyncIterator[Runner]:
    tmp_path.chmod(0o755)
    settings = Settings.from_environ({"ROLLCAGE_HOME": str(tmp_path / "home"), "ROLLCAGE_SYSTEM": "host"})
    async with Store.open(settings.log_path) as store, opened_runner(settings, store, at_once=2) as runner:
        yield runner


async def played(runner: Runner, name: str, agent: str) -> Rollout:
    file = load(FOLDERS / name)
    job = Job(task=file.task, model=NO_MODEL, agent=AgentSpec(name=agent), sandbox=file.sandbox)
    return await runner.wait(await runner.start(job))


@pytest.mark.anyio
@pytest.mark.parametrize(
    "name",
    [
        "greeting",
        "own-paths",
        "writes-system",
        "binary-tests",
        "with-env",
        "terminal-bench-1",
        "other-users",
        "healthcheck",
        "mcp-server",
    ],
)
async def test_nothing_earns_0_and_the_solution_1(runner: Runner, name: str) -> None:
    nothing, solved = await played(runner, name, "nop"), await played(runner, name, "oracle")
    assert (nothing.reward, nothing.error) == (0, None)
    assert (solved.reward, solved.error, solved.trust) == (1, None, "shared")


@pytest.mark.anyio
async def test_a_user_whom_nobody_knows_ends_setup(runner: Runner) -> None:
    file = load(FOLDERS / "other-users")
    task = file.task.model_copy(update={"verify_user": "stranger"})
    ended = await runner.wait(
        await runner.start(Job(task=task, model=NO_MODEL, agent=AgentSpec(name="nop"), sandbox=file.sandbox))
    )
    assert ended.outcome is Outcome.SETUP_FAILED and "no user 'stranger'" in (ended.error or "")
    assert ended.blame == "task"


def with_server(script: str) -> Job:
    file = load(FOLDERS / "mcp-server")
    (server,) = file.task.mcp_servers
    server = server.model_copy(update={"args": ("-c", script.replace("REST", server.args[1]))})
    task = file.task.model_copy(update={"mcp_servers": (server,)})
    return Job(task=task, model=NO_MODEL, agent=AgentSpec(name="nop"), sandbox=file.sandbox)


@pytest.mark.anyio
async def test_a_server_of_the_task_that_ends_is_the_task_s_fault_and_says_why(runner: Runner) -> None:
    job = with_server("raise SystemExit('no desk here')")
    ended = await runner.wait(await runner.start(job))
    assert (ended.outcome, ended.blame) == (Outcome.ENVIRONMENT_FAILED, "task")
    assert "the MCP server 'desk' of the task has ended: no desk here" in (ended.error or "")


@pytest.mark.anyio
async def test_a_server_that_complains_a_lot_is_not_held_up_by_it(runner: Runner) -> None:
    job = with_server("import sys; sys.stderr.write('a line\\n' * 200_000)\nREST")
    ended = await runner.wait(await runner.start(job))
    assert (ended.outcome, ended.error) == (Outcome.FINISHED, None)


@pytest.mark.anyio
async def test_steps_are_judged_one_after_the_other_in_one_box(runner: Runner) -> None:
    solved = await played(runner, "several-steps", "oracle")
    assert (solved.reward, solved.error, solved.outcome) == (1, None, Outcome.FINISHED)
    assert solved.reward_parts == {"reward": 1, "first.reward": 1, "second.reward": 1}
    assert len(solved.verify) == 2 and solved.setup[0].command == "bash ./setup.sh"


@pytest.mark.anyio
async def test_a_step_that_earned_too_little_is_the_last(runner: Runner) -> None:
    nothing = await played(runner, "several-steps", "nop")
    assert (nothing.reward, nothing.error, len(nothing.verify)) == (0, None, 1)
    assert nothing.reward_parts == {"reward": 0, "first.reward": 0}
    assert nothing.score and nothing.score.notice == "stopped after step first: reward is 0, less than 0.5"


@pytest.mark.anyio
async def test_a_separate_verifier_gets_the_artifacts_and_nothing_else(runner: Runner) -> None:
    nothing, solved = [await played(runner, "separate-verifier", agent) for agent in ("nop", "oracle")]
    assert (nothing.reward, nothing.error) == (0, None)
    assert (solved.reward, solved.error) == (1, None), solved.verify
    assert [each.exit_code for each in solved.verify] == [0, 3, 0]
    assert ("/app/out/peek",) in [each.paths for each in solved.suspicions if each.code == "link_outside"]


@pytest.mark.anyio
async def test_several_rewards_are_parts_and_never_summed(runner: Runner) -> None:
    nothing, solved = [await played(runner, "several-rewards", agent) for agent in ("nop", "oracle")]
    assert (nothing.reward, nothing.reward_parts) == (0.25, {"first": 0, "second": 0.5})
    assert (solved.reward, solved.reward_parts) == (1, {"first": 1, "second": 1})
    assert solved.score and solved.score.notice == "the mean of first, second: reward.json has no `reward`"
    named = await played(runner, "named-reward", "oracle")
    assert (named.reward, named.reward_parts) == (1, {"reward": 1, "speed": 40, "size": -3})
    assert named.score and not named.score.notice


@pytest.mark.anyio
async def test_a_verifier_that_writes_nothing_is_an_error_and_no_0(runner: Runner) -> None:
    rollout = await played(runner, "silent-verifier", "nop")
    assert rollout.reward is None and rollout.outcome is Outcome.VERIFY_FAILED
    assert "neither reward.json nor reward.txt" in str(rollout.error)


@pytest.mark.anyio
async def test_an_oracle_that_fails_shows_what_it_printed(runner: Runner) -> None:
    rollout = await played(runner, "broken-solution", "oracle")
    assert rollout.reward == 0 and "no such tool: frobnicate" in str(rollout.error)
    assert "no such tool: frobnicate" in rollout.agent_stderr_tail


def test_cheats_forge_where_such_a_task_has_its_reward_and_its_tests() -> None:
    scripts = " ".join(cheat.script for cheat in cheats_for(load(FOLDERS / "greeting").task, ["hello.py"]))
    assert "/logs/verifier/reward.txt" in scripts and "/home/user/logs" not in scripts
    assert "/home/user/tests" not in scripts


def test_the_command_line_runs_a_folder_and_tells_its_notices(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    env = {**os.environ, "ROLLCAGE_HOME": str(tmp_path / "home"), "ROLLCAGE_SYSTEM": "host"}
    command = [sys.executable, "-m", "rollcage", "run", str(FOLDERS / "unknown-fields"), "--agent", "oracle", "--json"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["reward"] == 1 and "shade, environment.weather" in ended.stderr


def test_the_command_line_says_which_task_cannot_run_and_what_would_make_it(tmp_path: Path) -> None:
    wide, plain = copied(tmp_path, "dockerfile"), copied(tmp_path, "greeting")
    wide.rename(tmp_path / "日本")
    listed = rollcage(tmp_path, "tasks", "ls", str(tmp_path))
    head, *rows = listed.stdout.splitlines()
    assert listed.returncode == 1 and head.split() == ["ID", "IMAGE", "SIZE", "VERIFIER"]
    first = {row.split()[0].rpartition("/")[2]: row for row in rows}
    assert first[plain.name].endswith("  runs") and f"image build {tmp_path / '日本'}" in first["dockerfile"]
    ended = rollcage(tmp_path, "run", str(tmp_path / "日本"), "--agent", "nop")
    assert ended.returncode == 2 and re.search(r"日本: there is no image 'harbor-\w+' here; run with", ended.stderr)


@pytest.mark.anyio
async def test_what_we_keep_at_home_is_not_the_agent_s_work_where_that_is_its_workdir(runner: Runner) -> None:
    file = load(FOLDERS / "greeting")
    task = file.task.model_copy(update={"workdir": "/root", "instruction": "echo hi > /root/mine"})
    job = Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"), sandbox=file.sandbox)
    ended = await runner.wait(await runner.start(job))
    assert [path for path in ended.files if ".rollcage" in path] == []
    assert any(path.endswith("mine") for path in ended.files)
    assert ".rollcage" not in (ended.patch or "")
