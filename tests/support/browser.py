"""A real headless Chromium for the tests of the web page, and logs for it to look at."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from playwright.async_api import Browser, Page, async_playwright, expect

from rollcage.evaluation.batches import BatchPlan, TaskRef
from rollcage.events import Ended, Event, Queued, Scored, TurnEnded
from rollcage.store import Store
from rollcage.store.batches import add_to_batch
from rollcage.types import Blame, Endpoint, Job, Outcome, Reward, Task, Turn

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")

# On a busy machine a page takes its time.
expect.set_options(timeout=120_000)

_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser, until the end of the block."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        try:
            yield browser
        finally:
            await browser.close()


class Watched:
    """A tab, with everything it complained about and asked for."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda line: self.complaints.append(line.text) if line.type == "error" else None)
        page.on("request", lambda request: self.asked.append(request.url))


@asynccontextmanager
async def tab(browser: Browser, url: str, *, width: int = 1280, height: int = 860) -> AsyncIterator[Watched]:
    """A tab that shows the page at `url`."""
    page = await browser.new_page(viewport={"width": width, "height": height})
    page.set_default_timeout(120_000)
    watched = Watched(page)
    try:
        await page.goto(url)
        yield watched
    finally:
        await page.close()


def home_beside(state_dir: Path, home: Path) -> Path:
    """A home with a log of its own, and the machine's prebaked layers."""
    home.mkdir(parents=True, exist_ok=True)
    for name in ("layers", "cache"):
        (home / name).symlink_to(state_dir / name)
    return home


async def write_logs(home: Path, logs: Iterable[tuple[str, list[Event]]]) -> None:
    """Put made-up rollouts into the log of a home, before a server opens it."""
    async with Store.open(home / "rollouts.db") as store:
        limiter = anyio.CapacityLimiter(64)

        async def write(name: str, events: list[Event]) -> None:
            async with limiter:
                for event in events:
                    await store.append(name, event)

        async with anyio.create_task_group() as tasks:
            for name, events in logs:
                tasks.start_soon(write, name, events)


def ended_rollout(task_id: str, reward: float | None, instruction: str = "Do it.") -> list[Event]:
    """A rollout of which only the beginning and the end are known."""
    job = Job(task=Task(id=task_id, instruction=instruction), model=Endpoint(base_url="http://h/v1", model="m"))
    scored: list[Event] = [] if reward is None else [Scored(reward=Reward(total=reward))]
    outcome = Outcome.SETUP_FAILED if reward is None else Outcome.FINISHED
    error = "setup_failed: it broke" if reward is None else None
    blame = Blame.TASK if reward is None else None
    return [Queued(job=job), *scored, Ended(outcome=outcome, error=error, blame=blame)]


async def write_batch(home: Path, name: str, cells: dict[tuple[str, str], list[float | None]], tokens: int = 0) -> None:
    """A made-up batch that is over: by task and model, the reward of each sample; None: its setup broke."""
    tasks = tuple(TaskRef(id=task, digest="d") for task in dict.fromkeys(task for task, _ in cells))
    models = tuple(dict.fromkeys(model for _, model in cells))
    plan = BatchPlan(name=name, models=models, tasks=tasks, n=max(map(len, cells.values())))
    logs: list[tuple[str, list[Event]]] = []
    for number, cell in enumerate(plan.cells()):
        rewards = cells.get((cell.task.id, cell.model), [])
        if cell.sample > len(rewards):
            continue
        first, *rest = ended_rollout(cell.task.id, rewards[cell.sample - 1])
        assert isinstance(first, Queued)
        job = first.job.model_copy(update={"model": Endpoint(base_url="http://h/v1", model=cell.model)})
        placed = first.model_copy(update={"job": job, "batch": cell.place(name, "opencode", 1)})
        usage = {"completion_tokens": tokens, "prompt_tokens": 2 * tokens}
        turns: list[Event] = [TurnEnded(turn=Turn(index=0, request={}, usage=usage))] if tokens else []
        logs.append((f"{name}-{number:05}", [placed, *turns, *rest]))
    async with Store.open(home / "rollouts.db") as store:
        await add_to_batch(store, name, "planned", plan.model_dump(mode="json"))
        await add_to_batch(store, name, "began")
        await add_to_batch(store, name, "done")
    await write_logs(home, logs)
