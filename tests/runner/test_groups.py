"""Groups: n rollouts of one task, started, waited for, stopped and handed over together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import anyio
import pytest

from rollcage.errors import QueueFull, UnknownGroup, UsageError
from rollcage.events import AbortRequested, Queued
from rollcage.runner import Groups, Registry, Runner, StartOptions
from rollcage.runner.groups import seed_of
from rollcage.runner.queue import Quota
from rollcage.schema.groups import is_older
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import AgentSpec, Blame, Job, Outcome, ScriptedCall, ScriptedTurn, Task

WRITES = (
    ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": "echo hi > hi.txt"}),)),
    ScriptedTurn(text="done"),
)
IDLE = (ScriptedTurn(text="nothing to do"),)
SILENT = (ScriptedTurn(text="late", delay_s=1000),)
TASK = Task(id="hi", instruction="Write hi.txt.", verify=("test -f hi.txt",))


def job(model: ScriptedModel, script: tuple[ScriptedTurn, ...] = WRITES, task: Task = TASK, **more: object) -> Job:
    return Job.model_validate(
        {"task": task, "model": model.endpoint(script), "agent": AgentSpec(name="mini"), **more}, from_attributes=True
    )


async def test_a_group_is_n_rollouts_of_one_task_and_becomes_sequences(runner: Runner, model: ScriptedModel) -> None:
    given = job(model, metadata={"row": 7}, policy_version="step-3")
    seeded = given.model.model_copy(update={"sampling": given.model.sampling.model_copy(update={"seed": 5})})
    group = await runner.groups.start(given.model_copy(update={"model": seeded}), 3)
    assert group.n == 3 and group.task_id == "hi" and not group.done
    assert [member.index for member in group.rollouts] == [0, 1, 2]
    page = await runner.groups.wait([group.group_id])
    assert page.done and page.groups[0].usable == page.groups[0].scored == 3
    assert {member.reward for member in page.ended} == {1.0} and {member.blame for member in page.ended} == {None}
    rollouts = [await runner.wait(member.rollout_id) for member in group.rollouts]
    asked = [turn.request["seed"] for rollout in rollouts for turn in rollout.turns]
    assert len(asked) == 6 and set(asked) == {seed_of(5, 0), seed_of(5, 1), seed_of(5, 2)} and len(set(asked)) == 3
    assert {rollout.job.group_id for rollout in rollouts} == {group.group_id}
    assert [rollout.job.metadata for rollout in rollouts] == [{"row": 7}] * 3
    rows = await runner.groups.sequences(group.group_id)
    assert [row.rollout_id for row in rows] == [member.rollout_id for member in group.rollouts]
    assert {row.reward for row in rows} == {1.0} and {row.policy_versions for row in rows} == {("step-3", "step-3")}
    assert {row.group_id for row in rows} == {group.group_id} and all(row.trained_tokens for row in rows)


async def test_without_a_seed_each_rollout_is_left_to_the_engine(runner: Runner, model: ScriptedModel) -> None:
    group = await runner.groups.start(job(model, IDLE), 2)
    await runner.groups.wait([group.group_id])
    rollouts = [await runner.wait(member.rollout_id) for member in group.rollouts]
    assert all("seed" not in turn.request for rollout in rollouts for turn in rollout.turns)
    assert {rollout.reward for rollout in rollouts} == {0.0}  # judged, and found wanting


async def test_a_group_with_enough_usable_rollouts_stops_the_rest(
    store: Store, backends: Registry, model: ScriptedModel
) -> None:
    broken = TASK.model_copy(update={"setup": ("false",)})
    unclear = TASK.model_copy(update={"verify": ("echo much > $REWARD_FILE",)})
    # The first never ends by itself and keeps one of two places: the others run one after another.
    jobs = [job(model, SILENT), job(model, task=broken), job(model, task=unclear), job(model), job(model, IDLE)]
    async with Runner.open(store, backends, at_once=2) as runner:
        group = await runner.groups.start_jobs(jobs, min_usable=2)
        page = await runner.groups.wait([group.group_id])
        assert page.done and page.groups[0].usable == 2
        rollouts = [await runner.wait(member.rollout_id) for member in group.rollouts]
        assert [each.outcome for each in rollouts] == [
            Outcome.ABORTED,
            Outcome.SETUP_FAILED,  # these two count for nothing
            Outcome.VERIFY_FAILED,
            Outcome.FINISHED,
            Outcome.FINISHED,
        ]
        assert [each.reward for each in rollouts] == [None, None, None, 1.0, 0.0]
        ended = {each.index: each for each in (await runner.groups.get(group.group_id)).rollouts}
        assert [ended[n].blame for n in range(5)] == [None, Blame.TASK, Blame.AGENT, None, None]
        assert [ended[n].usable for n in range(5)] == [False, False, False, True, True]
        usable = await runner.groups.sequences(group.group_id, usable_only=True)
        assert [row.reward for row in usable] == [1.0, 0.0]
        # What was sampled and never scored is there, too, as what it is: no 0.
        rows = await runner.groups.sequences(group.group_id)
        assert [(row.reward, row.blame) for row in rows] == [(None, Blame.AGENT), (1.0, None), (0.0, None)]


async def test_ends_come_one_by_one_after_a_cursor(runner: Runner, model: ScriptedModel) -> None:
    quick, slow = job(model, group_id="quick"), job(model, SILENT, group_id="slow")
    await runner.groups.start(quick, 2)
    await runner.groups.start(slow, 1)
    seen: list[str] = []
    cursor, done = 0, 0
    while done < 2:
        page = await runner.groups.wait(["quick", "slow"], until="any", cursor=cursor)
        assert page.ended and page.cursor > cursor
        cursor, done = page.cursor, done + len(page.ended)
        seen += [member.group_id for member in page.ended]
    assert seen == ["quick", "quick"]
    assert [(each.group_id, each.done) for each in page.groups] == [("quick", True), ("slow", False)]
    late = await runner.groups.wait(["slow"], until="any", cursor=cursor, wait_s=0.01)
    assert not late.ended and late.cursor == cursor and not late.done
    assert await runner.groups.abort("slow", reason="enough") == [
        (await runner.groups.get("slow")).rollouts[0].rollout_id
    ]
    async with aclosing(runner.groups.ended(["slow", "quick"], cursor=cursor)) as ends:
        assert [rollout.outcome async for rollout in ends] == [Outcome.ABORTED]
    with pytest.raises(UnknownGroup, match="no group 'other'"):
        await runner.groups.wait(["other"])


async def test_rollouts_of_older_weights_are_stopped(runner: Runner, model: ScriptedModel, store: Store) -> None:
    old = await runner.groups.start(job(model, SILENT, policy_version="step-9"), 2)
    new = await runner.groups.start(job(model, SILENT, policy_version="step-10"), 1)
    nameless = await runner.groups.start(job(model, SILENT), 1)
    stopped = await runner.groups.abort_older("step-10")
    assert set(stopped) == {member.rollout_id for member in old.rollouts}
    asked = (await store.read(stopped[0], kinds=("abort_requested",)))[0].event
    assert isinstance(asked, AbortRequested) and asked.reason == "its policy version is older than step-10"
    assert (await runner.groups.wait([old.group_id])).done
    assert not (await runner.groups.get(new.group_id)).done and not (await runner.groups.get(nameless.group_id)).done
    with pytest.raises(UsageError, match="policy_version_below"):
        await runner.groups.abort_older("")


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [
        ("9", "10", True),
        ("10", "9", False),
        ("step-9", "step-10", True),
        ("v2", "v2", False),
        ("", "1", False),
        ("a", "b", True),
        ("step-9", "step-9b", True),
        ("1.9", "1.10", True),
        ("007", "7", False),
    ],
)
def test_numbers_in_versions_compare_as_numbers(version: str, than: str, older: bool) -> None:
    assert is_older(version, than) is older


async def test_a_repeated_start_joins_the_first(runner: Runner, model: ScriptedModel, store: Store) -> None:
    options = StartOptions(Quota("me"), idempotency_key="once")
    first = await runner.groups.start(job(model, IDLE), 2, options=options)
    again = await runner.groups.start(job(model, IDLE), 2, options=options)
    assert again.joined and not first.joined and again.group_id == first.group_id
    assert [each.rollout_id for each in again.rollouts] == [each.rollout_id for each in first.rollouts]
    # A first start that its process did not survive is completed: only what is missing begins.
    more = await runner.groups.start(job(model, IDLE), 3, options=options)
    assert not more.joined and [each.index for each in more.rollouts] == [0, 1, 2]
    assert [each.rollout_id for each in more.rollouts[:2]] == [each.rollout_id for each in first.rollouts]
    await runner.groups.start(job(model, IDLE, group_id="taken"), 1)
    with pytest.raises(UsageError, match="group_id"):
        await runner.groups.start(job(model, IDLE, group_id="taken"), 1)
    with pytest.raises(UsageError, match="min_usable"):
        await runner.groups.start(job(model, IDLE), 2, min_usable=3)
    with pytest.raises(UsageError, match="min_usable"):
        await runner.groups.start(job(model, IDLE, mode="black_box"), 2, min_usable=1)


async def test_a_group_that_does_not_fit_into_the_queue_is_not_begun(
    store: Store, backends: Registry, model: ScriptedModel
) -> None:
    async with Runner.open(store, backends, at_once=1, queue=2) as runner:
        with pytest.raises(QueueFull):
            await runner.groups.start(job(model, SILENT), 4)
        assert not await store.list() and runner.queue.running == runner.queue.waiting == 0
        await runner.groups.start(job(model, SILENT), 3)


CHILD = """
import sys
from pathlib import Path
import anyio
from rollcage.api.run import open_runner
from rollcage.runner import StartOptions
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import AgentSpec, Job, ScriptedCall, ScriptedTurn, Task

