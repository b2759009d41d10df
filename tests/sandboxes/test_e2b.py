"""E2B: the real SDK against a small E2B on this machine, whose virtual machines are local boxes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode.agent import OpenCode
from rollcage.agents.shell import Shell
from rollcage.conformance.sandboxes import CHECKS, ConformanceCheck, Traits, judge
from rollcage.errors import SandboxError, SandboxLost, SetupError, UsageError
from rollcage.gateway import Gateway
from rollcage.rollout.judge import divided
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import Sandbox, Separable, run, sh
from rollcage.sandboxes.e2b.process import PROGRAM
from rollcage.sandboxes.e2b.provider import MARKER, E2BProvider
from rollcage.sandboxes.layers import Layer
from rollcage.settings import E2BSettings, Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import HOME, Job, Limits, Outcome, SandboxSpec, ScriptedCall, ScriptedTurn, Task
from support.boxes import ROOT
from support.e2b_runtime import E2BRuntime
from support.hand_made import until
from support.playing import Play

SPEC = SandboxSpec(backend="e2b")
HEAVY = frozenset(
    "files.large files.names processes.output processes.unread processes.timeouts lifecycle.fifty "
    "lifecycle.descriptors listen.slow_reader listen.slow_server listen.bodies listen.many".split()
)
"""Run where everything is run."""


@pytest.fixture(scope="module")
async def runtime(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[E2BRuntime]:
    async with E2BRuntime(tmp_path_factory.mktemp("runtime")) as served:
        yield served


@pytest.fixture
async def provider(runtime: E2BRuntime, tmp_path: Path) -> AsyncIterator[E2BProvider]:
    async with E2BProvider(runtime.settings, tmp_path) as opened:
        yield opened
    assert not runtime.machines, "every box was given back"


@pytest.mark.parametrize(
    "check",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in HEAVY else []) for c in CHECKS],
)
async def test_it_conforms(provider: E2BProvider, runtime: E2BRuntime, check: ConformanceCheck) -> None:
    async def lose(box: Sandbox) -> None:
        await runtime.vanish(box.id)

    verdict = await judge(check, provider, Traits(lose=lose, pace=4))
    assert verdict.outcome != "failed", verdict.detail


async def test_a_task_that_relies_on_the_launcher_is_refused_where_the_machine_gives_no_root(
    provider: E2BProvider,
) -> None:
    async def log(_: object) -> None:
        raise AssertionError("nothing is judged")

    async with provider.open(SPEC) as box:
        assert isinstance(box, Separable)
        with pytest.raises(SandboxError, match=r"no root.*the task relies on that") as refused:
            async with divided(Task(instruction="x", verify=("untrusted ./program",)), box, log):
                pass
        assert "rollcage doctor" in refused.value.remedy


async def test_a_busy_cloud_is_asked_again_and_gives_one_box(provider: E2BProvider, runtime: E2BRuntime) -> None:
    before, runtime.refusals = runtime.attempts, [429, 503]
    async with provider.open(SPEC) as box:
        assert (await sh(box, "echo up")).stdout.text == "up\n"
        assert list(runtime.machines) == [box.id]
    assert runtime.attempts - before == 3


async def test_a_refusal_is_not_asked_again(provider: E2BProvider, runtime: E2BRuntime) -> None:
    before = runtime.attempts
    with pytest.raises(SandboxError, match="template 'nonesuch' not found"):
        async with provider.open(SPEC.model_copy(update={"template": "nonesuch"})):
            pass
    assert runtime.attempts - before == 1


async def test_a_wrong_key_is_told_by_its_variable(runtime: E2BRuntime, tmp_path: Path) -> None:
    wrong = runtime.settings.model_copy(update={"api_key": E2BSettings.model_validate({"api_key": "no"}).api_key})
    async with E2BProvider(wrong, tmp_path) as provider:
        with pytest.raises(SetupError, match="check E2B_API_KEY"):
            async with provider.open(SPEC):
                pass


def test_without_a_key_nothing_is_started_and_the_variable_is_named(tmp_path: Path) -> None:
    settings = Settings.from_environ({"HOME": str(tmp_path)})
    with pytest.raises(UsageError, match="set E2B_API_KEY"):
        E2BProvider(settings.e2b, tmp_path).check(SPEC)
    assert not list(tmp_path.iterdir())
    given = Settings.from_environ({"HOME": "/h", "E2B_API_KEY": " k ", "E2B_DOMAIN": "e2b.example"}).e2b
    assert (given.api_key.get_secret_value(), given.domain) == ("k", "e2b.example")


async def test_a_box_is_ordered_without_internet_and_with_our_tags(provider: E2BProvider, runtime: E2BRuntime) -> None:
    async with provider.open(SPEC):
        order = runtime.orders[-1]
        assert not order.internet
        assert set(order.metadata) == {"rollcage", "rollcage-owner"}


async def test_a_box_outlives_its_time_as_long_as_it_is_open(runtime: E2BRuntime, tmp_path: Path) -> None:
    async with E2BProvider(runtime.settings, tmp_path, ttl_s=5) as provider, provider.open(SPEC) as box:
        machine = runtime.machines[box.id]
        await until(lambda: machine.renewals >= 7)
        assert (await sh(box, "echo alive")).stdout.text == "alive\n"


async def test_an_idle_box_that_vanished_is_noticed_by_itself(runtime: E2BRuntime, tmp_path: Path) -> None:
    async with E2BProvider(runtime.settings, tmp_path, ttl_s=2) as provider, provider.open(SPEC) as box:
        await runtime.vanish(box.id)
        await until(lambda: box.lost)
        with pytest.raises(SandboxLost, match="not found"):
            await sh(box, "true")


async def test_who_gives_up_while_a_box_is_made_leaves_none(provider: E2BProvider, runtime: E2BRuntime) -> None:
    made, asked = len(runtime.orders), runtime.attempts
    runtime.slow_s = 1

    async def order() -> None:
        async with provider.open(SPEC):
            await anyio.sleep_forever()

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(order)
            await until(lambda: runtime.attempts > asked)
            tasks.cancel_scope.cancel()
        await provider.close()
    finally:
        runtime.slow_s = 0
    assert len(runtime.orders) == made + 1
    assert not runtime.machines


CRASH = """
import anyio, sys
from pathlib import Path
from rollcage.sandboxes.e2b.provider import E2BProvider
from rollcage.settings import E2BSettings
from rollcage.types import SandboxSpec

