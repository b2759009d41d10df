"""Cheats against plain shell verifiers: which are paid is known, by name, and honest work is paid in every style."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.tasks.cheats import cheats_for
from rollcage.types import SandboxSpec, Task
from support.judging import judged
from support.paths import ROOT
from support.plain_cheats import AUDITED, CHEATS, PAID, PAID_UNLESS_RESTORED, STYLES

SPEC = SandboxSpec(disk_mb=64, tmp_mb=32, pids=64)
SECONDS = 20
HANGS = "an answer that is a pipe"


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(tmp_path_factory.mktemp("state")) as opened:
        yield opened


@pytest.mark.parametrize("verify_in", ["box", pytest.param("fresh", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "cheat", [pytest.param(name, marks=pytest.mark.slow) if name == HANGS else name for name in CHEATS]
)
async def test_a_cheat_is_paid_only_where_it_is_known_to_be(
    cheat: str, verify_in: str, provider: LocalProvider
) -> None:
    style, work = CHEATS[cheat]
    task = Task(**STYLES[style].task, instruction=work, verify_in=verify_in)
    verdict = await judged(provider, task, SPEC, seconds=SECONDS)
    paid = verdict.total is not None and verdict.total > STYLES[style].floor
    assert paid == (cheat in PAID or cheat in PAID_UNLESS_RESTORED), verdict
    if verdict.reward is None:
        assert verdict.error is not None and verdict.error.blame == "agent", "counted against whoever made it so"
    if paid:
        assert verdict.reward is not None and verdict.reward.trust == "shared"
        assert verdict.suspicions, "what is paid is suspected"


@pytest.mark.parametrize("cheat", [*PAID_UNLESS_RESTORED, "a GNUmakefile before the Makefile"])
async def test_what_a_task_names_in_restore_is_paid_no_longer(cheat: str, provider: LocalProvider) -> None:
    style, work = CHEATS[cheat]
    task = Task(**STYLES[style].task, instruction=work, restore=STYLES[style].restore)
    assert (await judged(provider, task, SPEC)).total == 0
    honest = task.model_copy(update={"instruction": STYLES[style].honest})
    assert (await judged(provider, honest, SPEC)).total == 1


@pytest.mark.parametrize("cheat", (*PAID, *PAID_UNLESS_RESTORED))
async def test_an_audit_tries_what_is_paid(cheat: str, provider: LocalProvider) -> None:
    style = STYLES[CHEATS[cheat][0]]
    target = re.findall(r"> (\S+?);?(?: |$)", style.honest)[-1]
    task = Task(**style.task, instruction="x", solution_script=style.honest)
    tried = {each.name: each.script for each in cheats_for(task, [target])}
    verdict = await judged(provider, Task(**style.task, instruction=tried[AUDITED[cheat]]), SPEC, seconds=SECONDS)
    assert verdict.total is not None and verdict.total > style.floor, verdict
    assert verdict.suspicions


@pytest.mark.parametrize("verify_in", ["box", pytest.param("fresh", marks=pytest.mark.slow)])
@pytest.mark.parametrize("style", STYLES)
async def test_honest_work_is_paid_in_every_style(style: str, verify_in: str, provider: LocalProvider) -> None:
    task = Task(**STYLES[style].task, instruction=STYLES[style].honest, verify_in=verify_in)
    verdict = await judged(provider, task, SPEC)
    assert (verdict.total, verdict.suspicions) == (1, ()), verdict


def test_the_docs_name_every_cheat_that_is_paid() -> None:
    page = (ROOT / "docs" / "verification.md").read_text()
    listed = page.split("## What a plain shell verifier pays")[1].split("\n## ")[0]
    for name in (*PAID, *PAID_UNLESS_RESTORED):
        assert f"- {name}\n" in listed, name
    assert listed.count("\n- ") == len(PAID) + len(PAID_UNLESS_RESTORED)
