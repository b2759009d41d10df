"""The same hostile programs under the same verifiers, in containers: none pays there either, and honest work does."""

from __future__ import annotations

import pytest
from test_checks_hostile import TRICKS, tried

from rollcage.sandboxes.container.provider import ContainerProvider
from rollcage.types import Task
from support.judge_cheats import HONEST, PLANTS, PROGRAMS, SPEC, STYLES, attempt, program
from support.judging import judged

QUICK = (
    "writes the reward where it lies",
    "looks for the tests",
    "reads the processes around it",
    "kills everything",
    "takes the workdir away",
    "makes the workdir a link",
)
"""Tried every time; CI tries the others too."""
UNBOUNDED = "forks without end"
"""Only where the engine bounds the processes of a container."""


def each(names: dict[str, str]) -> list[object]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("cheat", each(PROGRAMS))
async def test_a_hostile_program_earns_a_zero_and_no_more(cheat: str, containers: ContainerProvider) -> None:
    if cheat == UNBOUNDED:
        async with containers.open(SPEC) as box:
            if any(note.startswith("pids") for note in box.notes):
                pytest.skip("this engine does not bound the processes of a container")
    style = list(STYLES)[1 + list(PROGRAMS).index(cheat) % 2]
    verdict = await judged(containers, attempt(style, program(PROGRAMS[cheat])), SPEC)
    assert verdict.total == 0, verdict


@pytest.mark.parametrize("plant", each(PLANTS))
async def test_what_an_agent_leaves_for_the_judge_earns_a_zero(plant: str, containers: ContainerProvider) -> None:
    style = list(STYLES)[2 * (list(PLANTS).index(plant) % 2)]
    verdict = await judged(containers, attempt(style, PLANTS[plant]), SPEC)
    assert verdict.total == 0, verdict


@pytest.mark.parametrize("style", STYLES)
async def test_honest_work_earns_its_reward_in_every_style(style: str, containers: ContainerProvider) -> None:
    verdict = await judged(containers, attempt(style, program(HONEST), "fresh"), SPEC)
    assert verdict.total == 1, verdict
    assert verdict.reward is not None
    assert verdict.reward.trust == ("isolated" if STYLES[style].isolate else "shared")
    assert not verdict.suspicions


async def test_no_command_finds_what_an_earlier_one_left_but_in_the_work(containers: ContainerProvider) -> None:
    task = Task(
        instruction="true",
        verify=(
            "echo x | tee ~/left /tmp/left /dev/shm/left ~/logs/left > handed_on; echo 1 > $REWARD_FILE",
            "! ls ~/left /tmp/left /dev/shm/left ~/logs/left",
            "grep -qx x handed_on && grep -qx 1 $REWARD_FILE",
        ),
    )
    verdict = await judged(containers, task, SPEC)
    assert [each.exit_code for each in verdict.commands] == [0, 0, 0], verdict.commands


async def test_a_proxied_check_follows_no_link_that_its_code_makes(containers: ContainerProvider) -> None:
    await tried(TRICKS["a link to what is expected, made while it is tested"], containers)
