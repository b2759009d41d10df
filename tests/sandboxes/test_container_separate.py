"""A divided container holds what a divided local box holds, by the same tests; and hostile code earns as little."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import test_sandbox_separate as local

from rollcage.errors import SandboxError
from rollcage.rollout.judge import divided, refuse_undivided
from rollcage.sandboxes.base import Exit, Separable, Separation, run, sh
from rollcage.sandboxes.container import engine
from rollcage.sandboxes.container.box import ContainerBox
from rollcage.sandboxes.container.provider import ContainerProvider
from rollcage.sandboxes.inside.system import HOST_FILES
from rollcage.types import NO_MODEL, TESTS_DIR, Job, SandboxSpec, Task
from support.container_engine import an_engine

SAME: list[Callable[[Path], Awaitable[None]]] = [
    local.test_streams_and_exit_codes_come_back,
    local.test_both_work_in_the_same_workdir_and_nowhere_else,
    local.test_the_tests_cannot_be_changed_and_the_launcher_not_be_replaced,
    local.test_time_and_output_are_bounded,
    local.test_what_cannot_be_started_is_said_in_a_sentence,
    local.test_a_scratch_copy_takes_nothing_along,
    local.test_servers_are_reached_unless_the_network_is_cut,
    local.test_the_judge_as_a_python_program,
    local.test_whoever_dies_takes_what_it_launched_along,
    local.test_nobody_disturbs_who_serves_it,
    local.test_whoever_fills_the_workdir_does_not_keep_the_judge_from_writing,
    local.test_the_judge_need_not_see_the_work,
]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    # Not below pytest's own folder: podman refuses a path of more than 50 characters.
    with (
        tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as folder,
        an_engine(Path(folder)) as found,
    ):
        yield found


@pytest.fixture(scope="module")
async def provider(address: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContainerProvider]:
    async with ContainerProvider(tmp_path_factory.mktemp("state"), [address]) as opened:
        yield opened


@pytest.mark.parametrize("same", SAME, ids=lambda test: test.__name__.removeprefix("test_"))
async def test_a_container_is_divided_as_a_local_box_is(
    same: Callable[[Path], Awaitable[None]],
    provider: ContainerProvider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @asynccontextmanager
    async def a_judge(
        _: Path, division: Separation = local.DIVISION, **limits: Any
    ) -> AsyncIterator[Callable[..., Awaitable[Exit]]]:
        async with provider.open(SandboxSpec(**limits)) as box:
            await sh(box, f"mkdir -p ~/workdir {local.REWARDS}; echo work > ~/workdir/a; echo setup > ~/made")
            await box.write(f"{TESTS_DIR}/secret_4711", b"expected\n")
            async with box.separate(division):
                await sh(box, "echo mine > ~/judges_own; echo mine > /tmp/judges_tmp")

                async def judge(text: str, **more: Any) -> Exit:
                    return await sh(box, text, env=local.ENV, cwd=local.WORKDIR, **more)

                yield judge

    monkeypatch.setattr(local, "a_judge", a_judge)
    await same(tmp_path)


async def test_a_container_is_divided_once(provider: ContainerProvider) -> None:
    async with provider.open(SandboxSpec()) as box:
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


async def test_neither_side_is_told_of_the_machine_and_neither_has_a_capability(provider: ContainerProvider) -> None:
    look = f"cat {' '.join(HOST_FILES)} 2>/dev/null | wc -c; grep -h '^Cap' /proc/self/status | sort -u -k2"
    async with provider.open(SandboxSpec()) as box:
        await sh(box, f"mkdir -p ~/workdir ~/tests {local.REWARDS}")
        async with box.separate(local.DIVISION):
            for side in ("", "untrusted "):
                seen = await sh(box, f"{side}sh -c {look!r}".replace("'^Cap'", "^Cap"), env=local.ENV)
                assert seen.stdout.text.split() == ["0", "CapInh:", "0" * 16], (side, seen)
            refused = await sh(box, "untrusted sh -c 'mount -t tmpfs x /tmp || unshare -r true'", env=local.ENV)
            assert refused.code != 0


async def test_where_an_engine_cannot_divide_the_task_that_relies_on_it_is_refused(
    provider: ContainerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def cannot(self: ContainerBox, separation: Separation) -> AsyncIterator[None]:
        raise SandboxError("no mounts here")
        yield

    noticed: list[Any] = []

    async def log(event: Any) -> None:
        noticed.append(event)

    monkeypatch.setattr(ContainerBox, "separate", cannot)
    async with provider.open(SandboxSpec()) as box:
        with pytest.raises(SandboxError, match=r"no mounts here.*relies on that"):
            async with divided(Task(instruction="x", verify=("untrusted true",)), box, log):
                pass
        async with divided(Task(instruction="x", verify=("true",)), box, log) as judged:
            assert judged is None
            assert (await run(box, ["true"])).code == 0
    assert [event.code for event in noticed] == ["not_separated"]


async def test_an_engine_that_keeps_sys_admin_to_itself_is_found_out_before_anybody_works(
    provider: ContainerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [
        Job.model_validate({"task": {"instruction": "x", "verify": verify}, "model": NO_MODEL})
        for verify in (["true"], ["untrusted true"])
    ]
    async with provider.open(SandboxSpec()) as box:
        await refuse_undivided(jobs, box)
    monkeypatch.setattr(engine, "CAPABILITIES", tuple(name for name in engine.CAPABILITIES if name != "SYS_ADMIN"))
    async with provider.open(SandboxSpec()) as box:
        await refuse_undivided(jobs[:1], box)
        with pytest.raises(SandboxError, match=r"no SYS_ADMIN.*relies on that"):
            await refuse_undivided(jobs, box)
