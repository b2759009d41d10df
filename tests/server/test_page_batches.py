"""Batches on the page: the list, the matrix of tasks and models, drill-down, comparison, filters, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from rollcage.events import Ended, Queued, TurnEnded
from rollcage.types import Origin, Outcome
from support.browser import ended_rollout, needs_chromium, tab, write_batch, write_logs
from support.served import served
from support.stories import turn

pytestmark = [pytest.mark.anyio, needs_chromium]

MONDAY: dict[tuple[str, str], list[float | None]] = {
    ("easy", "small"): [1.0, 1.0],
    ("easy", "large"): [1.0, 1.0],
    ("hard", "small"): [0.0, 0.0],
    ("hard", "large"): [0.0, 1.0],
    ("odd", "small"): [None, 0.5],
    ("odd", "large"): [0.5, 0.5],
}
TUESDAY: dict[tuple[str, str], list[float | None]] = {
    **MONDAY,
    ("hard", "small"): [1.0, 1.0],
    ("easy", "small"): [0.0, 0.0],
    ("easy", "large"): [0.0, 0.0],
}


async def test_a_batch_is_a_matrix_that_leads_to_its_rollouts_and_two_are_compared(
    browser: Browser, tmp_path: Path
) -> None:
    await write_batch(tmp_path, "monday", MONDAY, tokens=10)
    await write_batch(tmp_path, "tuesday", TUESDAY, tokens=20)
    async with served(tmp_path) as server, tab(browser, f"{server.url}/web/#/batches") as watched:
        page = watched.page
        await expect(page.locator(".sheet tbody tr")).to_have_count(2)
        await expect(page.locator(".found")).to_contain_text("2 batches: 24 rollouts")
        await page.get_by_label("Search batches").fill("monday")
        await expect(page.locator(".found")).to_contain_text("1 of 2: 12 rollouts, mean 0.59, 1 broken, 120 tokens")
        await page.get_by_label("Search batches").fill("")
        await page.locator(".filters summary").click()
        await page.get_by_label("Mean from").fill("0.5")
        await page.get_by_label("Mean from").press("Enter")
        await expect(page.locator(".sheet tbody b").first).to_have_text("monday")
        await expect(page.locator(".found")).to_contain_text("1 of 2: 12 rollouts")
        await page.get_by_role("button", name="Clear").click()
        await expect(page.locator(".found")).to_contain_text("2 batches: 24 rollouts")
        # The matrix: a cell for each task and model, totals of what is shown.
        await page.get_by_role("link", name="monday").click()
        await expect(page.get_by_label("odd, small: mean 0.50, 2 of 2 ended, 1 broken")).to_be_visible()
        await expect(page.locator(".line .cell")).to_have_count(6)
        sums = page.locator(".line.sums [role=cell]")
        await expect(sums.first).to_contain_text("0.50")
        await page.get_by_role("button", name="Sometimes").click()
        await expect(page.locator(".line .task")).to_have_text(["hard"])
        await expect(sums.first).to_contain_text("0 pass@1 0 %")
        await page.get_by_role("button", name="All tasks").click()
        await page.get_by_role("button", name="Sort by small").click()
        await expect(page.locator(".line .task")).to_have_text(["easy", "odd", "hard"])
        await page.reload()
        await expect(page.locator(".line .task")).to_have_text(["easy", "odd", "hard"])
        # A cell leads to its rollouts, one of them leads to itself, and the way back is kept.
        await page.get_by_label("hard, large: mean 0.50").click()
        await expect(page.locator(".row b")).to_have_text(["hard", "hard"])
        await expect(page.locator(".found")).to_have_text("2 of 24")
        await page.go_back()
        await expect(page.locator(".line .cell")).to_have_count(6)
        # Two are compared, paired by task.
        await page.goto(f"{server.url}/web/#/batches")
        await page.get_by_label("Compare monday").check()
        await page.get_by_label("Compare tuesday").check()
        await page.get_by_role("link", name="Compare 2 of 2").click()
        await expect(page.locator(".compare h1")).to_have_text("tuesday against monday")
        await expect(page.locator(".tag.bad")).to_have_text(["broke"])
        await expect(page.locator(".sheet tr", has_text="small")).to_contain_text("0.50")
        await page.get_by_role("button", name="Fixed").click()
        await expect(page.locator(".sheet tbody .name")).to_have_text(["hard"])
        await expect(page.locator(".found")).to_have_text("1 shown: 0.25 → 0.75")
        assert watched.complaints == []


async def test_every_column_sorts_and_filters_totals_follow_and_what_is_picked_is_exported(
    browser: Browser, tmp_path: Path
) -> None:
    await write_batch(tmp_path, "monday", MONDAY, tokens=10)
    await write_logs(tmp_path, [("single", ended_rollout("alone", 0.25))])
    async with served(tmp_path) as server, tab(browser, f"{server.url}/web/") as watched:
        page = watched.page
        await expect(page.locator(".found")).to_have_text("13 rollouts")
        for name in ("Task", "Agent", "Model", "Stage", "Blame", "Turns", "Tokens", "Time", "Age"):
            button = page.get_by_role("button", name=f"Sort by {name}", exact=True)
            await button.click()
            await expect(page.get_by_role("columnheader").filter(has=button)).to_have_attribute(
                "aria-sort", "descending" if name in ("Turns", "Tokens", "Time", "Age") else "ascending"
            )
        await page.get_by_role("button", name="Sort by Reward").click()
        await page.get_by_role("button", name="Sort by Reward").click()
        rewards = await page.locator(".row .reward").all_inner_texts()
        least_first = sorted(rewards, key=lambda text: (text == "–", text))
        await expect(page.locator(".row .reward")).to_have_text(least_first)  # what has none comes last
        await page.get_by_role("button", name="Sort by Blame").click()
        await expect(page.locator(".row .stage").first).to_contain_text("by the task")
        await page.locator(".filters summary").click()
        await page.get_by_label("Tokens from").fill("1")
        await page.get_by_label("Tokens from").press("Enter")
        await expect(page.locator(".found")).to_have_text("12 of 13")
        await page.get_by_label("Tokens from").fill("")
        await page.get_by_label("Tokens from").press("Enter")
        await page.locator(".filters").get_by_label("Blame").select_option("task")
        await expect(page.locator(".row .stage small")).to_have_text("by the task")
        await page.locator(".filters").get_by_label("Blame").select_option("")
        await page.get_by_label("Reward from").press_sequentially("0.2")
        await page.get_by_label("Reward from").press("Enter")
        await page.locator(".filters").get_by_label("Model").select_option("large")
        await expect(page.locator(".found")).to_have_text("5 of 13")
        totals = page.locator(".totals dd")
        await expect(totals.nth(2)).to_have_text("5")
        await expect(totals.nth(4)).to_have_text("0.80")
        await expect(totals.nth(5)).to_have_text("50")
        await page.get_by_label("Select all that are shown").check()
        await expect(page.locator(".pickbar b")).to_have_text("5 selected")
        async with page.expect_download() as told:
            await page.get_by_role("button", name="Export").click()
        lines = (await (await told.value).path()).read_text().splitlines()
        assert len(lines) == 6 and lines[0].startswith("rollout_id,task_id,batch,agent,model,outcome,reward,blame")
        await page.locator(".pickbar select").select_option("turns")
        async with page.expect_download() as told:
            await page.get_by_role("button", name="Export").click()
        rows = [json.loads(line) for line in (await (await told.value).path()).read_text().splitlines()]
        assert len(rows) == 5 and {row["reward"] for row in rows} == {0.5, 1.0}
        assert watched.complaints == []


@pytest.mark.slow
async def test_ten_thousand_rollouts_of_a_batch_are_drawn_as_far_as_they_are_seen(
    browser: Browser, tmp_path: Path
) -> None:
    cells: dict[tuple[str, str], list[float | None]] = {
        (f"task-{n:04}", "m"): [float(n % 3 == 0)] * 10 for n in range(1000)
    }
    await write_batch(tmp_path, "large", cells)
    async with served(tmp_path) as server, tab(browser, f"{server.url}/web/#/batches/large") as watched:
        page = watched.page
        await expect(page.locator(".found")).to_have_text("1,000 tasks")
        assert await page.locator(".line").count() < 90
        await page.locator(".matrix").evaluate("element => element.scrollTop = element.scrollHeight")
        await expect(page.get_by_label("task-0999, m: mean 1")).to_be_visible()
        await page.get_by_label("Search tasks").fill("task-0500")
        await expect(page.locator(".line .task")).to_have_text(["task-0500"])
        assert watched.complaints == []


async def test_forks_and_replays_are_shown_as_a_tree(browser: Browser, tmp_path: Path) -> None:
    first, *rest = ended_rollout("root", 0.0)
    assert isinstance(first, Queued)

    def child(of: str, how: str, turn: int | None = None) -> Queued:
        origin = Origin(rollout_id=of, how=how, turn=turn)
        job = first.job.model_copy(update={"group_id": f"fork:{of}:{turn}" if turn else ""})
        return first.model_copy(update={"origin": origin, "job": job})

    await write_logs(tmp_path, [("root", [first, *rest])])
    await write_logs(tmp_path, [(f"f{n}", [child("root", "fork", 2), *rest]) for n in range(2)])
    await write_logs(tmp_path, [("again", [child("root", "replay"), *rest])])
    said = TurnEnded(turn=turn(0, recorded=True))
    await write_logs(tmp_path, [("deep", [child("f1", "fork", 3), said, Ended(outcome=Outcome.FINISHED)])])
    in_its_group = child("deep", "replay").model_copy(update={"job": child("f1", "fork", 3).job})
    await write_logs(tmp_path, [("deep-again", [in_its_group, *rest])])
    async with served(tmp_path) as server, tab(browser, f"{server.url}/web/#/rollouts/deep/reward") as watched:
        page = watched.page
        await expect(page.get_by_text("Forked at turn 3 from")).to_be_visible()
        await page.get_by_role("link", name="Forks").click()
        await expect(page.locator(".point")).to_have_text(
            ["replayed", "at turn 2: 2 continuations, mean reward 0", "at turn 3", "replayed"]
        )
        await expect(page.locator(".node.here code")).to_have_text("deep")
        await page.get_by_role("link", name="Prompts").click()
        await expect(page.get_by_label("Turn", exact=True)).to_contain_text("1: agent, recorded, ")
        await page.get_by_role("link", name="Its tokens").click()
        await expect(page.locator(".tag", has_text="recorded")).to_be_visible()
        await page.get_by_role("link", name="Forks").click()
        await page.locator(".node", has_text="root").get_by_role("link").click()
        await expect(page.locator(".rollout h1")).to_have_text("root")
        assert watched.complaints == []
