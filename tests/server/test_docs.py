"""The reference at /docs, in a real browser: everything in the OpenAPI document, and nothing from any other site."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import expect

from support.browser import chromium, needs_chromium, tab
from support.served import served

pytestmark = [pytest.mark.anyio, needs_chromium]


async def test_the_reference_shows_every_operation_rollouts_first_without_any_other_site(tmp_path: Path) -> None:
    async with served(tmp_path / "home") as server, server.http() as http, chromium() as browser:
        document = (await http.get("/openapi.json")).json()
        async with tab(browser, f"{server.url}/docs") as tabbed:
            page = tabbed.page
            await page.locator(".opblock-tag").first.wait_for()
            tags = await page.locator(".opblock-tag").evaluate_all("tags => tags.map(tag => tag.dataset.tag)")
            assert tags[:4] == ["rollouts", "one rollout", "environments", "server"]
            paths = await page.locator(".opblock-summary-path").evaluate_all(
                "paths => paths.map(path => path.dataset.path)"
            )
            assert sorted(paths) == sorted(path for path, methods in document["paths"].items() for _ in methods)
            start = page.locator("#operations-rollouts-start_rollout")
            await start.click()
            await start.get_by_text("Schema", exact=True).first.click()
            arguments = document["components"]["schemas"]["RolloutRequest"]["properties"]
            body = start.locator(".opblock-section-request-body")
            for name in arguments:
                await expect(body.get_by_text(name, exact=True).first).to_be_visible()
            origins = {urlsplit(address).netloc for address in tabbed.asked}
            assert origins == {urlsplit(server.url).netloc}
            assert tabbed.complaints == []


async def test_an_operation_can_be_tried_from_the_reference(tmp_path: Path) -> None:
    async with (
        served(tmp_path / "home") as server,
        chromium() as browser,
        tab(browser, f"{server.url}/docs") as tabbed,
    ):
        health = tabbed.page.locator("#operations-server-health")
        await health.click()
        await health.get_by_role("button", name="Try it out").click()
        await health.get_by_role("button", name="Execute").click()
        await expect(health.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
        assert tabbed.complaints == []


async def test_where_the_server_has_keys_the_reference_asks_for_one(tmp_path: Path) -> None:
    key = "k" * 20
    async with (
        served(tmp_path / "home", environment={"ROLLCAGE_SERVER_KEY": key}) as server,
        chromium() as browser,
        tab(browser, f"{server.url}/docs") as tabbed,
    ):
        page = tabbed.page
        await page.get_by_role("button", name="Authorize").click()
        await page.locator(".modal-ux input").fill(key)
        await page.locator(".modal-ux").get_by_role("button", name="Apply credentials").click()
        await page.locator(".modal-ux").get_by_role("button", name="Close").click()
        listed = page.locator("#operations-rollouts-list_rollouts")
        await listed.click()
        await listed.get_by_role("button", name="Try it out").click()
        await listed.get_by_role("button", name="Execute").click()
        await expect(listed.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
