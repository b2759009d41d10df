"""Takes the pictures of the web page that the documentation shows: a real server, real rollouts, a real browser.

    .venv/bin/python scripts/screenshots.py [VIEW...]

VIEW: `compare`, `prompt` ...; all of them where none is named.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import anyio

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from web_examples import documents  # noqa: E402

from rollcage.settings import Settings  # noqa: E402
from support.browser import chromium, home_beside, tab  # noqa: E402
from support.served import served  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
SIZES = {"desktop": (1280, 860), "phone": (390, 844)}
VIEWS = (
    *("runs", "groups", "batches", "batch", "compare", "transcript", "prompt", "tokens", "commands", "files", "reward"),
    *("forks", "try", "environments", "tools"),
)
PARTS = {
    "transcript": ".message .diff",
    "prompt": ".seen .said",
    "forks": ".tree .node",
    "tokens": ".tokentext",
    "commands": ".commands details",
    "files": "details.file",
    "reward": ".checks li",
}
"""What each part of a rollout shows when it is there."""
BROKEN = {"instruction": "Install the tools.", "setup": ["pip install no-such-tool"], "task_id": "tools"}
DICE = [
    {
        "task_id": f"roll-{number}-or-less",
        "instruction": f"for n in 1 2; do test $(shuf -i 1-6 -n 1) -gt {number} || touch $n; done",
        "verify": ["test -e 1", "test -e 2"],
    }
    for number in range(1, 7)
]
"""What a batch is made of: each time they end otherwise."""


async def main() -> None:
    """Run the examples a few times, then look at everything in both sizes."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    state = Settings.from_environ().home
    for name in ("layers", "cache"):
        (state / name).mkdir(parents=True, exist_ok=True)
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
            for name in ("monday", "tuesday"):
                tasks = [*DICE, BROKEN]
                started = await client.start_batch(tasks, ["scripted"], agents=["shell", "nop"], n=6, name=name)
                await client.wait_batch(started.name)
            await client.start(**BROKEN, endpoint="scripted")  # type: ignore[arg-type]
            for rollout_id in ids:
                await client.wait(rollout_id)
            await _forked(server.home, ids[0])
            # One that is still at it.
            await client.start("sleep 600", agent="shell", endpoint="scripted", task_id="sleeper")
            async with chromium() as browser:
                for size, (width, height) in SIZES.items():
                    async with tab(browser, f"{server.url}/web/", width=width, height=height) as watched:
                        for view in sys.argv[1:] or VIEWS:
                            await _look(watched.page, server.url, view, ids[0])
                            await watched.page.screenshot(path=PICTURES / f"{view}-{size}.png")


async def _forked(home: Path, rollout_id: str) -> None:
    """Two continuations from the second turn of a rollout, one from the fourth."""
    for turn, n in ((2, 2), (4, 1)):
        command = [sys.executable, "-m", "rollcage", "fork", rollout_id, "--at", str(turn), "-n", str(n)]
        environment = {**os.environ, "ROLLCAGE_HOME": str(home)}
        await anyio.run_process([*command, "-m", "scripted"], env=environment, stdout=None)


async def _look(page: object, url: str, view: str, rollout_id: str) -> None:
    """Go to a view, and wait for what it shows."""
    from playwright.async_api import Page

    assert isinstance(page, Page)
    address, shown = {
        "runs": ("", ".row"),
        "groups": ("?group=1", ".row.group"),
        "batches": ("batches", ".sheet tbody tr"),
        "batch": ("batches/tuesday", ".line .cell"),
        "compare": ("compare/monday/tuesday", ".verdictline"),
        "try": ("try", ".examples button[aria-pressed=true]"),
        "environments": ("environments", ".places li"),
        "tools": ("environments/fleet%3Aticket-desk", ".workbench form"),
    }.get(view, (f"rollouts/{rollout_id}/{view}", PARTS.get(view, "")))
    await page.goto(f"{url}/web/#/{address}")
    await page.locator(shown).first.wait_for()
    if view == "tools":
        await page.get_by_role("button", name="search_tickets").click()
        await page.get_by_label("text").fill("charged twice")
        await page.get_by_role("button", name="Call").click()
        await page.get_by_role("article").first.wait_for()
        await page.evaluate("scrollTo(0, 0)")
    # Nothing that comes is waited for; this is for what fades.
    await page.wait_for_timeout(500)


if __name__ == "__main__":
    anyio.run(main)
