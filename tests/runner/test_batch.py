"""A batch: every combination once, whatever happens in between; limits, retries, models that go away."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage import UsageError
from rollcage.api.evaluate import Batch, Evaluating
from rollcage.api.run import aeval
from rollcage.errors import ModelUnreachable
from rollcage.evaluation.batches import BatchPlan, TaskRef
from rollcage.evaluation.comparison import compare
from rollcage.evaluation.reports import compared
from rollcage.runner import Runner
from rollcage.runner.batch import batch_lock, batch_view
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.store.batches import batch_events, batch_log, batch_names, batch_rows
from rollcage.types import Blame, Task

PASS = Task(id="pass", instruction="echo hello > a.txt", verify=("test -e a.txt",))
FAIL = Task(id="fail", instruction="true", verify=("test -e a.txt",))
ASK = """curl -sf $OPENAI_BASE_URL/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" \
-d '{"messages": [{"role": "user", "content": "hi"}]}' > said.json"""
BROKEN = Task(id="broken", instruction="true", setup=("false",), verify=("true",))


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environ({"HOME": str(tmp_path)}, home=str(tmp_path))


@pytest.fixture
def evaluated(runner: Runner, store: Store, settings: Settings) -> Any:
    def evaluated(tasks: Sequence[Task | str], models: Sequence[str] = ("scripted",), **more: Any) -> Evaluating:
        more = {"agents": "shell", **more}
        return aeval(tasks, models, runner=runner, store=store, settings=settings, **more)

    return evaluated


async def test_every_task_model_and_sample_is_one_rollout(evaluated: Any, store: Store) -> None:
    batch: Batch = await evaluated([PASS, FAIL, BROKEN], n=2, name="first")
    report = batch.report
    assert (report.status, report.size, report.overall.done, report.all_scored) == ("done", 6, 6, False)
    tasks = {each.task: each for each in report.tasks}
    assert tasks["pass"].rewards == (1.0, 1.0) and tasks["pass"].pass_at_1 == 1.0 and tasks["pass"].low
    assert tasks["fail"].rewards == (0.0, 0.0) and tasks["fail"].pass_at_k == 0.0
    assert tasks["broken"].broken == 2 and tasks["broken"].mean is None
    assert [(each.blame, "setup command" in each.error) for each in report.broken] == [(Blame.TASK, True)] * 2
    rows = await batch_rows(store, "first")
    assert len({row.cell for row in rows}) == len(rows) == 6
    assert report.overall.mean == 0.5 and "first" in batch.table() and "<table>" in batch._repr_html_()
    frame = batch.to_pandas()
    assert sorted(frame.task.value_counts().items()) == [("broken", 2), ("fail", 2), ("pass", 2)]
    assert frame.reward.mean() == 0.5 and frame.reward.isna().sum() == 2
    rollout = await store.rollout(rows[0].rollout_id)
    assert rollout.batch and (rollout.batch.name, rollout.batch.sample) == ("first", rows[0].sample)


async def test_the_same_again_runs_nothing_twice_and_retry_goes_by_blame(evaluated: Any, store: Store) -> None:
    await evaluated([PASS, BROKEN], name="again")
    first = [row.rollout_id for row in await batch_rows(store, "again")]
    await evaluated([PASS, BROKEN], name="again")
    await evaluated([PASS, BROKEN], name="again", retry="infrastructure")
    assert [row.rollout_id for row in await batch_rows(store, "again")] == first
    batch: Batch = await evaluated([PASS, BROKEN], name="again", retry="broken")
    rows = await batch_rows(store, "again")
    assert [(row.task, row.attempt) for row in rows] == [("pass", 1), ("broken", 1), ("broken", 2)]
    assert batch.report.size == batch.report.overall.done == 2


async def test_what_was_interrupted_is_missing_and_what_had_ended_stays(evaluated: Any, store: Store) -> None:
    flag = "until test -e go; do sleep 0.05; done"
    slow = Task(id="slow", instruction=flag, verify=("true",))
    ended: list[str] = []
    with anyio.CancelScope() as scope:
        async for row in evaluated([PASS, slow], name="cut"):
            ended.append(row.task)
            scope.cancel()
    assert ended == ["pass"]
    view = await batch_view(store, "cut")
    assert (view.status, [cell.task.id for cell in view.missing()]) == ("interrupted", ["slow"])
    mended = Task(id="slow", instruction=f"touch go; {flag}", verify=("true",))
    with pytest.raises(UsageError, match=r"made of something else: task slow: \w{16} -> \w{16}.*--accept-changes"):
        await evaluated([PASS, mended], name="cut")
    batch: Batch = await evaluated([PASS, mended], name="cut", accept_changes=True)
    assert batch.report.all_scored and [row.task for row in await batch_rows(store, "cut")].count("pass") == 1


