"""The one reader of server-sent events: portions of any size, bounded events, linear work."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.sse import EventReader, ServerEvent

LINES = [
    ": a comment",
    "event: entry",
    "id: 7",
    "data: é\u2028",
    "data:b",
    "",
    "retry: 250",
    "",
    "data",
    "",
    "id: \0",
    "",
]
EVENTS = [
    ServerEvent("entry", "é\u2028\nb".encode(), "7", None),
    ServerEvent("", b"", "7", 0.25),
    ServerEvent("", b"", "7", None),
]


@pytest.mark.parametrize("limit", [None, 1000])
@given(st.lists(st.integers(0, 120), max_size=8), st.sampled_from(["\n", "\r\n", "\r"]))
def test_events_are_the_same_however_the_stream_is_cut(limit: int | None, cuts: list[int], newline: str) -> None:
    raw = ("\ufeff" + newline.join([*LINES, ""])).encode()
    points = sorted({min(cut, len(raw)) for cut in cuts} | {0, len(raw)})
    reader = EventReader(limit)
    assert [each for start, end in pairwise(points) for each in reader.feed(raw[start:end])] == EVENTS
    assert list(reader.end()) == []


def test_an_event_is_told_with_its_blank_line_and_does_not_wait_for_the_half_of_a_crlf() -> None:
    reader = EventReader()
    assert [each.data for each in reader.feed(b"data: a\r\r")] == [b"a"]
    assert [each.data for each in reader.feed(b"\ndata: b\r\n\r\n")] == [b"b"]


def test_what_is_left_of_a_stream_that_was_cut_is_told_at_its_end() -> None:
    reader = EventReader()
    assert list(reader.feed(b"data: a\nda")) == []
    assert [each.data for each in reader.end()] == [b"a"]


@pytest.mark.parametrize("portion", [1, 7, 1000])
@pytest.mark.parametrize("large", [b"data: " + b"x" * 200 + b"\n\n", b"data: xx\n" * 30 + b"\n", b"x" * 99 + b"\n" * 2])
def test_an_event_beyond_the_limit_is_left_out_whole_and_counted(large: bytes, portion: int) -> None:
    raw = b"data: a\n\n" + large + b"data: b\n\n" + large + b"data: c\n\n"
    reader = EventReader(limit=64)
    found = [each for at in range(0, len(raw), portion) for each in reader.feed(raw[at : at + portion])]
    assert [each.data for each in found] == [b"a", b"b", b"c"]
    assert reader.skipped == 2


def test_a_bounded_reader_holds_no_more_than_its_limit_of_a_line_without_end() -> None:
    reader = EventReader(limit=1 << 16)
    for _ in range(100_000):
        assert not list(reader.feed(b"x" * 64))
    assert sum(map(len, reader._rest)) <= 1 << 16
