"""What the agent left where verification does not look is said where it may be why verification failed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollcage.errors import SandboxError
from rollcage.results.fold import Rollout
from rollcage.results.result import result_of
from rollcage.sandboxes.base import sh
from rollcage.types import HOME, Task
from support.boxes import a_box
from support.playing import Play

LEAVE = "mkdir -p /tmp/out ~/made; echo x | tee in.txt ~/made/a.txt ~/kept.txt > /tmp/out/b.txt"


def unseen(rollout: Rollout) -> list[str]:
    return [path for each in result_of(rollout).suspicions if each.kind == "unseen_files" for path in each.paths]


@pytest.mark.parametrize("place", ["box", "fresh"])
async def test_files_elsewhere_are_named_where_a_verify_command_failed(play: Play, place: str) -> None:
    left = Task(
        instruction=LEAVE,
        setup=("echo early > ~/early.txt",),
        verify=("test -e in.txt", "test -e /tmp/out/b.txt"),
        keep=(f"{HOME}/kept.txt",),
        verify_in=place,
    )
    rollout: Rollout = await play(left, agent="shell")
    assert rollout.reward == 0.5
    assert unseen(rollout) == [f"{HOME}/made/a.txt", "/tmp/out/b.txt"]


async def test_nothing_is_said_where_all_passed_or_nothing_was_left(play: Play) -> None:
    passed: Rollout = await play(Task(instruction=LEAVE, verify=("test -e in.txt",)), agent="shell")
    nothing: Rollout = await play(Task(instruction="touch in.txt", verify=("false",)), agent="shell")
    assert (passed.reward, unseen(passed), nothing.reward, unseen(nothing)) == (1.0, [], 0.0, [])


async def test_what_was_written_is_told_without_a_command_in_the_box(tmp_path: Path) -> None:
    async with a_box(tmp_path) as box:
        await sh(box, "echo early > /tmp/early; mkdir -p ~/own ~/a/b; echo early > ~/early")
        await box.checkpoint()
        since = time.time()
        await sh(
            box, "cd; echo x | tee own/x a/b/new a/b/$'\\xff' early /tmp/.hidden > /tmp/t; ln -s /etc link; mkfifo pipe"
        )
        expected = (f"{HOME}/a/b/new", f"{HOME}/a/b/\ufffd", f"{HOME}/early", "/tmp/t")
        assert await box.written(since, [f"{HOME}/own"]) == expected
        async with box.spawn(["sleep", "60"]):
            with pytest.raises(SandboxError, match="a command is running"):
                await box.written(since, [])


async def test_a_thousand_files_are_counted_and_not_listed(play: Play) -> None:
    rollout: Rollout = await play(Task(instruction="touch /tmp/{1..1000}.txt", verify=("false",)), agent="shell")
    assert len(unseen(rollout)) == 20
    assert any("and 980 more" in each.what for each in rollout.suspicions)


async def test_files_uploaded_to_the_tests_folder_arrive_for_verification(play: Play) -> None:
    task = Task(
        instruction="echo forged > ~/tests/data/a.txt; cat ~/tests/data/a.txt",
        files={f"{HOME}/tests/data/a.txt": "uploaded", f"{HOME}/tests/b.txt": "uploaded"},
        tests={"b.txt": "a test of the task wins"},
        verify=('test "$(cat ~/tests/data/a.txt)" = uploaded', 'grep -q wins "$TESTS_DIR/b.txt"'),
    )
    rollout: Rollout = await play(task, agent="shell")
    assert (rollout.reward, rollout.agent_exit_code) == (1.0, 0), rollout.verify


def test_the_agent_s_own_program_is_no_place_for_a_file() -> None:
    for path in (f"{HOME}/.rollcage/bin/opencode", "../.rollcage/x", f"{HOME}/.rollcage/opencode.json"):
        with pytest.raises(ValidationError):
            Task(instruction="x", files={path: "x"})
    with pytest.raises(ValidationError, match="the agent's own program"):
        Task(instruction="x", files={f"{HOME}/.rollcage/bin/opencode": "x"})