async def test_rows_come_as_rollouts_end_and_events_have_one_cursor(evaluated: Any, store: Store) -> None:
    rows = [row async for row in evaluated([PASS, FAIL], n=2, name="rows")]
    assert sorted((row.task, row.sample, row.reward) for row in rows) == [
        ("fail", 1, 0.0),
        ("fail", 2, 0.0),
        ("pass", 1, 1.0),
        ("pass", 2, 1.0),
    ]
    cursor, ended = 0, []
    while page := await batch_events(store, "rows", after=cursor, limit=3):
        assert [at for at, _ in page] == sorted(at for at, _ in page) and page[0][0] > cursor
        cursor = page[-1][0]
        ended += [entry.rollout_id for _, entry in page if entry.event.kind == "ended"]
    assert sorted(ended) == sorted(row.rollout_id for row in rows)


async def test_a_limit_stops_the_batch_and_a_larger_one_goes_on(evaluated: Any, settings: Settings) -> None:
    asking = Task(
        id="asking",
        instruction=ASK,
        verify=("grep -q choices said.json",),
    )
    batch: Batch = await evaluated([asking], n=5, at_once=1, name="few", max_tokens=1)
    assert (batch.report.status, batch.report.overall.done) == ("stopped", 1)
    assert batch.report.why.startswith("max_tokens: ") and not batch.report.all_scored
    settings.prices_path.write_text("[scripted]\ninput = 1e6\noutput = 1e6\n")
    batch = await evaluated([asking], n=5, at_once=1, name="few", budget=batch.report.overall.tokens + 1.0)
    assert batch.report.status == "stopped" and batch.report.why.startswith("budget: ")
    batch = await evaluated([asking], n=5, name="few")
    assert batch.report.status == "done" and batch.report.all_scored and batch.report.cost


async def test_time_stops_what_runs_too(evaluated: Any) -> None:
    batch: Batch = await evaluated([Task(id="long", instruction="sleep 1000", verify=("true",))], max_time_s=2)
    assert batch.report.status == "stopped" and batch.report.why.startswith("max_time: 2 s")
    assert batch.rows[0].interrupted and batch.view.missing()


async def test_a_model_that_goes_away_pauses_its_cells_and_they_go_on_when_it_is_back(
    evaluated: Any, store: Store, tmp_path: Path
) -> None:
    async with ScriptedModel() as model:
        endpoint = model.endpoint(())
        port = int(endpoint.base_url.rpartition(":")[2].partition("/")[0])
        name = f"{endpoint.base_url}#scripted"
        key = endpoint.key.get_secret_value()
        scripts = model._app.scripts
        async with anyio.create_task_group() as tasks:
            done: list[Batch] = []
            asking = Task(id="asking", instruction=ASK, verify=("true",))
            going = evaluated([asking, PASS], [name], n=3, at_once=1, name="away", api_key=key)

            async def run() -> None:
                done.append(await going)

            view = None
            async with anyio.create_task_group() as first:
                first.start_soon(_stop_after_one, store, model)
                tasks.start_soon(run)
            with anyio.fail_after(120):
                while view is None or not view.paused:
                    await anyio.sleep(0.05)
                    view = await batch_view(store, "away")
            assert list(view.paused) == [name] and view.report(running=True).status == "paused"
            async with ScriptedModel(port=port) as back:
                back._app.scripts.update(scripts)
                with anyio.fail_after(120):
                    while not done:
                        await anyio.sleep(0.05)
    report = done[0].report
    assert report.status == "done" and report.all_scored and report.size == 6
    assert any(row.attempt > 1 for row in done[0].rows)


async def _stop_after_one(store: Store, model: ScriptedModel) -> None:
    with anyio.fail_after(120):
        while not any(row.outcome for row in await batch_rows(store, "away")):
            await anyio.sleep(0.02)
    await model.__aexit__(None, None, None)


async def test_a_model_that_is_not_there_at_all_starts_nothing(evaluated: Any, store: Store) -> None:
    with pytest.raises(ModelUnreachable, match=r"127\.0\.0\.1:9"):
        await evaluated([PASS], ["http://127.0.0.1:9/v1#nobody"], name="nobody")
    assert await batch_rows(store, "nobody") == [] and not await batch_log(store, "nobody")


async def test_a_task_that_cannot_run_here_is_listed_and_the_others_run(evaluated: Any, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "good.toml").write_text('instruction = "touch a.txt"\nverify = ["test -e a.txt"]\n')
    (folder / "bad.toml").write_text("instruction = 3\n")
    (folder / "other.toml").write_text('instruction = "x"\n[sandbox]\ntemplate = "no-such-image"\n')
    batch: Batch = await evaluated([str(folder)], name="some")
    assert set(batch.report.skipped) == {"bad", "other"} and not batch.report.all_scored
    assert batch.report.overall.done == batch.report.overall.scored == 1


