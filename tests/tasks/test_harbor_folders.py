"""Odd folders in Harbor's format: what their authors write is what happens, or is told."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollcage.errors import TaskError
from rollcage.results.fold import Rollout
from rollcage.runner import Runner
from rollcage.sandboxes.images.imports import ImageSource, import_image
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.tasks import load, open_source
from rollcage.tasks.harbor_files import dockerfile_of
from rollcage.tasks.harbor_images import plans_of
from rollcage.types import NO_MODEL, AgentSpec, Job
from rollcage.wiring import opened_runner
from support.paths import ROOT
from support.systems import a_system

FOLDERS = ROOT / "tests" / "data" / "harbor"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDERS / "greeting", tmp_path / "task"))


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    return tmp_path / "home"


@pytest.fixture
async def runner(home: Path) -> AsyncIterator[Runner]:
    settings = Settings.from_environ({"ROLLCAGE_HOME": str(home), "ROLLCAGE_SYSTEM": "host"})
    async with Store.open(settings.log_path) as store, opened_runner(settings, store, at_once=1) as runner:
        yield runner


async def played(runner: Runner, folder: Path, agent: str, *, template: str = "", **changes: object) -> Rollout:
    file = load(folder)
    task = file.task.model_copy(update=changes)
    sandbox = file.sandbox.model_copy(update={"template": template})
    job = Job(task=task, model=NO_MODEL, agent=AgentSpec(name=agent), sandbox=sandbox)
    return await runner.wait(await runner.start(job))


@pytest.mark.parametrize(
    ("text", "workdir", "user", "notice"),
    [
        ("FROM a\nENV APP=/app X='a b'\nWORKDIR $APP\n", "/app", "", ""),
        ("FROM a\nARG D=/w\nWORKDIR ${D}/in\nWORKDIR sub\nUSER nobody\n", "/w/in/sub", "nobody", ""),
        ("FROM a AS b\nWORKDIR /x\nUSER x\nFROM a\nENV D /old style\nWORKDIR $D\n", "/old style", "", ""),
        ('FROM a\nENV A=1 \\\n    B=/two\nWORKDIR "$B"\nUSER 1000:100\n', "/two", "1000", ""),
        ("FROM a\nRUN x\n", "/root", "", "names no WORKDIR"),
        ("FROM a\nWORKDIR /\n", "/root", "", "has the WORKDIR /"),
        ("FROM a\nWORKDIR /app\nWORKDIR $NOBODY\n", "/app", "", "WORKDIR $NOBODY: its variable is not set there"),
    ],
)
def test_a_dockerfile_says_where_and_as_whom_commands_run(text: str, workdir: str, user: str, notice: str) -> None:
    assert dockerfile_of(text) == (workdir, user, notice)


def test_what_a_dockerfile_says_holds_for_agent_and_verifier_and_what_it_does_not_is_told(folder: Path) -> None:
    (folder / "environment").mkdir()
    (folder / "environment/Dockerfile").write_text("FROM a\nUSER worker\n")
    file = load(folder)
    assert (file.task.workdir, file.task.agent_user, file.task.verify_user) == ("/root", "worker", "worker")
    assert any("environment/Dockerfile: names no WORKDIR; the workdir is /root" in each for each in file.notices)
    (folder / "task.toml").write_text('[environment]\nworkdir = "/app"\n[agent]\nuser = "root"\n')
    file = load(folder)
    assert (file.task.workdir, file.task.agent_user, file.task.verify_user) == ("/app", "", "worker")
    assert not any("WORKDIR" in each for each in file.notices)
    (folder / "task.toml").write_text('[verifier]\nenvironment_mode = "separate"\n')
    (folder / "tests/Dockerfile").write_text("FROM a\nUSER judge\n")
    assert (load(folder).task.agent_user, load(folder).task.verify_user) == ("worker", "judge")
    (folder / "task.toml").write_text('[agent]\nuser = 0\n[verifier]\nuser = "root"\n')
    assert (load(folder).task.agent_user, load(folder).task.verify_user) == ("", "")
    shutil.rmtree(folder / "environment")
    (folder / "task.toml").write_text('[environment]\ndocker_image = "org/x:1"\n')
    assert any("task.toml:2: names no workdir, and its image is not asked" in each for each in load(folder).notices)


COMPOSED = """services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    image: ${MAIN_IMAGE_NAME}
    command: [sh, -c, sleep infinity]
    environment: ["TEST_DIR=${TEST_DIR}", "COLOUR=green", "SHADE=${SHADE:-dark}"]
    volumes: ["${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}"]
