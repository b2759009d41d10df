"""A divided machine of E2B holds what a divided local box holds, by the same tests: E2B's own SDK against a small E2B
whose machines have a root."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import test_sandbox_separate as local

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import sh
from rollcage.sandboxes.e2b.provider import E2BProvider
from rollcage.types import SandboxSpec
from support.boxes import ROOT
from support.e2b_runtime import E2BRuntime
from support.judge_cheats import HONEST, PLANTS, PROGRAMS, STYLES, attempt, program
from support.judging import judged

pytestmark = pytest.mark.skipif(not ROOT, reason="only root can make machines with a root of their own")

SPEC = SandboxSpec(backend="e2b", disk_mb=64, tmp_mb=32, pids=64)
QUICK = ("looks for the tests", "writes the reward where it lies", "kills everything", "makes the workdir a link")
"""Tried every time; CI tries the others too."""


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[E2BProvider]:
    folder = tmp_path_factory.mktemp("e2b")
    async with E2BRuntime(folder / "runtime", rooted=True) as runtime:
        async with E2BProvider(runtime.settings, folder / "state") as opened:
            yield opened
        assert not runtime.machines


@pytest.mark.parametrize("same", local.OF_ANY_BOX, ids=lambda test: test.__name__.removeprefix("test_"))
async def test_a_machine_is_divided_as_a_local_box_is(
    same: Callable[[Path], Awaitable[None]],
    provider: E2BProvider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "a_judge", local.judges_of(provider, SandboxSpec(backend="e2b")))
    await same(tmp_path)


async def test_a_machine_is_divided_once_and_tells_what_was_launched(provider: E2BProvider) -> None:
    async with provider.open(SPEC) as box:
        await sh(box, f"mkdir -p ~/workdir ~/tests {local.REWARDS}")
        async with box.separate(local.DIVISION) as side:
            async with side.spawn(["sh", "-c", "cat; pwd; id -u; ls ~/tests"], cwd=local.WORKDIR) as process:
                await process.stdin.send(b"from here\n")
                await process.stdin.aclose()
                said = b"".join([chunk async for chunk in process.stdout])
                assert (said, await process.wait()) == (b"from here\n/home/user/workdir\n1000\n", 2)
            assert side.launched == 0
            assert (await sh(box, "untrusted true && untrusted true", env=local.ENV)).code == 0
            assert side.launched == 2
        with pytest.raises(SandboxError, match="divided already"):
            async with box.separate(local.DIVISION):
                pass


@pytest.mark.parametrize(
    "cheat", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in (*PROGRAMS, *PLANTS)]
)
async def test_hostile_code_earns_a_zero_and_no_more(cheat: str, provider: E2BProvider) -> None:
    work = program(PROGRAMS[cheat]) if cheat in PROGRAMS else PLANTS[cheat]
    style = list(STYLES)[1 + [*PROGRAMS, *PLANTS].index(cheat) % 2]
    verdict = await judged(provider, attempt(style, work), SPEC)
    assert verdict.total == 0, verdict


@pytest.mark.parametrize("style", STYLES)
async def test_honest_work_earns_its_reward_in_every_style(style: str, provider: E2BProvider) -> None:
    verdict = await judged(provider, attempt(style, program(HONEST)), SPEC)
    assert verdict.total == 1, verdict
    assert verdict.reward is not None
    assert verdict.reward.trust == ("isolated" if STYLES[style].isolate else "shared")
    assert not verdict.suspicions
