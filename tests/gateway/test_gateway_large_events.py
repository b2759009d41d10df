"""Events of many megabytes, in small pieces: what it costs to pass them on grows with their length and no faster."""

from __future__ import annotations

import asyncio
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.gateway import hold
from rollcage.gateway.hold import LARGE, HeldEnd
from rollcage.gateway.wires.chat import UsageFilter
from support.hand_made import ROLE, Asked, chat, chunked, hand_made, head, rig, text_event, until

COUNT = b'data: {"choices":[],"usage":{"total_tokens":3}}'


class Pieces(bytes):
    """Bytes that count how many of them were copied by joining or adding."""

    copied = 0

    def __radd__(self, other: bytes) -> bytes:
        Pieces.copied += len(other) + len(self)
        return bytes(other) + bytes(self)


@pytest.mark.parametrize("made", [UsageFilter, HeldEnd])
def test_a_large_event_is_not_copied_again_with_every_piece(made: type[UsageFilter] | type[HeldEnd]) -> None:
    sift, size, count = made(), 1000, 4000
    Pieces.copied = 0
    sift.feed(b'data: {"choices":[{"delta":{"content":"')
    out, waiting = 0, 0
    for n in range(1, count + 1):
        out += len(sift.feed(Pieces(b"x" * size)))
        waiting = max(waiting, n * size - out)
    out += len(sift.feed(b'"}}]}\n\n'))
    assert out > size * count
    assert waiting < LARGE
    assert Pieces.copied < 2 * size * count


CALL = b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}}]}'


def test_a_large_tool_call_leaves_but_for_its_end() -> None:
    held, long = HeldEnd(), b"x" * LARGE
    start = b'data: {"choices":[{"delta":{"content":"' + long + long
    end = b'","tool_calls":[{"index":0,"function":{"name":"f","arguments":"{}"}}]}}]}\n\n'
    assert held.feed(start) == start
    assert held.feed(end + b"data: [DONE]\n\n") == b""
    assert held.holding and held.done
    assert held.end() == end + b"data: [DONE]\n\n"


def test_a_large_line_that_has_ended_waits_for_the_end_of_its_event() -> None:
    held, long = HeldEnd(), b"x" * LARGE
    start = b'data: {"choices":[{"delta":{"content":"' + long
    assert held.feed(start) == start
    assert held.feed(b'"}}]}\n') == b""
    assert held.feed(b"\ndata: [DONE]\n\n") == b'"}}]}\n\n'
    assert held.holding and held.done


events = st.lists(
    st.sampled_from((b'data: {"choices":[{"delta":{}}]}', COUNT, b": ping", b'data: {"choices": [], "error": 1}')),
    min_size=1,
    max_size=6,
)


cuts = st.integers(1, 40)


@given(events, st.sampled_from((b"\n\n", b"\r\n\r\n")), st.integers(1, 40))
def test_the_count_is_taken_out_however_the_stream_is_cut(parts: list[bytes], gap: bytes, size: int) -> None:
    stream = b"".join(part + gap for part in parts)
    sift, out = UsageFilter(), b""
    for at in range(0, len(stream), size):
        out += sift.feed(stream[at : at + size])
    out += sift.end()
    assert out == b"".join(part + gap for part in parts if part != COUNT)


@given(st.lists(st.sampled_from((b": ping", CALL, b'data: {"choices":[{"delta":{"content":"tool_calls"}}]}'))), cuts)
def test_what_may_be_acted_on_is_kept_back_however_early_the_front_leaves(parts: list[bytes], size: int) -> None:
    stream = b"".join(part + b"\n\n" for part in parts)
    with patch.object(hold, "LARGE", 30):
        held, out = HeldEnd(), b""
        for at in range(0, len(stream), size):
            out += held.feed(stream[at : at + size])
    assert out + held.end() == stream
    assert held.holding == (CALL in parts)
    if CALL in parts:
        assert b"\n" not in out[stream.index(CALL) :]


@given(events, st.sampled_from((b"\n\n", b"\r\n\r\n", b"\r\r")), st.integers(1, 40))
def test_what_is_harmless_passes_whole_however_it_is_cut(parts: list[bytes], gap: bytes, size: int) -> None:
    stream = b"".join(part + gap for part in parts)
    held, out = HeldEnd(), b""
    for at in range(0, len(stream), size):
        out += held.feed(stream[at : at + size])
    assert not held.holding
    assert out + held.end() == stream
    assert len(out) > len(stream) - 4


async def test_a_large_event_reaches_the_agent_before_the_model_has_ended_it() -> None:
    seen = asyncio.Event()
    long = "word " * (LARGE // 2)
    large = text_event(long)

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + chunked(ROLE) + chunked(large[: 2 * LARGE]))
        await writer.drain()
        await seen.wait()
        for each in (large[2 * LARGE :], text_event("", "stop"), b"data: [DONE]\n\n"):
            writer.write(chunked(each))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with hand_made(answer) as model, rig(model.endpoint()) as box, box.connect() as client:
        client.writer.write(box.request(chat()))
        assert (await client.head())[0] == 200
        out = b""
        while len(out) < LARGE:
            out += await client.chunk()
        seen.set()
        while piece := await client.chunk():
            out += piece
        assert out == ROLE + large + text_event("", "stop") + b"data: [DONE]\n\n"
        await until(lambda: box.recorded)
        assert box.recorded[0].message["content"] == long
