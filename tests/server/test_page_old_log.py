"""A log of before agents' events were neutral, looked at through the server and the page."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from support.browser import needs_chromium, tab
from support.served import served

pytestmark = [pytest.mark.anyio, needs_chromium]

OLD_LOG = Path(__file__).parents[1] / "data" / "log_v1.db.gz"


async def test_an_old_log_is_shown_as_it_was(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "rollouts.db").write_bytes(gzip.decompress(OLD_LOG.read_bytes()))
    async with served(home) as server, server.client() as client:
        rows = {(row.task_id, row.agent): row.rollout_id async for row in client.list()}
        newest = rows["hello", "opencode"]
        messages = (await client.messages(newest)).messages
        assert [part["type"] for part in messages[-1].parts] == ["step-start", "text", "step-finish"]
        async with tab(browser, f"{server.url}/web/#/rollouts/{newest}") as watched:
            page = watched.page
            await expect(page.locator(".message.user")).to_have_text("InstructionWrite hello.py that prints hello.")
            await expect(page.locator(".tool .name")).to_have_text(["write", "edit", "bash", "read"])
            await expect(page.locator(".tool.error .how")).to_have_text("failed")
            await expect(page.locator(".thought")).to_contain_text("I should write it first.")
            await expect(page.locator(".words").last).to_have_text("All of it is done.")
            await page.goto(f"{server.url}/web/#/rollouts/{newest}/reward")
            await expect(page.locator(".suspicion")).to_contain_text("/home/user/planted")
            await expect(page.locator(".trust")).to_contain_text("shared")
            await page.goto(f"{server.url}/web/#/rollouts/{rows['script', 'shell']}")
            await expect(page.locator(".message.agent pre")).to_have_count(2)
            assert watched.complaints == []
