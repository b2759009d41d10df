"""A server of OpenCode's that an agent has taken over: whatever it says, the rollout goes on and nothing piles up."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from rollcage.agents.base import AgentExit
from rollcage.agents.opencode.http import (
    EVENT_COST,
    MAX_EVENT,
    MAX_STREAM,
    SKIPPED,
    STREAM_LIMIT,
    Channel,
    ServerGone,
    object_in,
)
from rollcage.agents.opencode.listener import MAX_ERROR, MAX_HELD, Listener
from rollcage.agents.opencode.serve import PORT, Server, ServeSession
from rollcage.events import AgentEmitted, Event
from rollcage.sandboxes.base import Process
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec

SESSION = "ses_1"


async def nobody(event: Event) -> None:
    """Hears it."""


def updated(part: Any) -> dict[str, Any]:
    return {"type": "message.part.updated", "properties": {"sessionID": SESSION, "part": part}}


@pytest.mark.parametrize(
    "part",
    [
        {"id": "p", "type": "text", "text": 5, "messageID": {"a": 1}},
        {"id": "p", "type": "text", "time": {"end": 1}, "messageID": [1]},
        {"id": ["p"], "type": ["text"], "state": "x", "time": 3},
        {"id": "p", "type": "tool", "state": {"status": ["running"]}},
    ],
)
async def test_parts_of_odd_shapes_are_taken(part: dict[str, Any]) -> None:
    listener = Listener(SESSION, nobody, 1 << 20)
    await listener.hear(updated(part))
    await listener.settle([{"info": part, "parts": [part, 7]}, 7])
    await listener.hear({"type": "session.idle", "properties": {"sessionID": SESSION}})
    assert listener.idle.is_set()


@pytest.mark.parametrize("depth", range(900, 1000, 10))
async def test_what_can_be_read_but_is_nested_too_deep_to_be_written_is_left_out(depth: int) -> None:
    listener = Listener(SESSION, nobody, 1 << 20)
    deep = b'{"id": "p", "type": "step-start", "x": ' + b"[" * depth + b"]" * depth + b"}"
    for _ in range(2):
        if event := object_in(
            b'{"type": "message.part.updated", "properties": {"sessionID": "ses_1", "part": ' + deep + b"}}"
        ):
            await listener.hear(event)
            await listener.settle([{"parts": [event["properties"]["part"]]}])


async def test_unfinished_parts_that_say_nothing_but_are_large_are_not_held() -> None:
    listener = Listener(SESSION, nobody, 1 << 20)
    for number in range(MAX_HELD):
        await listener.hear(updated({"id": str(number), "type": "text", "text": "", "bulk": "x" * (1 << 20)}))
    assert not listener._texts


async def test_an_endless_error_is_cut() -> None:
    listener = Listener(SESSION, nobody, 1 << 20)
    await listener.hear({"type": "session.error", "properties": {"sessionID": SESSION, "error": "x" * 100_000}})
    assert listener.error is not None
    assert len(listener.error) == MAX_ERROR


class Drip:
    """A process with this output."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self.stdin = self.stdout = self

    async def send(self, data: bytes) -> None:
        """Never mind."""

    async def receive(self) -> bytes:
        try:
            return next(self._chunks)
        except StopIteration:
            raise anyio.EndOfStream from None

    async def wait(self) -> int:
        return 0


async def heard(*chunks: bytes) -> list[dict[str, Any]]:
    """The events that are read of a stream."""
    channel = Channel(cast("Process", Drip(iter((b"HTTP/1.1 200 OK\r\n\r\n", *chunks)))), "password")
    events = []
    with pytest.raises(ServerGone, match="closed the connection"):
        async for event in channel.events("/event"):
            events.append(event)
    return events


SMALL = b'data: {"type": "small"}\n\n'


@pytest.mark.parametrize("end", [b"\n\n", b"\n"])
async def test_an_event_that_is_too_large_is_skipped_and_told_once(end: bytes) -> None:
    large = [b'data: "', *[b"x" * (1 << 20)] * 10, b'"' + end, b"\n\n"[: 2 - len(end)]]
    events = await heard(SMALL, *large, SMALL, b'data: "' + b"x" * MAX_EVENT + b'"\n\n' + SMALL, *large)
    small = {"type": "small"}
    assert [event for event in events if event != {"type": SKIPPED}] == [small] * 3
    assert events.count({"type": SKIPPED}) == 1


async def test_a_stream_is_read_up_to_a_limit_whoever_its_events_are_of() -> None:
    other = b'data: {"type": "x", "properties": {"sessionID": "other", "x": "' + b"x" * (3 << 20) + b'"}}\n\n'
    count = MAX_STREAM // (3 << 20) + 1
    events = await heard(*[other] * (count + 20), SMALL)
    assert [event["type"] for event in events] == ["x"] * count + [STREAM_LIMIT]


async def test_many_small_events_count_for_more_than_their_size() -> None:
    events = await heard(*[b"data: {}\n\n" * 1000] * (MAX_STREAM // EVENT_COST // 1000 + 1))
    assert len(events) <= MAX_STREAM // EVENT_COST + 1 and events[-1] == {"type": STREAM_LIMIT}


async def test_nothing_of_what_was_logged_is_kept_as_it_was() -> None:
    listener = Listener(SESSION, nobody, 64 << 20)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(20):
        await listener.hear(updated({"id": str(number), "type": "step-start", "x": [[[]] for _ in range(10_000)]}))
    gc.collect()
    assert len(gc.get_objects()) < before + 20_000


HOSTILE = r"""
import http.server, json, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(json.dumps({"id": "ses_1"}).encode())
    def do_GET(self):
        if self.path.startswith("/event"):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'data: {"type": "server.connected"}\n\n')
            for _ in range(100):
                self.wfile.write(b'data: {"type": "bomb", "x": "' + b"x" * (3 << 20) + b'"}\n\n')
            time.sleep(1000)
        elif self.path.startswith("/session/status"):
            self.answer(b"{}")
        else:
            self.answer(b"[" + b"[]," * (4 << 20) + b"[]]")
    protocol_version = "HTTP/1.1"
    def log_message(self, *said): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("ready", flush=True)
server.serve_forever()
"""


async def test_a_server_that_says_too_much_does_not_keep_the_work_from_being_judged(state_dir: Path) -> None:
    said: list[Event] = []

    async def emit(event: Event) -> None:
        said.append(event)

    async with LocalProvider(state_dir) as local, local.open(SandboxSpec()) as box:
        await box.write(f"{HOME}/server.py", HOSTILE.encode())
        async with box.spawn(["python3", f"{HOME}/server.py", str(PORT)]) as process:
            await process.stdout.receive()
            drive = ServeSession(Server(box, "password"), f"{HOME}/workdir", emit, limit=64 << 20)
            assert await drive.solve({}, {}) == AgentExit(code=0, error=None)
    notes = [event.event.text for event in said if isinstance(event, AgentEmitted) and event.event.type == "note"]
    assert [note.partition(";")[0] for note in notes] == [
        "more than 256 MB of events",
        "the session's messages come to more than 8 MB",
    ]
