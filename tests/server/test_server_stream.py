"""Streams and feeds without a server: followers that lag, streams that are silent, readers that go away."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import anyio
from starlette.types import Message

from rollcage.agent_events import AgentSession, AgentText
from rollcage.errors import StoreError
from rollcage.events import AgentEmitted, Ended, Queued
from rollcage.server.feeds import KEPT, FeedLine, Feeds
from rollcage.server.stream import EventStream, Frames
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Outcome, Task

JOB = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://x/v1", model="m"))


async def test_a_follower_that_lags_far_behind_gets_everything_in_order_and_once(store: Store) -> None:
    await store.append("r", Queued(job=JOB))
    async with anyio.create_task_group() as tasks:
        feeds = Feeds(store, tasks)
        quick: list[int] = []
        slow: list[int] = []
        written = anyio.Event()

        async def hurry() -> None:
            async with aclosing(feeds.follow("r")) as pages:
                async for page in pages:
                    quick.extend(line.entry.seq for line in page)

        async def dawdle() -> None:
            async with aclosing(feeds.follow("r")) as pages:
                async for page in pages:
                    slow.extend(line.entry.seq for line in page)
                    await written.wait()

        tasks.start_soon(hurry)
        tasks.start_soon(dawdle)
        async with anyio.create_task_group() as some:
            for number in range(KEPT * 2):
                some.start_soon(store.append, "r", AgentEmitted(raw={"n": number}))
        assert feeds.followers == 2
        await store.append("r", Ended(outcome=Outcome.FINISHED))
        written.set()
    assert quick == slow == list(range(1, KEPT * 2 + 3))
    assert feeds.followers == 0


async def test_a_follower_that_leaves_ends_the_reading_behind_it(store: Store) -> None:
    await store.append("r", Queued(job=JOB))
    # A feed that went on reading would keep this block from ending: the rollout never does.
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            feeds = Feeds(store, tasks)
            for _ in range(3):
                async with aclosing(feeds.follow("r")) as pages:
                    assert [line.entry.seq for line in await anext(pages)] == [1]


async def test_an_id_beyond_the_newest_entry_means_the_newest(store: Store) -> None:
    await store.append("r", Queued(job=JOB))
    with anyio.fail_after(120):
        async with anyio.create_task_group() as tasks:
            feeds = Feeds(store, tasks)
            seen: list[int] = []

            async def follow() -> None:
                async with aclosing(feeds.follow("r", after=1000)) as pages:
                    async for page in pages:
                        seen.extend(line.entry.seq for line in page)

            tasks.start_soon(follow)
            while not feeds.followers:
                await anyio.sleep(0.01)
            await store.append("r", AgentEmitted(raw={}))
            await store.append("r", Ended(outcome=Outcome.FINISHED))
    assert seen == [2, 3]


class Reader:
    """Reads a response over ASGI, and goes away when told to."""

    def __init__(self) -> None:
        self.body = b""
        self.over = False
        self.leave = anyio.Event()
        self.news = anyio.Event()

    async def receive(self) -> Message:
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.body += message.get("body", b"")
        self.over = message["type"] == "http.response.body" and not message["more_body"]
        self.news.set()
        self.news = anyio.Event()

    async def until(self, words: bytes) -> None:
        with anyio.fail_after(120):
            while words not in self.body:
                await self.news.wait()


async def test_a_silent_stream_has_a_heartbeat_and_ends_with_its_reader() -> None:
    closed = anyio.Event()

    async def silence() -> AsyncGenerator[bytes, None]:
        try:
            yield b""
            await anyio.sleep_forever()
        finally:
            closed.set()

    reader, stream = Reader(), Frames(silence())
    stream.heartbeat_s = 0.01
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stream, {"type": "http"}, reader.receive, reader.send)
        await reader.until(b":\n\n:\n\n:\n\n")
        reader.leave.set()
    assert closed.is_set()
    assert not reader.over


async def test_a_log_that_breaks_is_told_and_ends_the_stream() -> None:
    async def broken() -> AsyncGenerator[list[FeedLine], None]:
        raise StoreError("the disk is gone")
        yield []

    reader = Reader()
    await EventStream(broken())({"type": "http"}, reader.receive, reader.send)
    assert b"event: error" in reader.body
    assert b"the disk is gone" in reader.body
    assert reader.over


async def test_a_rollout_s_row_tells_its_caller_session_and_key(tmp_path: Path) -> None:
    async with Store.open(tmp_path / "log.db") as store:
        await store.append("r", Queued(job=JOB, caller="alice", idempotency_key="k", resumable=True))
        await store.append("r", AgentEmitted(event=AgentSession(session="ses_1")))
        await store.append("r", AgentEmitted(event=AgentText(session="ses_of_a_subagent", text="x")))
        row = await store.summary("r")
        assert (row.caller, row.session, row.resumable) == ("alice", "ses_1", True)
        assert await store.started("alice", "k") == "r"
        assert await store.started("bob", "k") is None
        await store.rebuild()
        assert await store.summary("r") == row
        kinds = [entry.event.kind for entry in await store.read("r", kinds=("agent_event", "ended"))]
        assert kinds == ["agent_event", "agent_event"]