async def test_an_empty_source_and_words_that_mean_nothing_are_refused_before_anything(
    evaluated: Any, store: Store, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no task file"):
        await evaluated([str(tmp_path / "empty")])
    with pytest.raises(UsageError, match="names no endpoint"):
        await evaluated([PASS], ["gpt-4o"])
    with pytest.raises(UsageError, match="does not say which model"):
        await evaluated([PASS], ["http://127.0.0.1:1/v1"])
    with pytest.raises(UsageError, match="no model is named"):
        await evaluated([PASS], [])
    with pytest.raises(UsageError, match="no such file"):
        await evaluated([str(tmp_path / "none.toml")])
    with pytest.raises(UsageError, match=r"known: .*shell"):
        await evaluated([PASS], agents=["shell", "nobody"])
    with pytest.raises(UsageError, match="has no api_key"):
        await evaluated([PASS], ["scripted", "openai/gpt"])
    assert await store.list() == [] and await batch_names(store) == []


async def test_two_tasks_of_one_name_are_told_apart(evaluated: Any) -> None:
    other = PASS.model_copy(update={"verify": ("false",)})
    batch: Batch = await evaluated([PASS, other], name="twins")
    assert {each.task: each.mean for each in batch.report.tasks} == {"pass": 1.0, "pass#2": 0.0}


async def test_a_second_process_follows_and_goes_on_when_the_first_is_gone(evaluated: Any, store: Store) -> None:
    await evaluated([PASS], name="shared", max_tokens=0)
    with batch_lock(store, "shared") as mine:
        assert mine
        with batch_lock(store, "shared") as second:
            assert not second
        done: list[Batch] = []

        async def follow() -> None:
            done.append(await evaluated([PASS, FAIL], name="shared", accept_changes=True))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            with anyio.fail_after(60):
                while len((await batch_view(store, "shared")).plan.tasks) < 2:
                    await anyio.sleep(0.02)
            assert len(await batch_rows(store, "shared")) == 1, "it follows and runs nothing"
            tasks.cancel_scope.cancel()
    batch: Batch = await evaluated([PASS, FAIL], name="shared")
    assert batch.report.overall.done == 2


async def test_two_batches_are_compared_task_by_task(evaluated: Any, store: Store) -> None:
    await evaluated([PASS, FAIL], name="before")
    mended = FAIL.model_copy(update={"instruction": "touch a.txt"})
    await evaluated([PASS, mended], name="after")
    found = compare(await batch_view(store, "before"), await batch_view(store, "after"))
    assert (found.before, found.after, found.difference) == (0.5, 1.0, 0.5)
    assert [(each.task, each.flipped) for each in found.by_task] == [("pass", ""), ("fail", "fixed")]
    assert found.changed == ("fail",) and found.low is not None and found.low < 0.5 < (found.high or 0)
    assert not found.by_model, "there is but one"


async def test_each_model_and_agent_that_two_batches_share_is_compared_by_itself(evaluated: Any, store: Store) -> None:
    for name, agents in (("before", ("shell", "nop")), ("after", ("nop", "shell"))):
        instruction = "true" if name == "before" else "touch a.txt"
        tasks = [PASS, FAIL.model_copy(update={"instruction": instruction})]
        await evaluated(tasks, agents=agents, name=name, n=2)
    found = compare(await batch_view(store, "before"), await batch_view(store, "after"))
    assert (found.before, found.after, found.difference) == (0.25, 0.5, 0.25)
    changes = {each.agent: (each.before, each.after, each.difference, each.tasks) for each in found.by_model}
    assert changes == {"shell": (0.5, 1.0, 0.5, 2), "nop": (0.0, 0.0, 0.0, 2)}
    said = compared(found)
    assert "| scripted (shell) | 0.500 | 1.000 | +0.500 |" in said and "| scripted (nop) | 0.000 |" in said


def test_a_plan_names_each_cell_once_and_another_task_is_another_cell() -> None:
    tasks = (TaskRef(id="a", digest="1"), TaskRef(id="b", digest="2"))
    plan = BatchPlan(name="p", models=("x", "y"), agents=("m", "n"), n=3, tasks=tasks)
    cells = [cell.key for cell in plan.cells()]
    assert len(set(cells)) == len(cells) == plan.size == 24
    other = plan.model_copy(update={"tasks": (TaskRef(id="a", digest="3"), tasks[1])})
    assert len(set(cells) & {cell.key for cell in other.cells()}) == 12
    assert plan.changes(other) == ["task a: 1 -> 3"]
