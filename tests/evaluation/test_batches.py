"""A batch that is counted as its rows come says the same as one that is counted at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rollcage.evaluation.batches import BatchPlan, BatchView, TaskRef
from rollcage.evaluation.rows import BatchEntry, BatchRow, Price
from rollcage.events import Ended, Queued, Scored
from rollcage.runner.batch import batch_view
from rollcage.runner.batch_follower import BatchFollower
from rollcage.store import Store
from rollcage.store.batches import add_to_batch
from rollcage.store.retention import Prune, prune
from rollcage.types import NO_MODEL, Blame, Job, Outcome, Reward, Stage, Task

TASKS = tuple(TaskRef(id=f"t{n}", digest="d") for n in range(6))
PLAN = BatchPlan(name="b", tasks=TASKS, models=("m1", "m2"), n=3)
PRICES = {"m1": Price(input=1, output=2), "m2": Price(input=3, output=4)}


def row_of(key: str, task: str, model: str, attempt: int, ended: bool, chance: random.Random) -> BatchRow:
    reward = chance.choice([0.0, 1.0, 0.5, None])
    outcome = None if not ended else Outcome.FINISHED if reward is not None else Outcome.SETUP_FAILED
    blame = None if reward is not None or not ended else chance.choice([Blame.AGENT, Blame.TASK])
    used, over = chance.randrange(1000), 5.0 if ended else None
    name = f"{key}-{attempt}"
    stage, earned = (Stage.ENDED, reward) if ended else (Stage.AGENT, None)
    return BatchRow(
        name, key, task, model, "a", 1, attempt, stage, outcome, earned, blame, 1, used, used * 2, 1.0, over, None
    )


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_come_one_by_one_are_counted_as_all_at_once(seed: int) -> None:
    chance = random.Random(seed)
    entries = [BatchEntry(1, 1.0, "planned", PLAN.model_dump(mode="json"))]
    growing, rows = BatchView(entries, ()), list[BatchRow]()
    cells = {cell.key: cell for cell in PLAN.cells()}
    for _ in range(150):
        key, cell = chance.choice(list(cells.items()))
        before = [row for row in rows if row.cell == key]
        again = not before or before[-1].ended_at is not None
        attempt = len({row.attempt for row in before}) + again
        row = row_of(key, cell.task.id, cell.model, attempt, chance.random() < 0.8, chance)
        rows.append(row)
        growing.add(row)
        if chance.random() < 0.3:
            whole = BatchView(entries, rows)
            assert growing.report(prices=PRICES) == whole.report(prices=PRICES)
            attempts = {row.rollout_id: row for row in rows}.values()
            assert growing.tokens == sum(row.tokens for row in attempts), "of those that were run again, too"
            spent = sum(PRICES[row.model].of(row.prompt_tokens, row.tokens) for row in attempts)
            assert growing.cost(PRICES) == pytest.approx(spent)
    assert growing.report(prices={"m1": PRICES["m1"]}).cost is None


@pytest.mark.anyio
async def test_a_batch_that_is_followed_is_the_one_in_the_log_also_after_pruning(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "rollouts.db") as store:
        await add_to_batch(store, "b", "planned", PLAN.model_dump(mode="json"))
        follower = BatchFollower(store)
        job = Job(task=Task(id="t", instruction="x"), model=NO_MODEL)

        async def same() -> int:
            report = await follower.ask(["b"], lambda view: view.report())
            assert report == (await batch_view(store, "b")).report()
            done: int = report.overall.done
            return done

        for number, cell in enumerate(PLAN.cells()):
            await store.append(f"r{number}", Queued(job=job, batch=cell.place("b", "a", 1)))
            await same()
            if number % 3:
                await store.append(f"r{number}", Scored(reward=Reward(total=number / 40)))
                await store.append(f"r{number}", Ended(outcome=Outcome.FINISHED))
                await same()
        await add_to_batch(store, "b", "began")
        assert await same() == 24
        await store.append("r0", Ended(outcome=Outcome.CRASHED))
        assert await same() == 24, "what was cut short is no result"
        await store.append("r3", Ended(outcome=Outcome.SANDBOX_LOST))
        assert await same() == 25
        gone = prune(tmp_path / "rollouts.db", tmp_path / "work", Prune(older_than_s=-1), dry_run=False)
        assert gone.rollouts
        assert await same() == 25 - len({*gone.rollouts} - {"r0"})
