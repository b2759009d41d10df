"""A backend whose boxes cannot be rewound gives the same verdicts: verification starts from what setup left."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.agents.shell import Shell
from rollcage.errors import SandboxError
from rollcage.events import BoxOpened
from rollcage.gateway import Gateway
from rollcage.results.fold import Rollout
from rollcage.runner import Registry, Runner
from rollcage.sandboxes.base import Rewindable
from rollcage.sandboxes.files import NotCopied, copy_path
from rollcage.sandboxes.home_archive import archived_home
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import HOME, AgentSpec, Job, Outcome, SandboxSpec, Task
from support.plain_boxes import PlainProvider

pytestmark = pytest.mark.anyio


async def _play(task: Task, store: Store, state_dir: Path, model: ScriptedModel) -> Rollout:
    async with Gateway.open() as gateway, LocalProvider(state_dir) as local:
        backends = Registry(providers={"plain": PlainProvider(local)}, agents={"shell": Shell()}, gateway=gateway)
        async with Runner.open(store, backends) as runner:
            spec = SandboxSpec(backend="plain", disk_mb=64)
            job = Job(task=task, model=model.endpoint(()), agent=AgentSpec(name="shell"), sandbox=spec)
            return await runner.wait(await runner.start(job))


async def test_verification_sees_setup_and_the_workdir_and_nothing_else(
    store: Store, state_dir: Path, model: ScriptedModel
) -> None:
    plant = "echo done > work.txt; echo planted > ~/plant; echo changed > ~/tool; rm ~/other; touch ~/.cache/x"
    task = Task(
        instruction=plant,
        setup=(
            "mkdir -p ~/.cache; echo original > ~/tool; echo other > ~/other; ln -s tool ~/link; echo s > made.txt",
        ),
        verify=(
            "grep -qx done work.txt",
            "test ! -e ~/plant && test ! -e ~/.cache/x",
            "grep -qx original ~/tool && grep -qx other ~/other && test -L ~/link",
            "grep -qx s made.txt",
        ),
    )
    rollout = await _play(task, store, state_dir, model)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert [result.exit_code for result in rollout.verify] == [0, 0, 0, 0]
    opened = [entry.event for entry in await store.read(rollout.id) if isinstance(entry.event, BoxOpened)]
    assert [event.fresh for event in opened] == [False, True] and opened[0].sandbox_id != opened[1].sandbox_id
    assert rollout.patch is not None and "+done" in rollout.patch and "made.txt" not in rollout.patch


async def test_such_a_box_is_really_not_rewindable(state_dir: Path) -> None:
    async with LocalProvider(state_dir) as local, PlainProvider(local).open(SandboxSpec()) as box:
        assert not isinstance(box, Rewindable)


async def test_a_home_too_large_to_save_is_a_clear_error(state_dir: Path) -> None:
    async with LocalProvider(state_dir) as local, local.open(SandboxSpec()) as box:
        await box.write(f"{HOME}/large", bytes(3 << 20))
        with pytest.raises(SandboxError, match="larger than 2 MB after setup"):
            async with archived_home(box, limit=2 << 20):
                pass
        async with archived_home(box, without=[f"{HOME}/large"], limit=2 << 20):
            pass


@pytest.mark.parametrize("spent", ["inodes", "bytes"])
async def test_a_workdir_that_fills_the_disk_is_judged_in_a_box_with_room(
    store: Store, state_dir: Path, model: ScriptedModel, spent: str
) -> None:
    fill = {
        "inodes": "mkdir d; n=0; while touch $(seq -f d/%g $n $((n+999))) 2>/dev/null; do n=$((n+1000)); done; true",
        "bytes": "head -c 1G /dev/zero > zeros; head -c 1G /dev/urandom > noise; true",
    }[spent]
    task = Task(instruction=f"echo done > work.txt; {fill}", verify=("grep -qx done work.txt", "false"))
    rollout = await _play(task, store, state_dir, model)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert [result.exit_code for result in rollout.verify] == [0, 1]


async def test_a_copy_that_takes_too_long_is_the_fault_of_what_is_copied(state_dir: Path) -> None:
    async with LocalProvider(state_dir) as local, local.open(SandboxSpec()) as box, local.open(SandboxSpec()) as fresh:
        with pytest.raises(NotCopied, match="took more than 0 s"):
            await copy_path(box, fresh, f"{HOME}/workdir", timeout_s=0)