"""


def test_what_a_compose_file_says_of_its_one_service_holds_or_is_told(folder: Path) -> None:
    (folder / "environment").mkdir()
    place = folder / "environment/docker-compose.yaml"
    place.write_text(COMPOSED)
    file = load(folder)
    assert file.sandbox.env == {"COLOUR": "green", "SHADE": "dark"}
    assert not file.sandbox.template and not any("ignored" in each for each in file.notices)
    place.write_text("services:\n  main:\n    image: org/x:1\n    privileged: true\n    command: redis-server\n")
    file = load(folder)
    assert file.sandbox.template == "org-x-1"
    assert f"{place}: of main, ignored: privileged, command" in file.notices
    place.write_text("services:\n  main:\n    environment: {KEY: '${KEY}'}\n")
    with pytest.raises(TaskError, match=r"docker-compose.yaml: environment: .*taken from the machine's environment"):
        load(folder)


def test_a_build_may_take_as_long_as_its_task_says(folder: Path) -> None:
    (folder / "environment").mkdir()
    (folder / "environment/Dockerfile").write_text("FROM a\n")
    assert [plan.timeout_s for plan in plans_of(folder)] == [None]
    (folder / "task.toml").write_text("[environment]\nbuild_timeout_sec = 1200\n")
    assert [plan.timeout_s for plan in plans_of(folder)] == [1200]


def test_an_image_that_is_to_be_imported_is_told_with_how(folder: Path) -> None:
    (folder / "task.toml").write_text('[environment]\ndocker_image = "org/x:1"\n')
    (task,) = open_source(folder)
    assert (
        task.why_not(lambda name: False) == "there is no image 'org-x-1' here; rollcage image import org-x-1 SAVED.tar"
    )


def test_what_task_yaml_says_and_nobody_follows_is_told(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDERS / "terminal-bench-1", tmp_path / "old"))
    with (folder / "task.yaml").open("a") as file:
        file.write("run_tests_in_same_shell: true\nexpert_time_estimate_min: 3\nhue: red\n")
    told = load(folder).notices
    assert any(each.endswith("task.yaml: unknown and ignored: hue") for each in told)
    assert any("run_tests_in_same_shell is ignored" in each for each in told)


def test_a_mark_at_the_start_of_a_file_is_no_text_of_it(folder: Path) -> None:
    for name in ("task.toml", "instruction.md"):
        (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert load(folder).task.instruction == load(FOLDERS / "greeting").task.instruction


@pytest.mark.anyio
async def test_tests_may_be_a_link_to_another_folder_of_the_task(runner: Runner, folder: Path) -> None:
    (folder / "tests").rename(folder / "shared")
    (folder / "tests").symlink_to("shared")
    assert (await played(runner, folder, "oracle")).reward == 1


@pytest.mark.anyio
async def test_a_solution_is_run_by_the_program_that_it_names_and_its_files_are_no_suspicion(
    runner: Runner, folder: Path
) -> None:
    (folder / "solution/solve.sh").write_text("#!/usr/bin/env python3\nopen('/app/hello.txt', 'w').write('hello')\n")
    (folder / "solution/solve.sh").chmod(0o600)
    ended = await played(runner, folder, "oracle")
    assert (ended.reward, ended.error) == (1, None)
    assert not [each for each in ended.suspicions if each.code == "changed_system"]


@pytest.mark.anyio
async def test_the_folders_for_logs_are_there_while_the_agent_works(runner: Runner, folder: Path) -> None:
    (folder / "solution/solve.sh").write_text("set -e\nfor n in agent artifacts verifier; do echo > /logs/$n/x; done\n")
    (folder / "tests/test.sh").write_text(
        "[ -e /logs/artifacts/x ] && [ -e /logs/agent/x ] && [ ! -e /logs/verifier/x ]; echo $((1 - $?)) > "
        "/logs/verifier/reward.txt\n"
    )
    ended = await played(runner, folder, "oracle")
    assert (ended.reward, ended.error) == (1, None)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("script", "reward"),
    [("echo 'PASSED t.py::a'", 1), ("echo 'FAILED t.py::a'; true", 0), ("echo 'PASSED t.py::a'; false", 0)],
)
async def test_a_test_that_failed_counts_whatever_the_script_does_after_it(
    runner: Runner, tmp_path: Path, script: str, reward: float
) -> None:
    folder = Path(shutil.copytree(FOLDERS / "terminal-bench-1", tmp_path / "old"))
    (folder / "run-tests.sh").write_text(f"#!/bin/bash\n{script}\n")
    ended = await played(runner, folder, "nop")
    assert (ended.reward, ended.error) == (reward, None)


@pytest.mark.anyio
async def test_what_an_image_without_git_brought_is_not_the_agent_s(runner: Runner, folder: Path, home: Path) -> None:
    system = a_system(folder.parent / "system")
    (system / "app").mkdir()
    (system / "app/conftest.py").write_text("")
    async with LocalProvider(home) as provider:
        await import_image(provider, "plain", ImageSource(path=system), print, own_paths=True)
    for does, planted in (("touch sitecustomize.py", ["sitecustomize.py"]), ("true", [])):
        ended = await played(runner, folder, "shell", template="plain", instruction=does)
        assert ended.patch is None and "conftest.py" in ended.files, ended.error
        told = [path for each in ended.suspicions if each.code == "planted_file" for path in each.paths]
        assert told == planted


@pytest.mark.anyio
async def test_a_verifier_gets_all_of_its_image_s_environment_where_all_is_kept(
    runner: Runner, folder: Path, home: Path
) -> None:
    system = a_system(folder.parent / "system")
    env = {"PYTHONPATH": "/app", "PATH": "/app/bin:$PATH"}
    async with LocalProvider(home) as provider:
        await import_image(provider, "plain", ImageSource(path=system, env=env), print, own_paths=True)
    (folder / "tests/test.sh").write_text(
        "#!/bin/bash\n[[ $PYTHONPATH == /app:* && $PATH == *:/app/bin:* ]] && echo 1 > /logs/verifier/reward.txt\n"
    )
    assert (await played(runner, folder, "nop", template="plain")).reward == 1
    kept = await played(runner, folder, "nop", template="plain", keep=())
    assert kept.reward is None and "environment_variable" in [each.code for each in kept.suspicions]


@pytest.mark.anyio
async def test_what_an_image_of_a_verifier_brings_as_tests_is_not_there_for_the_code_that_it_asks(
    runner: Runner, folder: Path, home: Path
) -> None:
    system = a_system(folder.parent / "system", python=True)
    (system / "tests").mkdir()
    (system / "tests/test.sh").write_text(
        "#!/bin/bash\ncat /app/hello.txt; untrusted cat /tests/test.sh\n"
        "[ $(untrusted cat /app/hello.txt) = hello ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    async with LocalProvider(home) as provider:
        await import_image(provider, "judge", ImageSource(path=system), print, own_paths=True)
    (folder / "task.toml").write_text(
        'artifacts = ["/app/hello.txt"]\n[metadata.rollcage]\nisolate = true\n[verifier.environment]\n'
        'docker_image = "judge"\nworkdir = "/work"\n'
    )
    ended = await played(runner, folder, "oracle")
    assert (ended.reward, ended.error, ended.trust) == (1, None, "isolated"), ended.verify
    assert ended.verify[0].stdout == "" and "/tests/test.sh" in ended.verify[0].stderr