async def main():
    async with E2BProvider(E2BSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2])) as provider:
        async with provider.open(SandboxSpec(backend="e2b")) as box:
            print(box.id, flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


async def test_boxes_of_a_dead_process_are_given_back_and_those_of_a_living_one_are_not(
    runtime: E2BRuntime, tmp_path: Path
) -> None:
    key = runtime.settings.api_key.get_secret_value()
    settings = json.dumps({**json.loads(runtime.settings.model_dump_json()), "api_key": key})
    async with await anyio.open_process(
        [sys.executable, "-c", CRASH, settings, str(tmp_path)], stderr=None, stdout=subprocess.PIPE
    ) as crashing:
        assert crashing.stdout is not None
        left = (await crashing.stdout.receive()).decode().strip()
        async with E2BProvider(runtime.settings, tmp_path) as living, living.open(SPEC) as kept:
            assert left in runtime.machines, "its owner still lives"
            os.kill(crashing.pid, signal.SIGKILL)
            await crashing.wait()
            async with E2BProvider(runtime.settings, tmp_path) as next_one, next_one.open(SPEC):
                assert left not in runtime.machines
                assert kept.id in runtime.machines


def greeting(text: str) -> Layer:
    async def build(folder: Path) -> None:
        (folder / "bin").mkdir()
        (folder / "bin" / "greet").write_text(f"#!/bin/sh\necho {text}\n")
        (folder / "bin" / "greet").chmod(0o755)
        (folder / text).symlink_to("bin/greet")

    return Layer(name="greeting", key=text, build=build)


async def test_layers_are_unpacked_in_a_new_home_the_topmost_last(provider: E2BProvider, runtime: E2BRuntime) -> None:
    async with provider.open(SPEC, [greeting("over"), greeting("under")]) as box:
        assert (await run(box, [f"{HOME}/bin/greet"])).stdout.text == "over\n"
        listed = await sh(box, "ls -A ~ /tmp; readlink under; stat -c %U bin/greet")
        assert listed.stdout.text == f"{HOME}:\nbin\nover\nunder\n\n/tmp:\nbin/greet\nuser\n".replace(
            f"{HOME}:", "/home/user:"
        )


async def test_a_template_that_was_built_with_the_layers_is_sent_nothing(
    provider: E2BProvider, runtime: E2BRuntime
) -> None:
    from rollcage.sandboxes.e2b.template import TemplateRecipe, build_template

    said: list[str] = []
    recipe = TemplateRecipe(layers=[greeting("baked")], setup=["echo by root"])
    await build_template(provider, "ours", recipe, said.append)
    assert said
    assert "ours" in runtime.templates.names
    before = runtime.uploads
    spec = SPEC.model_copy(update={"template": "ours"})
    async with provider.open(spec, [greeting("baked")]) as box:
        assert runtime.uploads == before
        assert (await sh(box, "bin/greet; ls -A ~")).stdout.text == "baked\nbaked\nbin\n"
        assert MARKER.startswith(".")
    async with provider.open(spec, [greeting("other")]) as box:
        assert runtime.uploads == before + 1, "what is baked is not what is wanted"
        assert (await sh(box, "bin/greet; ls -A ~")).stdout.text == "other\nbin\nother\n"


def launched(tmp_path: Path, argv: list[str], stdin: bytes = b"") -> subprocess.Popen[bytes]:
    """The launcher as root would run in a virtual machine of its own; its mounts end with it."""
    request = {"argv": argv, "env": {"PATH": "/usr/bin:/bin"}, "cwd": "/", "limits": {"CORE": 0}}
    body = json.dumps({**request, "uid": 61234, "gid": 61234}).encode()
    program = PROGRAM.replace("/run/rollcage", str(tmp_path / "state"))
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "python3", "-I", "-S", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(len(body).to_bytes(4, "big") + body + stdin)
    process.stdin.flush()
    return process


@pytest.mark.skipif(not ROOT, reason="the launcher isolates as root only")
def test_as_root_a_command_has_its_own_processes_an_empty_network_and_no_way_to_be_root(tmp_path: Path) -> None:
    look = (
        "id -u; ls /proc | grep -c '^[0-9]'; grep -c : /proc/net/dev; grep NoNewPrivs /proc/self/status; "
        "cat; printf '\\377'; exit 7"
    )
    process = launched(tmp_path, ["sh", "-c", look], b"input\n")
    out, err = process.communicate(timeout=120)
    head, _, said = out.partition(b"\n")
    assert json.loads(head) == {"apart": True, "missing": [], "refused": ""}, err
    uid, processes, devices, rest = said.split(b"\n", 3)
    assert (uid, devices) == (b"61234", b"1")
    assert int(processes) < 10, "it sees its own processes only"
    assert rest == b"NoNewPrivs:\t1\ninput\n" + "\xff".encode(), "bytes travel as characters"
    assert process.returncode == 7


@pytest.mark.skipif(not ROOT, reason="the launcher isolates as root only")
async def test_as_root_a_killed_launcher_takes_every_daemon_with_it(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        beat = Path(folder, "beat")
        beat.touch()
        Path(folder).chmod(0o755)
        beat.chmod(0o666)
        daemon = f"(setsid sh -c 'while :; do echo x >> {beat}; sleep 0.05; done' &) & "
        daemon += f"until [ -s {beat} ]; do sleep 0.05; done; echo up; sleep 1000"
        process = launched(tmp_path, ["sh", "-c", daemon])
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == b"up\n"
        # `unshare` has become the launcher: this is what the SDK's kill does.
        process.kill()
        process.communicate(timeout=120)
        assert await _settles(beat)


async def _settles(path: Path) -> bool:
    """Whether a file stops growing."""
    for _ in range(50):
        before = path.stat().st_size
        await anyio.sleep(0.3)
        if path.stat().st_size == before:
            return True
    return False


# Whole rollouts.


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command, "description": "work"}),))