async def main(log: str) -> None:
    call = ScriptedCall(name="bash", arguments={"command": "true"})
    async with (ScriptedModel() as model, Store.open(Path(log)) as store,
                open_runner(settings=Settings.from_environ(), store=store, at_once=1) as runner):
        good = (ScriptedTurn(tool_calls=(call,)), ScriptedTurn(text="done"))
        late = (ScriptedTurn(text="late", delay_s=1000),)
        task = Task(instruction="Do nothing.", verify=("true",))
        jobs = [Job(task=task, model=model.endpoint(each), agent=AgentSpec(name="mini")) for each in (good, late, late)]
        group = await runner.groups.start_jobs(jobs, min_usable=2, options=StartOptions(resumable=True))
        await runner.wait(group.rollouts[0].rollout_id)
        print(group.group_id, flush=True)
        await anyio.sleep_forever()

anyio.run(main, sys.argv[1])
"""


async def test_a_group_goes_on_after_a_crash(tmp_path: Path, backends: Registry, model: ScriptedModel) -> None:
    """One was scored, one ran, one waited when the process died. The one that waited is run, and is enough."""
    log = tmp_path / "log.db"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(log)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            group_id = child.stdout.readline().strip()
        finally:
            os.kill(child.pid, signal.SIGKILL)
    async with Store.open(log) as store, Runner.open(store, backends) as runner:
        group = await runner.groups.get(group_id)
        assert (group.n, group.min_usable, group.usable) == (3, 2, 1)
        assert not group.done and isinstance(runner.groups, Groups)
        orphans = [each for each in group.rollouts if each.outcome is None]
        for orphan in orphans:
            first = (await store.read(orphan.rollout_id, limit=1))[0].event
            assert isinstance(first, Queued) and first.group is not None and first.group.min_usable == 2
            fresh = first.job.model_copy(update={"model": model.endpoint(WRITES)})
            assert await runner.adopt([(await store.summary(orphan.rollout_id), fresh, Quota())])
        page = await runner.groups.wait([group_id])
        assert page.done and page.groups[0].usable >= 2
        for each in group.rollouts:
            await runner.over(each.rollout_id)


async def test_what_a_crash_left_of_a_group_that_had_enough_is_stopped(
    store: Store, backends: Registry, model: ScriptedModel
) -> None:
    """The process died after the last usable one had ended, and before it stopped the rest."""
    async with Runner.open(store, backends) as runner:
        group = await runner.groups.start(job(model), 2, min_usable=2)
        await runner.groups.wait([group.group_id])
    place = (await store.read(group.rollouts[0].rollout_id, limit=1))[0].event
    assert isinstance(place, Queued) and place.group
    late = job(model, SILENT, group_id=group.group_id)
    left = Queued(job=late, owner="dead", resumable=True, group=place.group.model_copy(update={"index": 2, "size": 3}))
    await store.append("0123456789abcdef", left)
    async with Runner.open(store, backends) as runner:
        assert await runner.adopt([(await store.summary("0123456789abcdef"), late, Quota())])
        with anyio.fail_after(60):
            assert (await runner.wait("0123456789abcdef")).outcome is Outcome.ABORTED
