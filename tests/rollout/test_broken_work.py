"""Agents that break the ground on which they are judged: whoever does is not spared its zero."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec, Task
from support.image_making import imported
from support.judging import judged
from support.systems import a_system

LINKS = "import os\nfor number in range(9000): os.symlink('/home/user/tests/x', f'link{number}')"
DEEP = "import os\nfor _ in range(6000):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)"
VERIFIERS: dict[str, dict[str, Any]] = {
    "plain": {"verify": ("test -e answer",)},
    "isolated": {"verify": ("untrusted test -e answer",), "isolate": True},
}


@pytest.fixture(scope="module")
async def provider(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalProvider]:
    folder = tmp_path_factory.mktemp("state")
    async with LocalProvider(folder / "state") as opened:
        await imported(opened, "whole", a_system(folder / "system", python=True))
        yield opened


@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("work", [LINKS, DEEP], ids=["links to the tests", "deep folders"])
async def test_a_workdir_that_is_hard_to_look_at_is_a_zero(work: str, verifier: str, provider: LocalProvider) -> None:
    task = Task(instruction=f'python3 -c "{work}"', **VERIFIERS[verifier])
    verdict = await judged(provider, task, seconds=20)
    assert verdict.total == 0 or (verdict.error is not None and verdict.error.blame == "agent"), verdict


@pytest.mark.parametrize("verify_in", ["box", "fresh"])
async def test_a_repository_that_git_would_wait_for_is_a_zero(verify_in: str, provider: LocalProvider) -> None:
    work = "git init -q; touch .git/index; for name in HEAD config; do rm .git/$name; mkfifo .git/$name; done"
    task = Task(instruction=work, verify=("test -e answer",), verify_in=verify_in)
    assert (await judged(provider, task, seconds=20)).total == 0


async def test_many_links_to_the_tests_are_removed(provider: LocalProvider) -> None:
    task = Task(instruction=f'python3 -c "{LINKS}"; ln -s / mine', verify=("ls",), tests={"x": "secret"})
    verdict = await judged(provider, task)
    assert [each.stdout for each in verdict.commands] == ["mine\n"]


SPOILED = {
    "a link to itself": 'ln -s reward.txt "$REWARD_FILE"',
    "a number that cannot be read": 'echo 1 > "$REWARD_FILE"; chmod 200 "$REWARD_FILE"',
    "a number that cannot be put back": 'mkdir "$REWARD_FILE.d"; chmod 500 "${REWARD_FILE%/*}"',
}


@pytest.mark.parametrize("name", SPOILED)
async def test_a_reward_that_cannot_be_read_between_commands_is_no_error_of_ours(
    name: str, provider: LocalProvider
) -> None:
    work = f"echo '{SPOILED[name]}' > answer"
    verify = (
        'echo 0 > "$REWARD_FILE"; bash answer; rm -f "$REWARD_FILE" 2>/dev/null; bash answer',
        "kill -9 $$",
        "false",
    )
    verdict = await judged(provider, Task(instruction=work, verify=verify))
    assert (verdict.total or 0) < 0.5, verdict
    assert verdict.reward is not None or (verdict.error is not None and verdict.error.blame == "agent")


BROKEN = {
    "no bash": "rm /usr/bin/bash",
    "a bash that is none": "echo junk > /tmp/b; chmod 755 /tmp/b; mv /tmp/b /usr/bin/bash",
    "a bash that fails": "cp /usr/bin/false /tmp/b; mv /tmp/b /usr/bin/bash",
    "a bash that never ends": "printf '#!/bin/sh\\nexec sleep 999\\n' > /tmp/b; chmod 755 /tmp/b; "
    "mv /tmp/b /usr/bin/bash",
    "no programs": "rm -r /usr/bin",
    "programs that fail": "for x in find tar rm mkdir python3 ls cat; do cp /usr/bin/false /usr/bin/$x; done",
    "no linker": "rm -rf /usr/lib64 /lib64",
    "a python that fails": "cp /usr/bin/false /usr/bin/python3",
    "folders that nobody may read": "chmod 000 /app /usr",
}


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_system_is_the_fault_of_whoever_broke_it(name: str, provider: LocalProvider) -> None:
    kept: dict[str, Any] = {
        "paths": "system",
        "workdir": "/app",
        "keep": ("/",),
        "restore": (),
        "reward_from": "harbor",
    }
    check = "if test -e /app/answer; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"
    task = Task(instruction=BROKEN[name], verify=("bash /tests/test.sh",), tests={"test.sh": check}, **kept)
    verdict = await judged(provider, task, SandboxSpec(template="whole", writable_system=True), seconds=8)
    assert verdict.total == 0 or (verdict.error is not None and verdict.error.blame == "agent"), verdict
