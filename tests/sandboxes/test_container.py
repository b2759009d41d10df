"""Boxes in containers, with a real engine: docker or podman, whichever answers."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.agent import OpenCode
from rollcage.conformance.sandboxes import CHECKS, ConformanceCheck, judge
from rollcage.conformance.sandboxes.backends import traits_of
from rollcage.errors import SandboxLost, SetupError, UsageError
from rollcage.gateway import Gateway
from rollcage.rollout.verify_env import environment_from
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import run, sh
from rollcage.sandboxes.container.engine import Container, ContainerEngine
from rollcage.sandboxes.container.provider import OWNER, ContainerProvider
from rollcage.sandboxes.images.base import COMMANDS
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import HOME, AgentSpec, Job, Limits, Outcome, SandboxSpec, ScriptedCall, ScriptedTurn, Task
from support.base_system import base_there
from support.boxes import ROOT, living
from support.systems import MARK, a_system

SYSTEM, BARE = "localhost/rollcage-test/system:one", "localhost/rollcage-test/bare:one"
QUICK = ("hardening",)
"""The families that are tried every time; all others take longer, and CI tries them too."""


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
async def containers(engine_address: str, state: Path) -> AsyncIterator[ContainerProvider]:
    async with ContainerProvider(state, [engine_address]) as opened:
        yield opened


@pytest.fixture
async def engine(engine_address: str) -> AsyncIterator[ContainerEngine]:
    opened = await ContainerEngine.open([engine_address])
    yield opened
    for name in (SYSTEM, BARE):
        if await opened.has_image(name):
            await opened.remove_image(name)
    opened.close()


@pytest.mark.parametrize(
    "one",
    [pytest.param(one, id=one.name, marks=() if one.family in QUICK else pytest.mark.slow) for one in CHECKS],
)
async def test_container_boxes_hold_what_every_box_must(containers: ContainerProvider, one: ConformanceCheck) -> None:
    verdict = await judge(one, containers, replace(traits_of(containers), pace=4))
    rewinds_not = one.family == "rewind" and verdict.outcome == "not_applicable"
    assert verdict.outcome == "passed" or rewinds_not, verdict.detail


async def test_the_real_opencode_works_in_a_container(engine_address: str, state_dir: Path, store: Store) -> None:
    call = ScriptedCall(name="write", arguments={"filePath": f"{HOME}/workdir/hello.txt", "content": "hello\n"})
    task = Task(
        instruction="Write hello to hello.txt.",
        setup=("git init -q .", "echo seeded > seed.txt"),
        verify=("grep -qx hello hello.txt", "grep -qx seeded seed.txt"),
        solution=(ScriptedTurn(tool_calls=(call,)), ScriptedTurn(text="Done.")),
        limits=Limits(agent_timeout_s=300, verify_timeout_s=120),
    )
    async with (
        ScriptedModel() as model,
        Gateway.open() as gateway,
        ContainerProvider(state_dir, [engine_address]) as boxes,
    ):
        agents = {"opencode": OpenCode(Downloads(state_dir / "cache"))}
        backends = Registry(providers={"container": boxes}, agents=agents, gateway=gateway)
        job = Job(
            task=task,
            model=model.endpoint(task.solution),
            agent=AgentSpec(name="opencode"),
            sandbox=SandboxSpec(backend="container"),
        )
        async with Runner.open(store, backends) as runner:
            rollout = await runner.wait(await runner.start(job))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward == 1
    assert rollout.files["hello.txt"] == "hello\n"
    assert [turn.trainable for turn in rollout.turns] == [True, True]


async def test_a_template_is_an_image_and_brings_its_own_system(
    containers: ContainerProvider, engine: ContainerEngine, tmp_path: Path
) -> None:
    system = _packed(a_system(tmp_path / "system", python=True))
    given = {"GREETING": "salut", "HOME": "/root", "PYTHONPATH": f"/opt:{HOME}/workdir", "BASH_ENV": "start.sh"}
    await engine.import_tree(system, SYSTEM, env=given)
    spec = SandboxSpec(backend="container", template=SYSTEM)
    async with containers.open(spec) as box:
        assert MARK in (await run(box, ["cat", "/etc/os-release"])).stdout.text
        assert (await run(box, ["git", "--version"])).code == 127, "nothing of the host's programs"
        assert (await sh(box, "id -un; echo x > ~/x; cat ~/x /etc/shadow")).stdout.text == "user\nx\nroot:secret\n"
        assert (await run(box, ["printenv", "GREETING", "HOME"])).stdout.text == f"salut\n{HOME}\n"
        assert (await run(box, ["printenv", "GREETING", "USER"], inherit_image_env=False)).stdout.text == "user\n"
        verified, lost = await environment_from(box, [f"{HOME}/workdir"])
        assert (verified["GREETING"], verified["PYTHONPATH"], lost) == ("salut", "/opt", ("BASH_ENV", "PYTHONPATH"))


async def test_an_image_that_cannot_be_a_box_is_named_with_the_reason(
    containers: ContainerProvider, engine: ContainerEngine, tmp_path: Path
) -> None:
    await engine.import_tree(_packed(a_system(tmp_path / "system")), BARE)
    with pytest.raises(SetupError, match=rf"{BARE}.* python3"):
        async with containers.open(SandboxSpec(backend="container", template=BARE)):
            pass
    with pytest.raises(UsageError, match=r"template: there is no image 'localhost/nowhere:x'"):
        async with containers.open(SandboxSpec(backend="container", template="localhost/nowhere:x")):
            pass


async def test_without_an_engine_the_error_says_what_to_do(tmp_path: Path) -> None:
    nowhere = f"unix://{tmp_path}/none.sock"
    with pytest.raises(SetupError, match=r"no such socket\).*podman system service.*DOCKER_HOST"):
        async with ContainerProvider(tmp_path, [nowhere]).open(SandboxSpec()):
            pass
    with pytest.raises(SetupError, match=r"DOCKER_HOST=tcp://.*on this machine"):
        async with ContainerProvider(tmp_path, ["tcp://127.0.0.1:1"]).open(SandboxSpec()):
            pass


def test_the_engine_is_looked_for_where_the_user_says_or_where_engines_are() -> None:
    found = Settings.from_environ({"HOME": "/h", "XDG_RUNTIME_DIR": "/run/user/7"}, root=False).engines
    assert found[0] == "unix:///run/user/7/podman/podman.sock", "rootless first"
    assert found[-1] == "unix:///var/run/docker.sock"
    assert Settings.from_environ({"HOME": "/h", "DOCKER_HOST": "unix:///x"}, root=False).engines == ("unix:///x",)


def test_a_provider_that_nobody_uses_loads_no_client_library() -> None:
    script = (
        "import sys; from pathlib import Path; from rollcage.sandboxes.container.provider import ContainerProvider; "
    )
    script += "ContainerProvider(Path('/x'), []); sys.exit('docker' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


async def test_the_line_into_the_box_is_not_there_for_its_commands(containers: ContainerProvider) -> None:
    async with containers.open(SandboxSpec()) as box:
        seen = await sh(box, "ls -A /run/rollcage/line; ls /proc/1/fd; cat /proc/1/environ; kill -9 1; echo $?")
    assert seen.stdout.text == "1\n", seen.stderr.text


async def test_a_command_that_forks_and_dies_without_end_dies_with_its_block(containers: ContainerProvider) -> None:
    hop = "import os\nwhile True:\n  if os.fork(): os._exit(0)\n  os.setsid()"
    async with containers.open(SandboxSpec()) as box, box.spawn(["cat"]) as beside:
        alone = await run(box, ["python3", "-I", "-c", f"{hop}\n"], timeout_s=100)
        assert alone.code == 0
        await beside.stdin.send(b"x")
        # Beside another command it may take that one along, but never stay.
        left = await sh(box, "ps -e -o user=,comm= | grep -c '^user *python3'")
        assert left.stdout.text == "0\n"


async def test_daemons_die_with_their_command_and_other_commands_go_on(containers: ContainerProvider) -> None:
    async with containers.open(SandboxSpec()) as box, box.spawn(["cat"]) as beside:
        await run(box, ["bash", "-c", "setsid sleep 1001 & (setsid nohup sleep 1002 &) ; exit 0"])
        assert (await sh(box, "pgrep -f 'sleep 100[12]'")).stdout.text == ""
        await beside.stdin.send(b"still here")
        assert await beside.stdout.receive() == b"still here"


@pytest.mark.skipif(not ROOT, reason="only root may kill what stands over a command")
async def test_a_command_whose_supervisor_is_killed_dies_too(containers: ContainerProvider) -> None:
    async with containers.open(SandboxSpec()) as box, box.spawn(["bash", "-c", "sleep 1006 & echo; wait"]) as process:
        await process.stdout.receive()
        # bash, and what it has forked but is not `sleep` yet
        named = living("sleep 1006 & echo")
        [supervisor] = {parent_of(pid) for pid in named} - set(named)
        os.kill(supervisor, signal.SIGKILL)
        with anyio.fail_after(120):
            assert await process.wait() == 137
            while living("sleep\x001006"):
                await anyio.sleep(0.01)
        assert (await run(box, ["true"])).code == 0, "the box goes on"


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


CRASHING = """
import sys, anyio
from pathlib import Path
from rollcage.sandboxes.container.provider import ContainerProvider
from rollcage.types import SandboxSpec
async def main():
    async with ContainerProvider(Path(sys.argv[1]), [sys.argv[2]]) as containers:
        async with containers.open(SandboxSpec()) as box, box.spawn(["sleep", "1003"]):
            print(box.id, flush=True)
            await anyio.sleep_forever()
