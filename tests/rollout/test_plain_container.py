"""The same cheats against the same plain verifiers, in containers: guards hold there, and honest work is paid."""

from __future__ import annotations

import pytest
from test_guards import HONEST

from rollcage.sandboxes.container.provider import ContainerProvider
from rollcage.types import SandboxSpec, Task
from support.judging import judged
from support.plain_cheats import CHEATS, PAID, PAID_UNLESS_RESTORED, STYLES

SPEC = SandboxSpec(backend="container", disk_mb=64, tmp_mb=32, pids=64)
SECONDS = 20
QUICK = ("code ends the test run", "a start-up module in the workdir", "the program kills its judge")
"""Tried every time; CI tries the others too."""


@pytest.mark.parametrize(
    "cheat", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CHEATS]
)
async def test_a_cheat_is_paid_only_where_it_is_known_to_be(cheat: str, containers: ContainerProvider) -> None:
    style, work = CHEATS[cheat]
    task = Task(**STYLES[style].task, instruction=work)
    verdict = await judged(containers, task, SPEC, seconds=SECONDS)
    paid = verdict.total is not None and verdict.total > STYLES[style].floor
    assert not paid or cheat in PAID or cheat in PAID_UNLESS_RESTORED, verdict
    if verdict.reward is None:
        assert verdict.error is not None and verdict.error.blame == "agent"
    if paid:
        assert verdict.reward is not None and verdict.reward.trust == "shared"
        assert verdict.suspicions, "what is paid is suspected"


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
async def test_honest_work_is_paid_in_every_style(style: str, containers: ContainerProvider) -> None:
    task = Task(**STYLES[style].task, instruction=STYLES[style].honest)
    verdict = await judged(containers, task, SPEC)
    assert (verdict.total, verdict.suspicions) == (1, ()), verdict


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
async def test_honest_verifiers_see_no_difference(name: str, containers: ContainerProvider) -> None:
    verdict = await judged(containers, HONEST[name], SPEC)
    assert verdict.total is not None and verdict.total >= 1, verdict
