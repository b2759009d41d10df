"""Walking through the web page as people do: filters, links, keys, a lost connection, a transcript that grows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from rollcage.events import (
    AgentStarted,
    CommandEnded,
    CommandStarted,
    Ended,
    Event,
    Queued,
    Requeued,
    StageStarted,
    TurnEnded,
)
from rollcage.types import Alternative, CommandResult, Endpoint, Job, Outcome, Stage, Task, Token, Turn
from support.browser import ended_rollout, home_beside, needs_chromium, tab, write_logs
from support.opencode_events import opencode
from support.served import served, shell

pytestmark = [pytest.mark.anyio, needs_chromium]

JOB = Job(task=Task(id="made", instruction="Do it."), model=Endpoint(base_url="http://h/v1", model="m"))


async def test_filters_and_groups_are_in_the_address_and_the_way_back_keeps_them(
    browser: Browser, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    await write_logs(
        home,
        [
            *((f"a{n}", ended_rollout("merge", n / 4)) for n in range(5)),
            ("b", ended_rollout("merge-again", 1.0)),
            ("c", ended_rollout("merge", None)),
        ],
    )
    async with served(home) as server, tab(browser, f"{server.url}/web/") as watched:
        page = watched.page
        await page.get_by_role("button", name="Scored").click()
        await page.get_by_label("Search rollouts").fill("merge")
        await page.get_by_label("Group by task").check()
        await expect(page.locator(".found")).to_have_text("6 of 7 in 2 groups")
        await page.reload()
        await expect(page.locator(".found")).to_have_text("6 of 7 in 2 groups")
        await expect(page.get_by_label("Search rollouts")).to_have_value("merge")
        assert await page.get_by_role("img", name="5 rewards from 0 to 1, mean 0.50").count() == 1
        await page.get_by_role("link", name="merge", exact=True).click()
        await expect(page.locator(".row b")).to_have_text(["merge"] * 5)
        await page.locator(".row a").first.click()
        await expect(page.locator(".rollout h1")).to_have_text("merge")
        await expect(page).to_have_title("merge · rollcage")
        await page.reload()
        await expect(page.locator(".rollout h1")).to_have_text("merge")
        await page.keyboard.press("Escape")
        await expect(page.locator(".rollout")).to_have_count(0)
        await page.go_back()
        await expect(page.locator(".rollout h1")).to_have_text("merge")
        await page.go_back()
        await expect(page.locator(".row b")).to_have_text(["merge"] * 5)
        await page.go_back()
        await expect(page.locator(".row.group")).to_have_count(2)
        assert watched.complaints == []


async def test_a_rollout_is_coloured_by_what_it_earned_and_not_by_how_it_ended(
    browser: Browser, tmp_path: Path
) -> None:
    logs = {"passed": 1.0, "partial": 0.5, "failed": 0.0, "broken": None}
    made = [(name, ended_rollout(name, reward)) for name, reward in logs.items()]
    await write_logs(tmp_path, [*made, ("unscored", [Queued(job=JOB), Ended(outcome=Outcome.FINISHED)])])
    async with served(tmp_path) as server, tab(browser, f"{server.url}/web/") as watched:
        page, seen = watched.page, set()
        await expect(page.locator(".row .progress")).to_have_count(5)
        for standing in (*logs, "unscored"):
            mark = page.locator(f".row .progress.{standing}")
            await expect(mark).to_have_text("setup failed" if standing == "broken" else "finished")
            seen.add(await mark.evaluate("element => getComputedStyle(element).color"))
        assert len(seen) == 5, "each has a colour of its own"
        await expect(page.locator(".legend li")).to_have_count(5)
        for name in ("passed", "partial", "failed", "unscored", "setup failed"):
            await expect(page.locator(".legend")).to_contain_text(f"{name} 1")
        await page.get_by_role("button", name="Broken").click()
        await expect(page.locator(".row .progress")).to_have_count(1)
        await page.goto(f"{server.url}/web/#/rollouts/failed")
        await expect(page.locator(".verdict.failed .outcome")).to_have_text("finished")


async def test_what_somebody_looks_at_stays_in_place_while_others_come(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    await write_logs(home, ((f"r{n:03}", ended_rollout(f"task-{n:03}", 1.0)) for n in range(300)))
    async with (
        served(home) as server,
        server.client() as client,
        tab(browser, f"{server.url}/web/") as watched,
    ):
        page = watched.page
        await expect(page.locator(".found")).to_have_text("300 rollouts")
        await page.keyboard.press("j")
        await page.keyboard.press("j")
        await expect(page.locator('.row[aria-rowindex="3"]')).to_have_attribute("aria-current", "true")
        chosen = await page.locator(".row.selected b").inner_text()
        await page.locator(".virtual").evaluate("element => element.scrollTop = 2600")
        name = await page.locator('.row[aria-rowindex="57"] b').inner_text()
        row = page.locator(".row").filter(has_text=name)
        before = await row.bounding_box()
        first, *_ = [(await client.start(**shell("true", task_id="new"))).rollout_id for _ in range(3)]  # type: ignore[arg-type]
        await client.wait(first)
        await expect(page.locator(".found")).to_have_text("303 rollouts")
        assert await row.bounding_box() == before
        await page.keyboard.press("Enter")
        await expect(page.locator(".rollout h1")).to_have_text(chosen)


async def test_a_crowd_that_begins_and_ends_between_two_looks_is_shown(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    await write_logs(home, [("first", ended_rollout("first", 1.0))])
    async with served(home) as server, tab(browser, f"{server.url}/web/") as watched:
        await expect(watched.page.locator(".found")).to_have_text("1 rollout")
        await write_logs(home, ((f"r{n:03}", ended_rollout(f"task-{n:03}", 1.0)) for n in range(400)))
        await expect(watched.page.locator(".found")).to_have_text("401 rollouts")


async def test_a_tab_that_was_offline_catches_up(browser: Browser, tmp_path: Path) -> None:
    async with (
        served(tmp_path / "home") as server,
        server.client() as client,
        tab(browser, f"{server.url}/web/") as watched,
    ):
        page = watched.page
        await client.wait((await client.start(**shell("true", task_id="one"))).rollout_id)  # type: ignore[arg-type]
        await expect(page.locator(".row b")).to_have_text(["one"])
        await page.context.set_offline(True)
        await expect(page.locator(".link.lost")).to_be_visible()
        await client.wait((await client.start(**shell("true", task_id="two"))).rollout_id)  # type: ignore[arg-type]
        await page.context.set_offline(False)
        await expect(page.locator(".link.live")).to_be_visible()
        await expect(page.locator(".row b")).to_have_text(["two", "one"])


def _said(n: int) -> list[Event]:
    names = {"messageID": f"m{n:04}", "sessionID": "s"}
    words = {"type": "text", "text": f"Step {n}.", "id": "a", **names}
    state = {"status": "completed", "input": {"command": f"cat {n}"}, "output": "line\n" * 40}
    call = {"type": "tool", "tool": "bash", "id": "b", "state": state, **names}
    return [
        opencode({"type": kind, "sessionID": "s", "part": part}) for kind, part in (("text", words), ("tool_use", call))
    ]


async def test_a_long_transcript_draws_what_is_seen_and_is_walked_and_searched_by_keys(
    browser: Browser, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    said = [event for n in range(1500) for event in _said(n)]
    events = [Queued(job=JOB), StageStarted(stage=Stage.AGENT), AgentStarted(agent="opencode", version="1"), *said]
    await write_logs(home, [("long", [*events, Ended(outcome=Outcome.FINISHED)])])
    async with served(home) as server, tab(browser, f"{server.url}/web/#/rollouts/long") as watched:
        page = watched.page
        await expect(page.get_by_text("1,500 messages")).to_be_visible()
        await expect(page.get_by_text("Step 0.", exact=True)).to_be_visible()
        assert await page.locator(".message pre").count() < 60
        await expect(page.get_by_role("button", name="Show all 40 lines").first).to_be_visible()
        for _ in range(3):
            await page.keyboard.press("j")
        await expect(page.locator(".message.at")).to_contain_text("Step 1.")
        await expect(page.locator(".message.at")).to_be_in_viewport()
        await page.keyboard.press("k")
        await expect(page.locator(".message.at")).to_contain_text("Step 0.")
        await page.keyboard.press("/")
        await page.keyboard.type("step 1234")
        await expect(page.locator(".message.agent")).to_have_count(1)
        await expect(page.get_by_text("Step 1234.")).to_be_visible()
        assert watched.complaints == []


async def test_what_was_opened_or_closed_by_hand_stays_so_when_it_was_out_of_sight(
    browser: Browser, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    said = [event for n in range(200) for event in _said(n)]
    await write_logs(home, [("long", [Queued(job=JOB), *said, Ended(outcome=Outcome.FINISHED)])])
    async with served(home) as server, tab(browser, f"{server.url}/web/#/rollouts/long") as watched:
        page = watched.page
        closed, whole = (page.locator(".message.agent").nth(n) for n in (0, 1))
        await closed.locator("summary").click()
        await expect(closed.locator("details")).not_to_have_attribute("open", "")
        await whole.get_by_role("button", name="Show all 40 lines").click()
        await expect(whole.get_by_role("button", name="Show less")).to_be_visible()
        await page.locator(".message.agent").last.scroll_into_view_if_needed()
        await expect(closed.locator("details")).to_have_count(0)
        await expect(whole.locator("details")).to_have_count(0)
        await closed.scroll_into_view_if_needed()
        await expect(closed.locator("details")).not_to_have_attribute("open", "")
        await expect(whole.get_by_role("button", name="Show less")).to_be_visible()
        assert watched.complaints == []


async def test_one_huge_turn_is_drawn_in_part_and_walked_from_end_to_end(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    top = (Alternative("a", 1, -0.2), Alternative("b", 2, -1.9))
    tokens = tuple(Token(f" word{n}" if n % 30 else "\n", n, -0.2, top) for n in range(40_000))
    turn = Turn(index=0, request={}, tokens=tokens, status=200)
    await write_logs(home, [("r", [Queued(job=JOB), TurnEnded(turn=turn), Ended(outcome=Outcome.FINISHED)])])
    async with served(home) as server, tab(browser, f"{server.url}/web/#/rollouts/r/tokens") as watched:
        page = watched.page
        await expect(page.locator('[data-i="0"]')).to_be_visible()
        await page.locator(".tokentext").focus()
        await page.keyboard.press("End")
        await expect(page.locator(".tip")).to_contain_text("id 39999")
        await expect(page.locator('[data-i="39999"]')).to_be_in_viewport()
        await expect(page.locator('[data-i="0"]')).to_have_count(0)
        assert await page.locator(".tokentext span").count() < 8_000
        await page.keyboard.press("ArrowLeft")
        await expect(page.locator(".tip")).to_contain_text("id 39998")
        await page.keyboard.press("Home")
        await expect(page.locator(".tip")).to_contain_text("id 0")
        await expect(page.locator('[data-i="0"]')).to_be_in_viewport()
        assert watched.complaints == []


async def test_times_are_those_of_the_readers_own_zone(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    await write_logs(home, [("r", ended_rollout("made", 1.0))])
    async with served(home) as server, server.client() as client:
        started = (await client.state("r")).started_at
        assert started is not None
        zones = {"Asia/Kathmandu": 5.75, "Pacific/Marquesas": -9.5, "Pacific/Kiritimati": 14}
        for zone, hours in zones.items():
            context = await browser.new_context(timezone_id=zone, locale="en-GB")
            page = await context.new_page()
            await page.goto(f"{server.url}/web/#/rollouts/r")
            here = datetime.fromtimestamp(started, UTC) + timedelta(hours=hours)
            await expect(page.locator(".facts time")).to_contain_text(f"{here.day} {here:%b %Y, %H:%M:%S}")
            await context.close()


async def test_nothing_moves_for_who_asked_for_less_motion(browser: Browser, tmp_path: Path) -> None:
    async with served(tmp_path / "home") as server, server.client() as client:
        rollout_id = (await client.start(**shell("sleep 600"))).rollout_id  # type: ignore[arg-type]
        async with tab(browser, f"{server.url}/web/#/rollouts/{rollout_id}") as watched:
            bar = watched.page.locator(".timeline .agent.here i")
            await expect(bar).to_have_css("animation-name", "pulse")
            await watched.page.emulate_media(reduced_motion="reduce")
            await expect(bar).to_have_css("animation-name", "none")
            assert await watched.page.evaluate("document.getAnimations().length") == 0


async def test_a_token_tells_about_itself_by_pointer_by_keys_and_by_touch(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    top = (Alternative("one", 11, -0.1), Alternative("two", 12, -2.5))
    tokens = (Token("one", 11, -0.1, top), Token("two", 12, -2.5, top), Token("three", None, None))
    turn = Turn(index=0, request={}, tokens=tokens, status=200)
    await write_logs(home, [("r", [Queued(job=JOB), TurnEnded(turn=turn), Ended(outcome=Outcome.FINISHED)])])
    async with served(home) as server:
        url = f"{server.url}/web/#/rollouts/r/tokens"
        async with tab(browser, url) as watched:
            page = watched.page
            await page.get_by_text("two", exact=True).hover()
            await expect(page.locator(".tip")).to_contain_text("logprob -2.5000")
            await page.mouse.move(5, 5)
            await expect(page.locator(".tip")).to_have_count(0)
            await page.locator(".tokentext").focus()
            await page.keyboard.press("Home")
            await expect(page.locator(".tip")).to_contain_text("id 11")
            await expect(page.get_by_role("status").filter(has_text="id 11")).to_contain_text('instead "one" 90.5 %')
            await page.keyboard.press("End")
            await expect(page.locator(".tip")).to_contain_text("no logprob")
            await page.keyboard.press("Escape")
            await expect(page.locator(".tip")).to_have_count(0)
            await expect(page.locator(".tokentext")).to_be_visible()
            assert watched.complaints == []
        context = await browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
        phone = await context.new_page()
        await phone.goto(url)
        await phone.get_by_text("two", exact=True).tap(timeout=45_000)
        await expect(phone.locator(".tip")).to_contain_text("id 12")
        await context.close()


async def test_what_a_dead_server_began_is_not_shown_as_part_of_the_rollout(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    once: list[Event] = [
        StageStarted(stage=Stage.PROVISION),
        StageStarted(stage=Stage.SETUP),
        CommandStarted(stage=Stage.SETUP, command="make ready"),
        CommandEnded(stage=Stage.SETUP, result=CommandResult(command="make ready", exit_code=0)),
    ]
    again = Requeued(owner="second", previous="first")
    await write_logs(
        home, [("r", [Queued(job=JOB, owner="first"), *once, again, *once, Ended(outcome=Outcome.FINISHED)])]
    )
    async with served(home) as server, tab(browser, f"{server.url}/web/#/rollouts/r/commands") as watched:
        await expect(watched.page.get_by_text("Begun anew")).to_be_visible()
        await expect(watched.page.locator(".verdict .outcome")).to_have_text("finished")
        await expect(watched.page.locator(".commands details")).to_have_count(1)


async def _most_at_once(page: Page, phrase: str) -> None:
    """From now on, note in the page how often a phrase was to be read at the same time."""
    await page.evaluate(
        """phrase => {
            window.most = 0;
            const look = () => {
                const text = document.querySelector(".transcript")?.innerText ?? "";
                window.most = Math.max(window.most, text.split(phrase).length - 1);
            };
            new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
        }""",
        phrase,
    )


@pytest.mark.slow
async def test_what_a_model_says_is_read_once_while_it_says_it(
    browser: Browser, state_dir: Path, tmp_path: Path
) -> None:
    home = home_beside(state_dir, tmp_path / "home")
    words = "The beginning is here. " + "It goes on and on, so that it takes a while. " * 8
    async with served(home) as server, server.client() as client:
        solution = [{"text": words, "token_delay_s": 0.05}]
        await client.pause()  # until somebody looks
        started = await client.start("Talk.", endpoint="scripted", solution=solution)
        async with tab(browser, f"{server.url}/web/#/rollouts/{started.rollout_id}") as watched:
            page = watched.page
            await _most_at_once(page, "The beginning is here.")
            await expect(page.get_by_text("Instruction")).to_be_visible(timeout=240_000)
            await client.resume()
            await expect(page.locator(".message.live")).to_contain_text("so far", timeout=240_000)
            await expect(page.locator(".verdict.unscored")).to_be_visible(timeout=240_000)
            await expect(page.locator(".message.live")).to_have_count(0)
            assert await page.evaluate("window.most") == 1