anyio.run(main)
"""


async def test_a_killed_process_leaves_no_container(
    engine: ContainerEngine, engine_address: str, tmp_path: Path
) -> None:
    script = subprocess.Popen([sys.executable, "-c", CRASHING, str(tmp_path), engine_address], stdout=subprocess.PIPE)
    assert script.stdout is not None
    with script.stdout as lines:
        name = lines.readline().decode().strip()
    assert await engine.runs(name)
    os.kill(script.pid, signal.SIGKILL)
    script.wait()
    with anyio.fail_after(120):
        while await engine.runs(name):
            await anyio.sleep(0.05)
    async with ContainerProvider(tmp_path, [engine_address]) as containers, containers.open(SandboxSpec()):
        left = [entry.name for entry in (tmp_path / "containers").iterdir()]
    assert len(left) == 1, "its folder is gone too, and there is ours"


async def test_containers_of_the_dead_are_reaped_and_those_of_the_living_are_not(
    containers: ContainerProvider, engine: ContainerEngine, engine_address: str, state: Path
) -> None:
    async with containers.open(SandboxSpec()) as living:
        image = next(iter(await _images(engine)))
        labels = {OWNER: str(state / "containers" / "dead"), "rollcage.state": str(state)}
        limits = {"ulimits": {"nofile": 1024, "nproc": 1024}, "security": []}
        stray = Container("rollcage-stray", image, ["/usr/bin/sleep", "1004"], labels, _system(), {}, limits)
        await engine.start(stray)
        assert await engine.runs("rollcage-stray")
        async with ContainerProvider(state, [engine_address]) as another, another.open(SandboxSpec()):
            assert not await engine.runs("rollcage-stray")
            assert (await run(living, ["true"])).code == 0


async def test_a_box_whose_container_is_killed_is_lost_for_everyone_who_waits(
    containers: ContainerProvider, engine: ContainerEngine
) -> None:
    async with containers.open(SandboxSpec()) as box:
        async with box.spawn(["sleep", "1005"]) as process:
            await engine.remove(box.id)
            with anyio.fail_after(120), pytest.raises(SandboxLost):
                await process.wait()
        with pytest.raises(SandboxLost):
            await box.read(f"{HOME}/x")


async def _images(engine: ContainerEngine) -> list[str]:
    listed = await engine.call("list images", lambda client: client.images(name="localhost/rollcage/bare"))
    return [tag for entry in listed for tag in entry["RepoTags"]]


def _system() -> dict[str, str]:
    return {"/usr": "/usr"}


def _packed(folder: Path) -> bytes:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        tar.add(folder, arcname=".", filter=_roots)
    return output.getvalue()


def _roots(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    return member


@pytest.mark.slow
async def test_the_base_system_in_a_container_has_the_programs_of_local_boxes(
    engine_address: str, state_dir: Path
) -> None:
    await anyio.to_thread.run_sync(base_there, state_dir)
    look = 'for name in $COMMANDS; do command -v "$name" > /dev/null || echo "no $name"; done; python -c "print(1)"'
    async with ContainerProvider(state_dir, [engine_address]) as boxes:
        for _ in range(2):  # the second time its image is there
            async with boxes.open(SandboxSpec(backend="container", system="base")) as box:
                ran = await sh(box, look, env={"COMMANDS": " ".join(COMMANDS)})
                assert (ran.stdout.text, ran.code) == ("1\n", 0), ran
