"""Events of many megabytes, in small pieces: what it costs to pass them on grows with their length and no faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.gateway.hold import HeldEnd
from rollcage.gateway.wires.chat import UsageFilter

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
    for _ in range(count):
        assert sift.feed(Pieces(b"x" * size)) == b""
    out = sift.feed(b'"}}]}\n\n')
    assert len(out) > size * count
    assert Pieces.copied < 2 * size * count


events = st.lists(
    st.sampled_from((b'data: {"choices":[{"delta":{}}]}', COUNT, b": ping", b'data: {"choices": [], "error": 1}')),
    min_size=1,
    max_size=6,
)


@given(events, st.sampled_from((b"\n\n", b"\r\n\r\n")), st.integers(1, 40))
def test_the_count_is_taken_out_however_the_stream_is_cut(parts: list[bytes], gap: bytes, size: int) -> None:
    stream = b"".join(part + gap for part in parts)
    sift, out = UsageFilter(), b""
    for at in range(0, len(stream), size):
        out += sift.feed(stream[at : at + size])
    out += sift.end()
    assert out == b"".join(part + gap for part in parts if part != COUNT)


@given(events, st.sampled_from((b"\n\n", b"\r\n\r\n", b"\r\r")), st.integers(1, 40))
def test_what_is_harmless_passes_whole_however_it_is_cut(parts: list[bytes], gap: bytes, size: int) -> None:
    stream = b"".join(part + gap for part in parts)
    held, out = HeldEnd(), b""
    for at in range(0, len(stream), size):
        out += held.feed(stream[at : at + size])
    assert not held.holding
    assert out + held.end() == stream
    assert len(out) > len(stream) - 4
