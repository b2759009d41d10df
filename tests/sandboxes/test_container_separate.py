"""A divided container holds what a divided local box holds, by the same tests; and hostile code earns as little."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import test_sandbox_separate as local

from rollcage.errors import SandboxError
from rollcage.rollout.judge import divided, refuse_undivided
from rollcage.sandboxes.base import Separable, Separation, run, sh
from rollcage.sandboxes.container import engine
from rollcage.sandboxes.container.box import ContainerBox
from rollcage.sandboxes.container.provider import ContainerProvider
from rollcage.sandboxes.inside.system import HOST_FILES
from rollcage.types import NO_MODEL, Job, SandboxSpec, Task


@pytest.mark.parametrize("same", local.OF_ANY_BOX, ids=lambda test: test.__name__.removeprefix("test_"))
async def test_a_container_is_divided_as_a_local_box_is(
    same: Callable[[Path], Awaitable[None]],
    containers: ContainerProvider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "a_judge", local.judges_of(containers, SandboxSpec()))
    await same(tmp_path)


async def test_a_container_is_divided_once(containers: ContainerProvider) -> None:
    async with containers.open(SandboxSpec()) as box:
        assert isinstance(box, Separable)
        await sh(box, f"mkdir -p ~/workdir ~/tests {local.REWARDS}")
        async with box.separate(local.DIVISION) as judged:
            async with judged.spawn(["sh", "-c", "cat; pwd"], cwd=local.WORKDIR) as process:
                await process.stdin.send(b"from here\n")
                await process.stdin.aclose()
                said = b"".join([chunk async for chunk in process.stdout])
                assert (said, await process.wait()) == (b"from here\n/home/user/workdir\n", 0)
            assert judged.launched == 0
        with pytest.raises(SandboxError, match="divided already"):
            async with box.separate(local.DIVISION):
                pass


async def test_neither_side_is_told_of_the_machine_and_neither_has_a_capability(containers: ContainerProvider) -> None:
    look = f"cat {' '.join(HOST_FILES)} 2>/dev/null | wc -c; grep -h '^Cap' /proc/self/status | sort -u -k2"
    async with containers.open(SandboxSpec()) as box:
        await sh(box, f"mkdir -p ~/workdir ~/tests {local.REWARDS}")
        async with box.separate(local.DIVISION):
            for side in ("", "untrusted "):
                seen = await sh(box, f"{side}sh -c {look!r}".replace("'^Cap'", "^Cap"), env=local.ENV)
                assert seen.stdout.text.split() == ["0", "CapInh:", "0" * 16], (side, seen)
            refused = await sh(box, "untrusted sh -c 'mount -t tmpfs x /tmp || unshare -r true'", env=local.ENV)
            assert refused.code != 0


async def test_where_an_engine_cannot_divide_the_task_that_relies_on_it_is_refused(
    containers: ContainerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def cannot(self: ContainerBox, separation: Separation) -> AsyncIterator[None]:
        raise SandboxError("no mounts here")
        yield

    noticed: list[Any] = []

    async def log(event: Any) -> None:
        noticed.append(event)

    monkeypatch.setattr(ContainerBox, "separate", cannot)
    async with containers.open(SandboxSpec()) as box:
        with pytest.raises(SandboxError, match=r"no mounts here.*relies on that"):
            async with divided(Task(instruction="x", verify=("untrusted true",)), box, log):
                pass
        async with divided(Task(instruction="x", verify=("true",)), box, log) as judged:
            assert judged is None
            assert (await run(box, ["true"])).code == 0
    assert [event.code for event in noticed] == ["not_separated"]


async def test_an_engine_that_keeps_sys_admin_to_itself_is_found_out_before_anybody_works(
    containers: ContainerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [
        Job.model_validate({"task": {"instruction": "x", "verify": verify}, "model": NO_MODEL})
        for verify in (["true"], ["untrusted true"])
    ]
    async with containers.open(SandboxSpec()) as box:
        await refuse_undivided(jobs, box)
    monkeypatch.setattr(engine, "CAPABILITIES", tuple(name for name in engine.CAPABILITIES if name != "SYS_ADMIN"))
    async with containers.open(SandboxSpec()) as box:
        await refuse_undivided(jobs[:1], box)
        with pytest.raises(SandboxError, match=r"no SYS_ADMIN.*relies on that"):
            await refuse_undivided(jobs, box)
