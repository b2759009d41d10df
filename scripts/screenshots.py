"""Takes the pictures of the web page that the documentation shows: a real server, real rollouts, a real browser."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import anyio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from web_examples import documents  # noqa: E402

from browser import chromium, home_beside, tab  # noqa: E402
from rollcage.settings import Settings  # noqa: E402
from served import served  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
VIEWS = ("runs", "groups", "transcript", "tokens", "commands", "files", "reward", "try", "environments", "tools")
BROKEN = {"instruction": "Install the tools.", "setup": ["pip install no-such-tool"], "task_id": "tools"}


async def main() -> None:
    """Run the examples a few times, then look at everything in both sizes."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    state = Settings.from_environ({}).home
    with tempfile.TemporaryDirectory() as folder:
        async with (
            served(home_beside(state, Path(folder) / "home"), "--fleet-demo") as server,
            server.client() as client,
        ):
            ids = []
            for example in documents():
                body = dict(example["request"])  # type: ignore[call-overload]
                for _ in range(3):
                    ids.append((await client.start(**body, endpoint="scripted")).rollout_id)
            await client.start(**BROKEN, endpoint="scripted")  # type: ignore[arg-type]
            for rollout_id in ids:
                await client.wait(rollout_id)
            async with chromium() as browser:
                for size, (width, height) in SIZES.items():
                    async with tab(browser, f"{server.url}/web/", width=width, height=height) as watched:
                        for view in VIEWS:
                            await _look(watched.page, server.url, view, ids[0])
                            await watched.page.screenshot(path=PICTURES / f"{view}-{size}.png")


async def _look(page: object, url: str, view: str, rollout_id: str) -> None:
    from playwright.async_api import Page

    assert isinstance(page, Page)
    if view == "runs":
        await page.goto(f"{url}/web/#/")
        await page.get_by_label("Group by task").uncheck()
    elif view == "groups":
        await page.get_by_label("Group by task").check()
    elif view in ("try", "environments"):
        await page.goto(f"{url}/web/#/{view}")
    elif view == "tools":
        await page.goto(f"{url}/web/#/environments/fleet%3Aticket-desk")
        await page.wait_for_timeout(2000)
    else:
        await page.goto(f"{url}/web/#/rollouts/{rollout_id}/{view}")
    await page.wait_for_timeout(900)


if __name__ == "__main__":
    anyio.run(main)
