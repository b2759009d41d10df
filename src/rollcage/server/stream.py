"""A rollout's events as a stream of server-sent events: resumable, with heartbeats, and with an end.

`event: entry` has the entry's seq as its `id`, so that `Last-Event-ID` resumes after it; `event: delta` (on request)
is what a running turn says, and is kept nowhere; `event: end` is the last.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import anyio
from anyio.abc import TaskGroup
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rollcage.errors import RollcageError
from rollcage.events import AgentStarted, Ended
from rollcage.gateway.live import Delta
from rollcage.schema.writing import on_one_line
from rollcage.server.feeds import FeedLine
from rollcage.types import Stage

HEARTBEAT_S = 15.0
"""A comment is sent when nothing else was for this long, so that nobody in between takes the stream for dead."""

Live = Callable[[], Awaitable[AsyncIterator[Delta]]]
"""Opens what a running turn says."""
Pages = AsyncGenerator[list[FeedLine], None]
Put = Callable[[bytes], Awaitable[None]]


class _EventStream(Response):
    """Answers with server-sent events until `_tell` returns, or until whoever reads them goes away."""

    media_type = "text/event-stream"
    heartbeat_s = HEARTBEAT_S

    def __init__(self) -> None:
        super().__init__(headers={"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"})
        # It has no length: it goes on as long as there is something to tell.
        del self.headers["content-length"]
        self._sending = anyio.Lock()
        self._sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speak ASGI."""
        async with anyio.create_task_group() as tasks:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

            async def put(data: bytes) -> None:
                async with self._sending:
                    self._sent += 1
                    await send({"type": "http.response.body", "body": data, "more_body": True})

            async def until_gone() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                tasks.cancel_scope.cancel()

            tasks.start_soon(until_gone)
            tasks.start_soon(self._beat, put)
            await put(b"retry: 1000\n\n")
            try:
                await self._tell(put, tasks)
            except RollcageError as error:
                await put(frame("error", json.dumps({"error": str(error), "error_code": "store"}).encode()))
            async with self._sending:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            tasks.cancel_scope.cancel()

    async def _tell(self, put: Put, tasks: TaskGroup) -> None:
        raise NotImplementedError

    async def _beat(self, put: Put) -> None:
        while True:
            before = self._sent
            await anyio.sleep(self.heartbeat_s)
            if self._sent == before:
                await put(b":\n\n")


class Frames(_EventStream):
    """A stream of frames that somebody else makes; an empty one is not sent."""

    def __init__(self, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        self._frames = frames

    async def _tell(self, put: Put, tasks: TaskGroup) -> None:
        async with aclosing(self._frames):
            async for data in self._frames:
                if data:
                    await put(data)


class EventStream(_EventStream):
    """A rollout's entries; with `live`, also what its model says while its agent runs."""

    def __init__(self, pages: Pages, *, live: Live | None = None, stage: Stage | None = None) -> None:
        super().__init__()
        self._pages, self._live = pages, live
        self._agent_runs = stage is Stage.AGENT

    async def _tell(self, put: Put, tasks: TaskGroup) -> None:
        async with aclosing(self._pages):
            if self._agent_runs and self._live:
                tasks.start_soon(self._hear, put, self._live)
            async for lines in self._pages:
                frames = [frame("entry", line.json, seq=line.entry.seq) for line in lines]
                if isinstance(ended := lines[-1].entry.event, Ended):
                    end = {"rollout_id": lines[-1].entry.rollout_id, "outcome": ended.outcome.value}
                    frames.append(frame("end", json.dumps(end).encode()))
                await put(b"".join(frames))
                begins = any(isinstance(line.entry.event, AgentStarted) for line in lines)
                if self._live and begins and not self._agent_runs:
                    self._agent_runs = True
                    tasks.start_soon(self._hear, put, self._live)

    async def _hear(self, put: Put, live: Live) -> None:
        async for delta in await live():
            await put(frame("delta", on_one_line(delta.model_dump_json(exclude_defaults=True).encode())))


def frame(event: str, data: bytes, *, seq: int | None = None) -> bytes:
    """One server-sent event; `data` is JSON on one line."""
    named = b"" if seq is None else b"id: %d\n" % seq
    return b"%sevent: %s\ndata: %s\n\n" % (named, event.encode(), data)
