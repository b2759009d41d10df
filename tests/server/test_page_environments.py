"""The page's view of remote environments, in a real browser, on a real server with a local Fleet inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollcage.mcp.convert import Union
from rollcage.mcp.types import ListToolsAction, ToolResult
from rollcage.simulators.fleet.listener import LoopbackListener
from support.browser import home_beside, needs_chromium, tab
from support.remote_work import mcp_server
from support.served import served

pytestmark = [pytest.mark.anyio, needs_chromium]

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


async def test_a_newcomer_calls_the_tools_of_the_demonstration(browser: Browser, tmp_path: Path) -> None:
    async with (
        served(tmp_path / "home", "--fleet-demo") as server,
        tab(browser, f"{server.url}/web/#/environments") as watched,
    ):
        page = watched.page
        await page.get_by_role("link", name="fleet:ticket-desk", exact=True).click()
        form = page.get_by_role("form")
        await page.get_by_role("button", name="assign_ticket").click()
        await expect(form.get_by_role("heading")).to_have_text("assign_ticket")
        await form.get_by_role("button", name="Call").click()
        await expect(form.locator(".wrong")).to_have_text("This one is needed.")
        await form.get_by_label("ticket_id").fill("a lot")
        await form.get_by_role("button", name="Call").click()
        await expect(form.locator(".wrong")).to_have_text("This is no whole number.")
        await form.get_by_label("ticket_id").fill("103")
        await form.get_by_label("assignee").select_option(label="billing")
        await form.get_by_role("button", name="Call").click()
        answer = page.get_by_role("article").first
        await expect(answer).to_contain_text('"assignee": "billing"')
        await page.get_by_role("button", name="search_tickets").click()
        await form.get_by_label("text").fill("charged twice")
        await form.get_by_label("priority").select_option(label="list of integer")
        await form.get_by_role("button", name="Add integer").click()
        await form.get_by_role("textbox", name="priority value 1").fill("high")
        await form.get_by_role("button", name="Call").click()
        await expect(form.locator(".wrong")).to_have_text("This is no whole number.")
        await form.get_by_role("textbox", name="priority value 1").fill("2")
        await form.get_by_role("button", name="Add integer").click()
        await form.get_by_role("textbox", name="priority value 2").fill("1")
        await form.get_by_role("button", name="Add integer").click()
        await form.get_by_role("button", name="Remove priority value 3").click()
        await form.get_by_label("limit").fill("1")
        await form.get_by_role("button", name="Call").click()
        given = '{"search":{"text":"charged twice","priority":[2,1]},"limit":1}'
        await expect(page.get_by_role("article").first).to_contain_text(given)
        await expect(page.get_by_role("article").first).to_contain_text("Charged twice")
        await page.get_by_role("button", name="computer").click()
        await form.get_by_label("action").select_option(label="screenshot")
        await form.get_by_role("button", name="Call").click()
        await expect(page.get_by_role("article").first.get_by_role("img")).to_be_visible()
        await page.get_by_role("button", name="read_ticket").click()
        await form.get_by_label("ticket_id").fill("9999")
        await form.get_by_role("button", name="Call").click()
        await expect(page.locator(".answer.bad")).to_contain_text("9999")
        await page.get_by_role("button", name="Give it back").click()
        await page.get_by_role("button", name="Get a new one").click()
        await page.get_by_role("button", name="read_ticket").click()
        await form.get_by_label("ticket_id").fill("103")
        await form.get_by_role("button", name="Call").click()
        await expect(page.get_by_role("article").first).to_contain_text('"assignee": null')
        assert watched.complaints == []


@pytest.mark.slow
async def test_a_newcomer_watches_opencode_work_on_the_demonstration(
    browser: Browser, state_dir: Path, tmp_path: Path
) -> None:
    home = home_beside(state_dir, tmp_path / "home")
    async with served(home, "--fleet-demo") as server, tab(browser, f"{server.url}/web/#/try") as watched:
        page = watched.page
        await page.get_by_role("button", name="ticket desk").click()
        await expect(page.get_by_text("The agent works on fleet:ticket-desk")).to_be_visible()
        await page.get_by_role("button", name="Run", exact=True).click()
        await expect(page.locator(".verdict.passed .reward")).to_have_text("1", timeout=240_000)
        await expect(page.locator(".transcript")).to_contain_text("env_resolve_ticket")
        assert watched.complaints == []


async def test_without_environments_the_page_says_how_to_get_some(browser: Browser, tmp_path: Path) -> None:
    async with (
        served(tmp_path / "home", environment={"FLEET_API_KEY": ""}) as server,
        tab(browser, f"{server.url}/web/#/environments") as watched,
    ):
        await expect(watched.page.get_by_text("--fleet-demo")).to_be_visible()
        await watched.page.goto(f"{server.url}/web/#/environments/nowhere")
        await expect(watched.page.get_by_role("alert")).to_contain_text("this server offers no 'nowhere'")
        await watched.page.goto(f"{server.url}/web/#/try")
        await expect(watched.page.get_by_role("button", name="paginate")).to_be_visible()
        await expect(watched.page.get_by_role("button", name="ticket desk")).to_have_count(0)


class Hostile:
    """Tools whose every word is an attack on the page."""

    async def list_tools(self) -> ListToolsAction:
        union = Union("first")
        strange: dict[str, Any] = {
            HOSTILE: {"type": "string", "description": HOSTILE, "default": HOSTILE},
            "choice": {"enum": [HOSTILE, {"a": HOSTILE}, 3]},
            "loop": {"$ref": "#/$defs/loop"},
            "proto": {"$ref": "#/$defs/__proto__"},
            "odd": None,
            "__proto__": {"type": "object", "properties": {"constructor": {"type": "string"}}},
            "deep": {"anyOf": [{"$ref": "#/$defs/deep"}, {"type": "array", "items": {"$ref": "#/$defs/deep"}}]},
        }
        schema = {
            "type": "object",
            "properties": strange,
            "$defs": {"loop": {"$ref": "#/$defs/loop"}, "deep": strange["deep"]},
        }
        union.add("here", [{"name": "attack", "description": HOSTILE, "inputSchema": schema}])
        tools = list(union.tools.values())
        return ListToolsAction(tools=[one.openai for one in tools], offered=tools)

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        blocks = [
            {"type": "text", "text": f"{HOSTILE}{arguments}"},
            {"type": "image", "mimeType": "image/svg+xml", "data": "PHN2Zy8+"},
            {"type": "image", "mimeType": "image/png", "data": '"><script>window.hacked=1</script>'},
        ]
        return ToolResult(tool=name, endpoint="here", content=blocks)


async def test_hostile_schemas_and_answers_are_shown_and_never_obeyed(browser: Browser, tmp_path: Path) -> None:
    async with (
        mcp_server(Hostile()) as url,
        served(tmp_path / "home", "--environment", f"bad=mcp:{url}", environment={"FLEET_API_KEY": ""}) as server,
        tab(browser, f"{server.url}/web/#/environments/bad") as watched,
    ):
        page = watched.page
        form = page.get_by_role("form")
        await expect(form).to_contain_text(HOSTILE)
        await form.get_by_label("choice").select_option(index=1)
        await form.get_by_label("constructor").fill("x")
        await form.get_by_role("button", name="Call").click()
        await expect(page.get_by_role("article")).to_contain_text(HOSTILE)
        await expect(page.get_by_role("article")).to_contain_text('"__proto__":{"constructor":"x"}')
        assert await page.get_by_role("article").get_by_role("img").count() == 0
        assert await page.evaluate("window.hacked") is None
        assert watched.complaints == []


class Endless(Hostile):
    """A tool whose few lines of schema ask for millions of fields."""

    async def list_tools(self) -> ListToolsAction:
        union = Union("first")
        knot = {"type": "object", "properties": {f"p{number}": {"$ref": "#/$defs/knot"} for number in range(40)}}
        union.add("here", [{"name": "endless", "inputSchema": {**knot, "$defs": {"knot": knot}}}])
        tools = list(union.tools.values())
        return ListToolsAction(tools=[one.openai for one in tools], offered=tools)


async def test_a_schema_that_asks_for_millions_of_fields_gets_a_form_all_the_same(
    browser: Browser, tmp_path: Path
) -> None:
    async with (
        mcp_server(Endless()) as url,
        served(tmp_path / "home", "--environment", f"bad=mcp:{url}", environment={"FLEET_API_KEY": ""}) as server,
        tab(browser, f"{server.url}/web/#/environments/bad") as watched,
    ):
        page = watched.page
        form = page.get_by_role("form")
        await expect(form.get_by_role("textbox")).to_have_count(40)
        await expect(form.locator("pre")).to_have_count(1)
        await form.locator(".field").last.get_by_text("its schema").click()
        await expect(form.locator(".field").last.locator("pre")).to_contain_text('"knot"')
        await form.get_by_label("p39").fill('{"p0": {"p1": 7}}')
        await form.get_by_role("button", name="Call").click()
        await expect(page.get_by_role("article").locator("small").first).to_have_text('{"p39":{"p0":{"p1":7}}}')
        assert watched.complaints == []


async def test_a_hostile_list_of_environments_is_shown_and_never_obeyed(browser: Browser, tmp_path: Path) -> None:
    names = [HOSTILE, "javascript:window.hacked=1//", "../../rollouts", "wide-" * 60, "__proto__"]
    known = {"name": HOSTILE, "default_version": HOSTILE, "versions": {}, "description": HOSTILE + "x" * 999}
    answer = [{"env_key": name, **known} for name in names]

    async def environments(_: Request) -> JSONResponse:
        return JSONResponse(answer)

    fleet = LoopbackListener(Starlette(routes=[Route("/v1/env/", environments)]))
    await fleet.start()
    given = {"FLEET_API_KEY": "k", "FLEET_BASE_URL": f"http://127.0.0.1:{fleet.port}"}
    try:
        async with (
            served(tmp_path / "home", environment=given) as server,
            tab(browser, f"{server.url}/web/#/environments", width=390, height=844) as watched,
        ):
            page = watched.page
            await expect(page.locator(".places b")).to_have_text([f"fleet:{name}" for name in names])
            await expect(page.locator(".places")).to_contain_text(HOSTILE)
            assert await page.locator("main img, main script").count() == 0
            assert await page.evaluate("document.documentElement.scrollWidth") <= 390
            for link in await page.locator(".places a").all():
                assert (await link.get_attribute("href") or "").startswith("#/environments/fleet%3A")
            await page.locator(".places a").first.click()
            await expect(page.locator("main h1")).to_contain_text(HOSTILE)
            await expect(page.get_by_role("alert")).to_be_visible()
            assert await page.evaluate("window.hacked") is None
            # That the server refuses to open such a thing is no fault of the page.
            assert [line for line in watched.complaints if "Failed to load resource" not in line] == []
    finally:
        await fleet.stop()


@pytest.mark.slow
async def test_a_caller_without_the_key_is_asked_for_it(browser: Browser, tmp_path: Path) -> None:
    key = "a-key-for-this-test"
    async with served(tmp_path / "home", "--fleet-demo", environment={"ROLLCAGE_SERVER_KEY": key}) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as nobody:
            assert (await nobody.get("/environments")).status_code == 401
        async with tab(browser, f"{server.url}/web/#/environments") as watched:
            await watched.page.get_by_label("API key").fill(key)
            await watched.page.get_by_role("button", name="Log in").click()
            await expect(watched.page.get_by_role("link", name="fleet:ticket-desk", exact=True)).to_be_visible()
