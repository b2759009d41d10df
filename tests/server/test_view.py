"""`rollcage view` and `rollcage bundle`: the page read-only on a log, and as files that no server serves."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, expect

from rollcage.server.viewing import as_data
from support.browser import ended_rollout, needs_chromium, tab, write_batch, write_logs

pytestmark = pytest.mark.anyio


@contextmanager
def viewed(*arguments: str) -> Iterator[str]:
    """The address at which `rollcage view` shows something."""
    command = ["setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "rollcage", "view", *arguments, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()
            assert process.wait(60) == 0


def bundled(home: Path, target: Path, *names: str) -> None:
    command = [sys.executable, "-m", "rollcage", "bundle", *names, "-o", str(target)]
    subprocess.run(command, check=True, env={"ROLLCAGE_HOME": str(home), "PATH": "/usr/bin:/bin"})


CELLS: dict[tuple[str, str], list[float | None]] = {("a task", "m/x"): [1.0, 0.0], ("b", "m/x"): [None, 1.0]}


@needs_chromium
async def test_a_log_is_shown_and_nothing_in_it_can_be_changed(browser: Browser, tmp_path: Path) -> None:
    home = tmp_path / "home"
    await write_batch(home, "monday", CELLS, tokens=3)
    open_one = ended_rollout("runs", 1.0)[:1]
    await write_logs(home, [("open", open_one)])
    with viewed(str(home)) as url:
        async with tab(browser, f"{url}/web/") as watched:
            page = watched.page
            await expect(page.locator(".found")).to_have_text("5 rollouts")
            await expect(page.get_by_role("link", name="Try")).to_have_count(0)
            await write_logs(home, [("late", ended_rollout("late", 1.0))])
            await expect(page.locator(".row b").first).to_have_text("late")
            await page.goto(f"{url}/web/#/rollouts/open")
            await expect(page.locator(".rollout h1")).to_have_text("runs")
            # Its process is gone; whoever only looks does not end it.
            await expect(page.locator(".verdict .outcome")).to_have_text("queued")
            await expect(page.get_by_role("button", name="Abort")).to_have_count(0)
            await page.goto(f"{url}/web/#/batches/monday")
            await expect(page.locator(".line .cell")).to_have_count(2)
            assert watched.complaints == []
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            assert (await http.post("/rollouts", json={"instruction": "x"})).status_code == 405
            assert (await http.delete("/rollouts/open")).status_code == 405
            assert (await http.post("/batches/monday/cancel")).status_code == 404
            assert (await http.get("/web/", headers={"Host": "evil.example"})).status_code == 403


@needs_chromium
async def test_a_bundle_opens_as_a_file_in_a_browser_without_any_server(browser: Browser, tmp_path: Path) -> None:
    home, folder, target = tmp_path / "home", tmp_path / "copy", tmp_path / "x.zip"
    await write_batch(home, "monday", CELLS, tokens=3)
    await write_batch(home, "tuesday", {**CELLS, ("b", "m/x"): [0.0, 0.0]}, tokens=3)
    await write_logs(home, [("left out", ended_rollout("other", 1.0))])
    bundled(home, target, "monday", "tuesday")
    with zipfile.ZipFile(target) as archive:
        archive.extractall(folder)
    async with tab(browser, f"file://{folder}/index.html") as watched:
        page = watched.page
        await expect(page.locator(".found")).to_have_text("8 rollouts")
        await expect(page.locator(".link")).to_contain_text("A copy")
        await page.get_by_role("link", name="Batches").click()
        await page.get_by_role("link", name="monday").click()
        await page.get_by_label("a task, m/x: mean 0.50").click()
        await expect(page.locator(".row b")).to_have_text(["a task", "a task"])
        await page.locator(".row a").first.click()
        await expect(page.locator(".rollout h1")).to_have_text("a task")
        await page.get_by_role("link", name="Prompts").click()
        await expect(page.get_by_text("The request of this turn was not kept.")).to_be_visible()
        await page.get_by_role("link", name="Merge").click()
        await expect(page.locator(".mergeview")).to_be_visible()
        await page.goto(f"file://{folder}/index.html#/compare/monday/tuesday")
        await expect(page.locator(".compare h1")).to_have_text("tuesday against monday")
        await page.goto(f"file://{folder}/index.html#/rollouts/left%20out")
        await expect(page.get_by_text("This is not part of the copy.")).to_be_visible()
        assert {url.split(":")[0] for url in watched.asked} <= {"file", "data"}
        assert [
            each for each in watched.complaints if "left_20_out" not in each and "ERR_FILE_NOT_FOUND" not in each
        ] == []
    with viewed(str(target)) as url:
        async with tab(browser, f"{url}/web/") as watched:
            await expect(watched.page.locator(".found")).to_have_text("8 rollouts")
            assert watched.complaints == []


def test_the_scripts_of_a_foreign_bundle_are_read_as_data() -> None:
    assert as_data(b'rollcagePut("/a", {"b": 1});\n') == b'rollcagePut("/a",{"b": 1});\n'
    for evil in (
        b"alert(1)",
        b'rollcagePut("/a", 1);alert(1);',
        b'rollcagePut("/a", alert(1));',
        b"",
        b"rollcagePut();",
    ):
        assert as_data(evil) is None, evil


def test_what_is_no_log_and_no_bundle_is_said(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for name, code in (("nothing", 2), ("text", 3)):
        command = [sys.executable, "-m", "rollcage", "view", str(tmp_path / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert done.returncode == code and name in done.stderr, done.stderr
