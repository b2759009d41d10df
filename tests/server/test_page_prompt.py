"""What the model saw, on the page: the request of a turn, the prompt by token, Markdown and code that stay harmless."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from playwright.async_api import Browser, expect

from rollcage.events import Ended, Event, FilesCollected, Queued, TurnEnded
from rollcage.simulators import ScriptedModel
from rollcage.types import Endpoint, Job, Outcome, ScriptedTurn, Task, Token, Turn
from support.browser import needs_chromium, tab, write_logs
from support.opencode_events import opencode
from support.served import served

pytestmark = [pytest.mark.anyio, needs_chromium]

EVIL = "[press](javascript:window.hacked=1) <img src=x onerror='window.hacked=1'> ![p](http://evil.example/p.png)"
REQUEST = {
    "model": "m",
    "temperature": 0.7,
    "messages": [
        {"role": "system", "content": "You are **careful**."},
        {"role": "user", "content": [{"type": "text", "text": "# Fix it"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "bash", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "bash", "description": EVIL, "parameters": {"properties": {}}}}
    ],
}


async def test_a_turn_shows_its_messages_tools_parameters_and_the_prompt_by_token(
    browser: Browser, tmp_path: Path
) -> None:
    async with ScriptedModel() as model:
        endpoint = model.endpoint([ScriptedTurn(text="x")])
        # As any other engine: its tokenizer is not known here, and is asked.
        named = Endpoint(base_url=endpoint.base_url, model=endpoint.model, kind="custom")
        job = Job(task=Task(id="made", instruction="Do it."), model=named)
        turns = [
            Turn(index=0, request={}, tokens=(Token("H", 72, -0.1),), prompt_ids=(72,)),
            Turn(index=1, request=REQUEST, message={"content": "It is **done**."}, prompt_ids=(72, 105), status=200),
        ]
        events: list[Event] = [Queued(job=job), *(TurnEnded(turn=turn) for turn in turns)]
        await write_logs(tmp_path, [("r", [*events, Ended(outcome=Outcome.FINISHED)])])
        async with served(tmp_path) as server, tab(browser, f"{server.url}/web/#/rollouts/r/prompt/2") as watched:
            page = watched.page
            await expect(page.get_by_label("Turn", exact=True)).to_have_value("2")
            await expect(page.locator(".said .name")).to_have_text(["system", "user", "assistant", "tool", "assistant"])
            await expect(page.locator(".said.system strong")).to_have_text("careful")
            await page.locator(".said.assistant summary").first.click()
            await expect(page.locator(".said.assistant .code").first).to_contain_text('"a": 1')
            await expect(page.get_by_label("Request")).to_contain_text("temperature0.7")
            await page.get_by_label("Request").locator("summary").click()
            await expect(page.get_by_label("Request")).to_contain_text("onerror")
            await page.get_by_role("button", name="Show it token by token").click()
            await expect(page.locator(".raw .tokentext span")).to_have_text(["H", "⟨105⟩"])
            await page.get_by_role("button", name="Ask the engine").click()
            await expect(page.locator(".raw .tokentext span")).to_have_text(["H", "i"])
            await page.get_by_role("link", name="The turn before").click()
            await expect(page.get_by_text("The request of this turn was not kept.")).to_be_visible()
            assert await page.evaluate("window.hacked") is None and await page.locator("main img").count() == 0
            assert watched.complaints == []


async def test_an_engine_that_is_gone_is_said_and_the_log_still_spells_what_it_can(tmp_path: Path) -> None:
    job = Job(task=Task(id="made", instruction="x"), model=Endpoint(base_url="http://127.0.0.1:9/v1", model="m"))
    turn = Turn(index=0, request={}, prompt_ids=(1, 2))
    await write_logs(tmp_path, [("r", [Queued(job=job), TurnEnded(turn=turn), Ended(outcome=Outcome.FINISHED)])])
    async with served(tmp_path) as server, server.http() as http:
        answer = (await http.post("/page/rollouts/r/turns/2/prompt")).json()
        assert answer["ids"] == [1, 2] and answer["texts"] == {} and "the engine does not tell" in answer["problem"]
        assert (await http.get("/page/rollouts/r/turns/1/prompt")).status_code == 404


async def test_markdown_is_drawn_code_is_coloured_and_nothing_of_it_is_obeyed(browser: Browser, tmp_path: Path) -> None:
    said = "## Plan\n\n1. *read* `x`\n2. write\n\n```python\ndef f():\n    return 1\n```\n\n"
    said += f"| a | b |\n|---|---|\n| 1 | 2 |\n\n{EVIL}"
    said += "\n\n[fine](https://example.com/a) &lt;tag&gt;\n\n" + ">" * 300 + " deep"
    part = {"type": "text", "text": said, "id": "p", "messageID": "m", "sessionID": "s"}
    job = Job(task=Task(id="made", instruction="Do *it*."), model=Endpoint(base_url="http://h/v1", model="m"))
    events: list[Event] = [
        Queued(job=job),
        opencode({"type": "text", "sessionID": "s", "part": part}),
        FilesCollected(files={"a.py": "import os\n"}, patch=""),
        Ended(outcome=Outcome.FINISHED),
    ]
    await write_logs(tmp_path, [("r", events)])
    async with served(tmp_path) as server, tab(browser, f"{server.url}/web/#/rollouts/r") as watched:
        page = watched.page
        await expect(page.get_by_role("heading", name="Plan")).to_be_visible()
        await expect(page.locator(".message .code .h-keyword").first).to_have_text("def")
        await expect(page.locator(".message table td")).to_have_text(["1", "2"])
        await expect(page.locator(".message.user em")).to_have_text("it")
        links = await page.locator(".message a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
        assert links == ["http://evil.example/p.png", "https://example.com/a"], "a script is no address"
        await expect(page.locator(".message.agent")).to_contain_text("<img src=x onerror")
        await expect(page.locator(".message.agent")).to_contain_text("<tag>")
        await page.get_by_role("link", name="Files").click()
        await page.locator("details.file summary").click()
        await expect(page.locator("details.file .h-keyword")).to_have_text("import")
        assert await page.evaluate("window.hacked") is None and await page.locator("main img").count() == 0
        assert watched.complaints == [] and not any("evil.example" in url for url in watched.asked)


async def test_the_form_tells_everything_that_is_wrong_at_once_in_its_own_words(
    browser: Browser, tmp_path: Path
) -> None:
    async with served(tmp_path) as server, tab(browser, f"{server.url}/web/#/try") as watched:
        page = watched.page
        await page.get_by_role("button", name="empty").click()
        await page.get_by_label("Model", exact=True).select_option("custom")
        await page.get_by_label("Address").fill("ftp://nowhere")
        await page.get_by_text("Limits and sampling").click()
        await page.get_by_label("Time for the agent").fill("soon")
        await page.get_by_label("Most turns").fill("-3")
        await page.get_by_role("button", name="Run", exact=True).click()
        for name, said in {
            "instruction": "Say what the agent should do.",
            "base_url": "http",
            "agent_timeout_s": "This is no number.",
            "max_turns": "Must be greater than or equal to 0.",
            "model": "“Model name”",
        }.items():
            await expect(page.locator(f"#field-{name}-wrong")).to_contain_text(said)
        await expect(page.get_by_text("fields need another look")).to_be_visible()
        await expect(page.locator("#field-instruction")).to_be_focused()
        async with server.client() as client:
            assert [row async for row in client.list()] == [], "nothing was started"
        await anyio.lowlevel.checkpoint()
