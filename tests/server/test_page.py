"""The web page in a real browser, on a real server."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from playwright.async_api import Browser, expect

from rollcage import Client
from rollcage.events import (
    AgentEnded,
    AgentStarted,
    BoxOpened,
    CommandEnded,
    CommandStarted,
    Ended,
    Event,
    FilesCollected,
    Queued,
    StageStarted,
    Suspicion,
    TurnEnded,
)
from rollcage.schema.request import RolloutRequest
from rollcage.types import Alternative, CommandResult, Endpoint, Job, Outcome, Stage, Task, Token, Turn
from support.browser import ended_rollout, home_beside, needs_chromium, tab, write_logs
from support.opencode_events import opencode
from support.paths import SCRIPTS
from support.served import served, steady_port

pytestmark = [pytest.mark.anyio, needs_chromium]

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


async def test_a_newcomer_presses_run_and_watches_a_real_rollout_to_its_reward(
    browser: Browser, state_dir: Path, tmp_path: Path
) -> None:
    home = home_beside(state_dir, tmp_path / "home")
    async with served(home) as server, tab(browser, f"{server.url}/web/") as watched:
        page = watched.page
        await expect(page.get_by_role("heading", name="No rollouts yet")).to_be_visible()
        await page.get_by_role("link", name="Try one").click()
        await page.get_by_role("button", name="Run", exact=True).click()
        await expect(page.locator(".verdict.passed .reward")).to_have_text("1", timeout=240_000)
        await expect(page.locator(".transcript")).to_contain_text("rounds down, so a page")
        await expect(page.locator(".diff .added")).to_contain_text("return -(-total // size)")
        # Who watched to the end sees there what it came to, and nothing else after the last words.
        await expect(page.locator(".closing")).to_have_text(re.compile(r"finished\s*reward 1\s*How it was made"))
        await expect(page.locator(".closing")).to_be_in_viewport()
        await expect(page.locator(".transcript")).to_contain_text(re.compile(r"All tests pass\.\s*finished"))
        assert await page.locator(".timeline li:not(.never)").count() == 5
        await page.locator('.tabs a[href$="/tokens"]').click()
        first = page.locator('#turn-0 .tokentext span[data-i="0"]')
        await first.hover()
        await expect(page.locator(".tip")).to_contain_text("logprob")
        assert await page.locator("#turn-0 .entropy .line").count() == 1
        await page.locator('.tabs a[href$="/files"]').click()
        await expect(page.locator("details.file").first).to_contain_text("pager/pages.py")
        await page.locator('.tabs a[href$="/commands"]').click()
        await expect(page.locator(".commands")).to_contain_text("PageCount")
        await page.keyboard.press("Escape")
        await expect(page.locator(".row .reward")).to_have_text("1")
        assert watched.complaints == []
        assert {urlsplit(url).netloc for url in watched.asked} == {urlsplit(server.url).netloc}


async def test_abort_stops_a_running_rollout(browser: Browser, tmp_path: Path) -> None:
    async with served(tmp_path / "home") as server, server.client() as client:
        rollout_id = await _start(client, "sleep 600")
        async with tab(browser, f"{server.url}/web/#/rollouts/{rollout_id}") as watched:
            await expect(watched.page.locator(".timeline .agent.here")).to_be_visible()
            await watched.page.get_by_role("button", name="Abort").click()
            # It asks first, and no answer is no.
            await watched.page.get_by_role("button", name="Let it run").click()
            assert (await client.state(rollout_id)).outcome is None
            await watched.page.get_by_role("button", name="Abort").click()
            await watched.page.get_by_role("button", name="Abort it").click()
            await expect(watched.page.locator(".verdict .outcome")).to_have_text("aborted")
            await expect(watched.page.get_by_role("button", name="Abort")).to_have_count(0)


async def test_a_restarted_server_is_found_again_and_nothing_is_lost_or_doubled(
    browser: Browser, tmp_path: Path
) -> None:
    port = str(steady_port())
    home = tmp_path / "home"
    async with served(home, "--port", port) as first, first.client() as client:
        one = await _start(client, "sleep 600", task_id="one")
        async with (
            tab(browser, f"{first.url}/web/#/rollouts/{one}") as watched,
            tab(browser, f"{first.url}/web/") as board,
        ):
            page = watched.page
            await expect(page.locator(".timeline .agent.here")).to_be_visible()
            await expect(board.page.locator(".row")).to_have_count(1)
            first.kill()
            await expect(page.get_by_text("The connection was lost.")).to_be_visible()
            await expect(board.page.locator(".link.lost")).to_be_visible()
            async with served(home, "--port", port) as second, second.client() as again:
                await expect(page.locator(".verdict .outcome")).to_have_text("crashed")
                assert await page.locator(".timeline .agent").count() == 1
                await expect(board.page.locator(".link.live")).to_be_visible()
                await again.wait(await _start(again, "true", task_id="two"))
                await expect(board.page.locator(".row b")).to_have_text(["two", "one"])


async def test_hostile_text_is_shown_and_never_obeyed(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    job = Job(
        task=Task(id=HOSTILE, instruction=HOSTILE), model=Endpoint(base_url="http://h/v1", model=HOSTILE, kind="custom")
    )
    state = {"status": "completed", "input": {"command": HOSTILE}, "output": HOSTILE, "title": HOSTILE}
    part = {"type": "tool", "tool": HOSTILE, "id": "p2", "messageID": "m1", "sessionID": "s", "state": state}
    words = {"type": "text", "text": HOSTILE, "id": "p1", "messageID": "m1", "sessionID": "s"}
    turn = Turn(index=0, request={}, tokens=(Token(HOSTILE, 1, -0.1, (Alternative(HOSTILE, 2, -2.0),)),), error=HOSTILE)
    result = CommandResult(command=HOSTILE, exit_code=1, stdout=HOSTILE, stderr=HOSTILE, seconds=0.1)
    patch = f"diff --git a/{HOSTILE} b/{HOSTILE}\n@@ -1 +1 @@\n-{HOSTILE}\n+{HOSTILE}\n"
    events: list[Event] = [
        Queued(job=job),
        StageStarted(stage=Stage.AGENT),
        BoxOpened(sandbox_id="b", backend="local", notes=(HOSTILE,)),
        CommandStarted(stage=Stage.VERIFY, command=HOSTILE),
        CommandEnded(stage=Stage.VERIFY, result=result),
        AgentStarted(agent=HOSTILE, version=HOSTILE),
        opencode({"type": "text", "sessionID": "s", "part": words}),
        opencode({"type": "tool_use", "sessionID": "s", "part": part}),
        opencode({"type": "tool_use", "sessionID": "s", "part": {"type": [], "id": {}, "state": 7}}),
        opencode({"type": "error", "sessionID": "s", "error": {"name": HOSTILE}}),
        TurnEnded(turn=turn),
        AgentEnded(exit_code=1, error=HOSTILE, log_tail=HOSTILE),
        Suspicion(what=HOSTILE, paths=(HOSTILE,)),
        FilesCollected(files={HOSTILE: HOSTILE}, extra=(HOSTILE + "2",), why={HOSTILE + "2": HOSTILE}, patch=patch),
        Ended(outcome=Outcome.AGENT_FAILED, error=HOSTILE, error_code=HOSTILE),
    ]
    await write_logs(home, [("evil", events)])
    async with served(home) as server, tab(browser, f"{server.url}/web/") as watched:
        page = watched.page
        await expect(page.locator(".row b")).to_contain_text(HOSTILE[:20])
        for part_name in ("transcript", "tokens", "commands", "files", "reward"):
            await page.goto(f"{server.url}/web/#/rollouts/evil/{part_name}")
            await expect(page.locator(".rollout h1")).to_contain_text(HOSTILE[:20])
            await expect(page.locator(".tabs + *")).to_contain_text("onerror")
            assert await page.locator("main img, main script").count() == 0
        await page.goto(f"{server.url}/web/#/rollouts/evil/tokens")
        await page.locator('.tokentext span[data-i="0"]').hover()
        await expect(page.locator(".tip")).to_contain_text("onerror")
        assert await page.evaluate("window.hacked") is None
        assert watched.complaints == []


async def test_the_policy_of_the_page_allows_nothing_from_elsewhere_and_nothing_inline(tmp_path: Path) -> None:
    async with served(tmp_path / "home") as server, server.http() as http:
        answer = await http.get("/web/")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        inline = re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|<style", answer.text)
        assert inline == []
        other = {"Origin": "http://evil.example", "Content-Type": "application/json"}
        refused = await http.post("/rollouts", json={"instruction": "x"}, headers=other)
        assert refused.status_code == 403


async def test_an_error_of_the_form_appears_beside_its_field(browser: Browser, tmp_path: Path) -> None:
    async with served(tmp_path / "home") as server, tab(browser, f"{server.url}/web/#/try") as watched:
        page = watched.page
        await page.get_by_label("Instruction").fill("  ")
        await page.get_by_role("button", name="Run", exact=True).click()
        await expect(page.locator("#field-instruction-wrong")).to_contain_text("Say what the agent should do")
        await page.get_by_label("Instruction").fill("Do it.")
        await page.get_by_label("Model", exact=True).select_option("custom")
        await page.get_by_label("Address").fill("ftp://nowhere")
        await page.get_by_label("Model name").fill("m")
        await page.get_by_label("Key").fill("k")
        await page.get_by_role("button", name="Run", exact=True).click()
        await expect(page.locator("#field-base_url-wrong")).to_contain_text("http")
        await page.get_by_text("Limits and sampling").click()
        await page.get_by_label("Time for the agent").fill("soon")
        await page.get_by_role("button", name="Run", exact=True).click()
        await expect(page.locator("#field-agent_timeout_s-wrong")).to_contain_text("no number")
        assert page.url.endswith("#/try")
        # Every argument there is can be given: the form is made from their one declaration.
        await page.get_by_text("All arguments").click()
        laid_out = await page.locator("[id^='field-'][name]").evaluate_all("all => all.map(one => one.name)")
        for name in RolloutRequest.model_fields.keys() - set(laid_out):
            await expect(page.locator(f"#argument-{name}")).to_have_count(1)


async def test_a_server_with_keys_lets_nobody_look_without_one(browser: Browser, tmp_path: Path) -> None:
    home, keys = tmp_path / "home", tmp_path / "keys.toml"
    made = await anyio.run_process(
        ["rollcage", "serve", "--api-key-file", str(keys), "--new-key", "ann"], env=_path_of_this_python()
    )
    key = made.stdout.decode().split()[-1]
    async with served(home, "--api-key-file", str(keys), key=key) as server, server.client() as client:
        rollout_id = await _start(client, "true", task_id="private")
        await client.wait(rollout_id)
        async with tab(browser, f"{server.url}/web/#/rollouts/{rollout_id}") as watched:
            await watched.page.get_by_label("API key").fill(key)
            await watched.page.get_by_role("button", name="Log in").click()
            await expect(watched.page.locator(".rollout h1")).to_have_text("private")
        async with tab(browser, f"{server.url}/web/") as watched:
            page = watched.page
            await page.get_by_label("API key").fill("wrong")
            await page.get_by_role("button", name="Log in").click()
            await expect(page.get_by_role("alert")).to_contain_text("does not know that key")
            assert "private" not in await page.content()
            await page.get_by_label("API key").fill(key)
            await page.get_by_role("button", name="Log in").click()
            await expect(page.locator(".row b")).to_have_text("private")
            assert key not in await page.content()


async def test_ten_thousand_rollouts_are_listed_searched_and_walked_through(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    await write_logs(
        home,
        (
            (f"r{n:05}", ended_rollout(f"task-{n:05}" if n % 50 else "same", (n // 50 % 5) / 4 if n % 7 else None))
            for n in range(10_000)
        ),
    )
    async with served(home) as server, tab(browser, f"{server.url}/web/") as watched:
        page = watched.page
        await expect(page.locator(".found")).to_have_text("10,000 rollouts")
        assert await page.locator(".row").count() < 80
        await page.locator(".virtual").evaluate("element => element.scrollTop = element.scrollHeight")
        await expect(page.locator(".row").last).to_be_in_viewport()
        assert await page.locator(".row").count() < 80
        await page.keyboard.press("/")
        await page.keyboard.type("task-01234")
        await expect(page.locator(".row b")).to_have_text(["task-01234"])
        await page.keyboard.press("Escape")
        await page.keyboard.press("j")
        await page.keyboard.press("Enter")
        await expect(page.locator(".rollout h1")).to_have_text("task-01234")
        await page.keyboard.press("Escape")
        await page.get_by_label("Search rollouts").fill("same")
        await page.get_by_label("Group by task").check()
        await expect(page.locator(".row.group b")).to_have_text(["same"])
        await expect(page.locator(".row.group .turns")).to_have_text("200")
        assert await page.locator(".row.group .stem").count() == 5
        assert watched.complaints == []


@pytest.mark.slow
async def test_a_rollout_of_half_a_million_tokens_draws_only_what_is_seen(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    top = (Alternative("a", 1, -0.2), Alternative("b", 2, -1.9))
    tokens = tuple(Token(f" word{n}", n, -0.2, top) for n in range(250))
    job = Job(task=Task(id="long", instruction="x"), model=Endpoint(base_url="http://h/v1", model="m"))
    turns = [TurnEnded(turn=Turn(index=n, request={}, tokens=tokens, trainable=True, status=200)) for n in range(2000)]
    events: list[Event] = [Queued(job=job), StageStarted(stage=Stage.AGENT), *turns, Ended(outcome=Outcome.FINISHED)]
    await write_logs(home, [("long", events)])
    async with served(home) as server, tab(browser, f"{server.url}/web/#/rollouts/long/tokens") as watched:
        page = watched.page
        await expect(page.locator(".keyrow")).to_contain_text("2,000 turns, 500k tokens", timeout=240_000)
        await expect(page.locator("#turn-0 .tokentext")).to_be_visible()
        assert await page.locator(".tokentext").count() < 40
        await page.locator("#turn-1999").scroll_into_view_if_needed()
        await expect(page.locator("#turn-1999 .tokentext")).to_be_visible()
        await expect(page.locator("#turn-0 .tokentext")).to_have_count(0)
        assert await page.evaluate("document.getElementsByTagName('*').length") < 60_000
        assert watched.complaints == []


async def test_every_view_fits_a_phone(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    long = "an-unbroken-name-" * 11
    await write_logs(home, [("r1", ended_rollout(long, 0.5, instruction=long))])
    async with served(home) as server, tab(browser, f"{server.url}/web/", width=360, height=740) as watched:
        for path in ("", "#/try", "#/environments", "#/rollouts/r1", "#/rollouts/r1/files", "#/rollouts/r1/reward"):
            await watched.page.goto(f"{server.url}/web/{path}")
            await expect(watched.page.locator("main h1")).to_have_count(1)
            wide = await watched.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= 360, (path, wide)
        await watched.page.set_viewport_size({"width": 320, "height": 640})
        await watched.page.goto(f"{server.url}/web/#/rollouts/r1/files")
        await expect(watched.page.get_by_role("link", name="Files")).to_be_in_viewport(ratio=0.9)
        await watched.page.goto(f"{server.url}/web/#/rollouts/r1/reward")
        await expect(watched.page.get_by_role("link", name="Reward")).to_be_in_viewport(ratio=0.9)


def test_the_examples_of_the_page_are_those_of_the_folder() -> None:
    path = SCRIPTS / "web_examples.py"
    spec = importlib.util.spec_from_file_location("web_examples", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.TARGET.read_text(encoding="utf-8") == module.text(), "run: python scripts/web_examples.py"


async def _start(client: Client, script: str, **more: Any) -> str:
    """The cheapest rollout there is: bash runs the instruction."""
    return (await client.start(script, agent="shell", endpoint="scripted", **more)).rollout_id


def _path_of_this_python() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
