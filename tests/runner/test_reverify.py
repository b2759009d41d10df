"""Stored work is judged again: by the same verifier, by a corrected one, and never where it was not kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.events import Queued
from rollcage.runner import Runner
from rollcage.runner.reverify import Correction, reverify
from rollcage.store import Store
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome, Task

WORK = Task(
    instruction="mkdir -p deep && echo 42 > deep/answer && chmod 750 deep && ln -s deep/answer link && rm given",
    files={"given": "from setup"},
    setup=("echo tool > ~/tool",),
    verify=("test ! -e given", 'test "$(cat link)" = 42', "test -e ~/tool", "false"),
)


async def played(runner: Runner, task: Task, agent: str = "shell") -> str:
    rollout_id = await runner.start(Job(task=task, model=NO_MODEL, agent=AgentSpec(name=agent)))
    await runner.over(rollout_id)
    return rollout_id


async def test_the_same_verifier_says_the_same_of_the_same_work(runner: Runner, store: Store) -> None:
    first = await store.rollout(await played(runner, WORK))
    assert first.reward == 0.75 and first.work and first.work.digest
    verdict = await reverify(runner, first)
    assert verdict.reward and verdict.reward.total == 0.75 and not verdict.changed
    record = await store.rollout(verdict.rollout_id)
    assert (record.patch, record.files) == (first.patch, first.files) and not record.turns
    assert record.work and record.work.paths == first.work.paths


async def test_a_corrected_verifier_gives_another_verdict_beside_the_first(runner: Runner, store: Store) -> None:
    first = await store.rollout(await played(runner, WORK))
    corrected = WORK.model_copy(update={"verify": WORK.verify[:-1]})
    verdict = await reverify(runner, first, Correction(task=corrected))
    again = await store.rollout(first.id)
    assert again.reward == 0.75, "the first verdict stays what the rollout earned"
    assert again.verdicts == (verdict,) and again.last_seq == first.last_seq, "its log stays as it is"
    assert verdict.reward and verdict.reward.total == 1 and verdict.changed == ("verify",)
    assert (await store.summary(verdict.rollout_id)).reverifies == first.id
    await store.rebuild()
    assert (await store.rollout(first.id)).verdicts == (verdict,), "what the table knows is in the log"


async def test_a_verifier_that_broke_is_mended_without_sampling_again(runner: Runner, store: Store) -> None:
    broken = WORK.model_copy(update={"verify": (), "test_script": 'echo nonsense > "$REWARD_FILE"'})
    first = await store.rollout(await played(runner, broken))
    assert first.outcome is Outcome.VERIFY_FAILED and first.blame == "agent", "its code ran beside the verifier"
    mended = broken.model_copy(update={"test_script": 'grep -q 42 link && echo 0.5 > "$REWARD_FILE"'})
    verdict = await reverify(runner, first, Correction(task=mended))
    assert verdict.reward and verdict.reward.total == 0.5


async def test_work_in_a_fresh_box_and_in_kept_folders_is_judged_again(runner: Runner, store: Store) -> None:
    task = Task(
        instruction="echo x > made; mkdir -p ~/kept; echo y > ~/kept/other",
        verify=("test -s made", "test -s ~/kept/other"),
        keep=("/home/user/kept",),
        verify_in="fresh",
    )
    first = await store.rollout(await played(runner, task))
    assert first.reward == 1
    verdict = await reverify(runner, first)
    assert verdict.reward and verdict.reward.total == 1


async def test_what_was_too_large_is_said_to_be_not_kept(runner: Runner, store: Store) -> None:
    task = Task(instruction="head -c 6000000 /dev/urandom > big", verify=("true",))
    first = await store.rollout(await played(runner, task))
    assert first.reward == 1 and first.work and not first.work.digest and "larger than 4 MB" in first.work.why_not
    with pytest.raises(UsageError, match="was not kept: it is larger than 4 MB"):
        await reverify(runner, first)


async def test_archives_that_were_lost_or_changed_are_errors_and_no_rewards(
    runner: Runner, store: Store, tmp_path: Path
) -> None:
    first = await store.rollout(await played(runner, WORK))
    [archive] = (tmp_path / "work").glob("*/*.tar.zst")
    archive.write_bytes(archive.read_bytes()[:-20])
    verdict = await reverify(runner, first)
    assert verdict.reward is None and verdict.blame == "infrastructure"
    archive.unlink()
    verdict = await reverify(runner, first)
    assert verdict.reward is None and "any more" in (verdict.error or "")


async def test_what_cannot_be_judged_again_is_refused_with_the_reason(runner: Runner, store: Store) -> None:
    failing = Task(instruction="true", setup=("exit 3",), verify=("true",))
    first = await store.rollout(await played(runner, failing))
    with pytest.raises(UsageError, match="was not kept: verification was never reached"):
        await reverify(runner, first)
    whole = await store.rollout(await played(runner, WORK))
    record = await store.rollout((await reverify(runner, whole)).rollout_id)
    with pytest.raises(UsageError, match=whole.id):
        await reverify(runner, record)
    moved = WORK.model_copy(update={"workdir": "/home/user/elsewhere"})
    with pytest.raises(UsageError, match="elsewhere"):
        await reverify(runner, whole, Correction(task=moved))


async def test_the_agent_of_re_verification_cannot_be_asked_for(runner: Runner) -> None:
    with pytest.raises(UsageError, match="reverify"):
        await runner.start(Job(task=WORK, model=NO_MODEL, agent=AgentSpec(name="stored-work")))
    with pytest.raises(UsageError, match="known: ") as unknown:
        await runner.start(Job(task=WORK, model=NO_MODEL, agent=AgentSpec(name="nobody")))
    assert "stored-work" not in str(unknown.value) and "shell" in str(unknown.value)


async def test_the_log_of_the_record_names_what_it_judges(runner: Runner, store: Store) -> None:
    first = await store.rollout(await played(runner, WORK))
    verdict = await reverify(runner, first)
    [queued] = await store.read(verdict.rollout_id, limit=1)
    assert isinstance(queued.event, Queued) and queued.event.reverifies == first.id
