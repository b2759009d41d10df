"""A server of OpenCode's that an agent has taken over: whatever it says, the rollout goes on and nothing piles up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from rollcage.agents.opencode_http import Channel, ServerGone, event_of
from rollcage.agents.opencode_listener import MAX_ERROR, MAX_HELD, Listener
from rollcage.events import Event
from rollcage.sandboxes.base import Process

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
        if event := event_of(
            b'data: {"type": "message.part.updated", "properties": {"sessionID": "ses_1", "part": ' + deep + b"}}"
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
        return next(self._chunks)

    async def wait(self) -> int:
        return 0


async def test_an_event_without_an_end_is_refused() -> None:
    def endless() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        while True:
            yield b"x" * (1 << 20)

    channel = Channel(cast("Process", Drip(endless())), "password")
    with pytest.raises(ServerGone, match="an event of more than"):
        await anext(channel.events("/event"))
