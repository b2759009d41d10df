"""The page's view of merging: how turns join, what is trained, where and why a sequence breaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import expect

from rollcage.events import Ended, Event, Queued, Scored, TurnEnded
from rollcage.types import Endpoint, Job, Outcome, Purpose, Reward, Task, Token, Turn
from support.browser import chromium, needs_chromium, tab, write_logs
from support.served import served

pytestmark = [pytest.mark.anyio, needs_chromium]


def turn(index: int, prompt: tuple[int, ...], answer: tuple[int, ...], **more: Any) -> Event:
    tokens = tuple(Token(f"t{each}", each, -0.5) for each in answer)
    values = {"index": index, "request": {}, "prompt_ids": prompt, "tokens": tokens, "status": 200, "trainable": True}
    return TurnEnded(turn=Turn.model_validate({**values, "policy_version": "7", **more}))


def story() -> list[Event]:
    """Two turns that join, one that another repeats, one whose prompt has other tokens than were sampled, a title."""
    job = Job(task=Task(id="merged", instruction="Do it."), model=Endpoint(base_url="http://h/v1", model="m"))
    first, second = tuple(range(100)), (*range(100), 500, 501, *range(600, 640))
    cut = {"trainable": False, "untrainable_reason": "the answer broke off", "error": "cut"}
    return [
        Queued(job=job),
        turn(0, first, (500, 501)),
        turn(1, second, (700,), **cut),
        turn(2, second, (700, 701, 702), replaces=1),
        turn(3, (*first, 500, 999, *second[102:], 700, 701, 702, 5, 6), (800, 801)),
        turn(4, (1, 2), (3,), purpose=Purpose.TITLE),
        Scored(reward=Reward(total=1.0)),
        Ended(outcome=Outcome.FINISHED),
    ]


async def test_the_page_shows_how_turns_join_and_why_a_sequence_breaks(tmp_path: Path) -> None:
    home = tmp_path / "home"
    await write_logs(home, [("m1", story())])
    async with served(home) as server, server.http() as http, chromium() as browser:
        told = (await http.get("/rollouts/m1/merge")).json()
        parts = [
            [(each["turn"], each["tokens"], each["trained"]) for each in one["parts"]] for one in told["sequences"]
        ]
        assert parts == [
            [(0, 100, False), (0, 2, True), (2, 40, False), (2, 3, True)],
            [(3, 147, False), (3, 2, True)],
        ]
        assert {each["index"]: each["fate"] for each in told["turns"]} == {
            0: "trained",
            1: "replaced",
            2: "trained",
            3: "trained",
            4: "other",
        }
        assert told["report"]["delivered_fraction"] == 1.0
        assert (await http.get("/rollouts/nobody/merge")).status_code == 404
        for width in (1280, 390):
            async with tab(browser, f"{server.url}/web/#/rollouts/m1/merge") as watched:
                page = watched.page
                await page.set_viewport_size({"width": width, "height": 900})
                await expect(page.get_by_role("article")).to_have_count(2)
                joined = page.get_by_label("Sequence 0")
                await expect(joined).to_contain_text("2 turns: 1 → 3")
                await expect(joined.locator(".stretch i.trained")).to_have_count(2)
                broken = page.get_by_label("Sequence 1").locator(".break")
                await expect(broken).to_contain_text("prompt")
                await expect(broken).to_contain_text("At token 101, compared with turn 3")
                await expect(broken.locator("dd").first).to_contain_text("501 600")
                await expect(page.locator(".left li")).to_have_count(2)
                await expect(page.locator(".left")).to_contain_text("turn 3 repeats it")
                await expect(page.locator(".numbers")).to_contain_text("100 %")
                wider = await page.evaluate("document.documentElement.scrollWidth > innerWidth")
                assert not wider, width