HELLO = Task(
    instruction="Write hello to hello.txt.",
    setup=("echo seeded > seed.txt",),
    verify=("grep -qx hello hello.txt", "grep -qx seeded seed.txt"),
    solution=(bash("echo hello > hello.txt; curl -sm 3 http://example.com; echo net $?"), ScriptedTurn(text="Done.")),
    limits=Limits(agent_timeout_s=300, verify_timeout_s=120),
)


@pytest.fixture
async def backends(runtime: E2BRuntime, state_dir: Path) -> AsyncIterator[Registry]:
    async with Gateway.open() as gateway, E2BProvider(runtime.settings, state_dir) as provider:
        agents: dict[str, Any] = {"opencode": OpenCode(Downloads(state_dir / "cache")), "shell": Shell()}
        yield Registry(providers={"e2b": provider}, agents=agents, gateway=gateway)


async def test_a_whole_rollout_of_the_real_agent_runs_at_e2b(play: Play, runtime: E2BRuntime) -> None:
    rollout = await play(HELLO, sandbox=SPEC)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward == 1
    assert len(rollout.turns) == 2
    assert all(turn.trainable for turn in rollout.turns)
    assert not runtime.machines


async def test_a_task_that_relies_on_the_launcher_costs_no_agent_where_it_cannot_be_judged(play: Play) -> None:
    task = Task(instruction="touch worked", setup=("touch ready",), verify=("untrusted ls ready",))
    refused = await play(task, agent="shell", sandbox=SPEC)
    assert (refused.outcome, refused.blame) == (Outcome.SANDBOX_FAILED, "infrastructure")
    assert "no root that may mount), and the task relies on that" in str(refused.error)
    assert set(refused.timings) == {"provision", "setup", "total"}, "the agent has not worked in vain"
    plain = await play(task.model_copy(update={"verify": ("ls ready worked",)}), agent="shell", sandbox=SPEC)
    assert plain.reward == 1, plain.error


async def test_a_box_that_vanishes_under_the_agent_ends_the_rollout_as_lost(
    runner: Runner, model: ScriptedModel, runtime: E2BRuntime, store: Store
) -> None:
    task = Task(instruction="echo begun > begun; sleep 300", limits=Limits(agent_timeout_s=300))
    job = Job.model_validate(
        {"task": task, "model": model.endpoint(()), "agent": {"name": "shell"}, "sandbox": {"backend": "e2b"}}
    )
    name = await runner.start(job)
    with anyio.fail_after(120):
        while not runtime.machines:
            await asyncio.sleep(0.05)
        machine = next(iter(runtime.machines.values()))
        while not (await sh(machine.box, "ls ~/workdir/begun")).stdout.data:
            await asyncio.sleep(0.1)
    await runtime.vanish(machine.id)
    rollout = await runner.wait(name)
    assert rollout.outcome is Outcome.SANDBOX_LOST, rollout.error
    assert rollout.reward is None
