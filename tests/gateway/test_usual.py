"""The compiled part reads what the one in Python reads, and leaves to it whatever is odd."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.gateway import capture, usual
from rollcage.gateway.capture import AnswerEnd, ModelCall, turn_of
from rollcage.gateway.token_draft import TokenDraft
from rollcage.gateway.usual import Piece, framed, python_calm, python_framed, python_take_usual, take_usual
from rollcage.types.columns import singles
from support.paths import GOLDEN

compiled = pytest.mark.skipif(not usual.compiled, reason="no C compiler or no Python headers when it was installed")

TEXTS = st.one_of(
    st.sampled_from(["", " the", "\n", '"', "\\", "é", "日本", "😀", "token_id:7", "\x00", "\x7f"]), st.text()
)
NUMBERS = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-40, 0, width=32),
    st.integers(-(10**30), 10**30),
    st.sampled_from([None, "x", True]),
)
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


TOPS = st.fixed_dictionaries({"token": TEXTS, "logprob": NUMBERS}, optional={"bytes": JUNK, "id": JUNK})
ENTRIES = st.fixed_dictionaries(
    {"token": TEXTS, "logprob": NUMBERS}, optional={"top_logprobs": st.none() | st.lists(TOPS, max_size=3), "id": JUNK}
)
DELTAS = maybe(
    content=st.none() | TEXTS,
    role=st.just("assistant"),
    reasoning=st.none() | TEXTS,
    tool_calls=st.just([{"index": 0, "id": "c", "function": {"name": "bash", "arguments": '{"é'}}]),
    other=JUNK,
)
CHOICES = st.fixed_dictionaries(
    {
        "index": st.sampled_from([0, 0, 0, 0, 1, None]),
        "delta": DELTAS,
        "logprobs": st.fixed_dictionaries({"content": st.lists(ENTRIES, min_size=1, max_size=2)}),
        "token_ids": st.lists(st.integers(-5, 10**20), min_size=1, max_size=2),
    },
    optional={"finish_reason": st.sampled_from([None, "stop"]), "stop_reason": JUNK, "text": st.none()},
)
CHUNKS = st.fixed_dictionaries(
    {"choices": st.lists(CHOICES, min_size=1, max_size=1)},
    optional={"id": TEXTS, "usage": st.none(), "error": st.sampled_from([None, "broke"]), "model": JUNK},
)
STYLES = st.sampled_from([{"separators": (",", ":")}, {}, {"ensure_ascii": False}])


def event(chunk: object, style: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, **style).encode("utf-8", "surrogatepass") + b"\n\n"


def read(take: usual.TakeUsual, data: bytes) -> tuple[int, TokenDraft, list[Piece]]:
    tokens, pieces = TokenDraft(), list[Piece]()
    return take(data, 0, tokens, pieces), tokens, pieces


def same_turn(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        quick = turn_of(ModelCall(0, {}), data, AnswerEnd(200))
        patch.setattr(capture, "take_usual", lambda data, start, tokens, pieces: start)
        slow = turn_of(ModelCall(0, {}), data, AnswerEnd(200))
    assert quick.model_dump() == slow.model_dump()


@compiled
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(CHUNKS, STYLES), min_size=1, max_size=4))
def test_all_three_ways_read_the_same_turn(chunks: list[tuple[object, dict[str, Any]]]) -> None:
    data = b"".join(event(chunk, style) for chunk, style in chunks)
    with pytest.MonkeyPatch.context() as patch:
        same_turn(data, patch)
        patch.setattr(capture, "take_usual", python_take_usual)
        same_turn(data, patch)


@compiled
@settings(max_examples=100, deadline=None)
@given(CHUNKS, STYLES, st.data())
def test_a_damaged_event_is_read_by_none_or_by_all(chunk: object, style: dict[str, Any], data: st.DataObject) -> None:
    whole = event(chunk, style)
    at = data.draw(st.integers(0, len(whole) - 1))
    patched = whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + data.draw(st.integers(0, 2)) :]
    with pytest.MonkeyPatch.context() as patch:
        same_turn(patched + b"\n\n", patch)
    read(take_usual, whole[:at])  # and what is cut short is not read beyond its end


@compiled
@settings(max_examples=150, deadline=None)
@given(st.one_of(st.floats(-50, 0), st.floats(-1, 0, width=32), st.floats(allow_nan=False, allow_infinity=False)))
def test_a_logprob_is_the_nearest_number_to_its_digits(number: float) -> None:
    for text in (repr(number), f"{number:.17f}", f"{number:.19g}", f"{number:.12f}"):
        entry = f'{{"token":"a","logprob":{text}}}'
        chunk = f'{{"choices":[{{"delta":{{}},"logprobs":{{"content":[{entry}]}},"token_ids":[1]}}]}}'
        _, tokens, _ = read(take_usual, f"data: {chunk}\n\n".encode())
        if tokens.logprobs:
            [found] = tokens.logprobs
            assert struct.pack("d", found) == struct.pack("d", float(text))
        else:
            assert abs(number) >= 1e300 or len(text) > 60


@compiled
@given(st.lists(st.floats() | st.floats(width=32)))
def test_numbers_are_halved_where_that_loses_nothing(numbers: list[float]) -> None:
    doubles = bytearray(struct.pack(f"={len(numbers)}d", *numbers))
    found = usual.singles(doubles)
    assert found == singles(doubles)
    assert found is None or list(struct.unpack(f"<{len(numbers)}f", found)) == numbers


@compiled
@given(
    st.lists(
        st.sampled_from(
            [b'"tool_calls"', b"[DONE]", b'"choices":[]', b'"choices": []', b"\r", b"\n\n", b"[", b"_", b"x"]
        )
    )
)
def test_what_nobody_acts_on_is_told_alike(parts: list[bytes]) -> None:
    for data in (b"".join(parts), b"".join(parts) + b"\n\n"):
        assert usual.calm(data) is python_calm(data)


@pytest.mark.parametrize("unwrap", [framed, python_framed])
def test_chunks_that_may_leave_as_they_came_are_whole_calm_and_without_the_key(
    unwrap: Callable[[bytes, bytes], bytes | None],
) -> None:
    said, key = b"data: {}\n\n", b"sk-secret"
    one = b"a\r\n%b\r\n" % said
    assert unwrap(one, key) == said and unwrap(one * 3, b"") == said * 3
    assert unwrap(b"5\r\ndata:\r\n5\r\n {}\n\n\r\n", key) == said
    for odd in (b"", one[:-1], one + b"a", b"0\r\n\r\n", one + b"0\r\n\r\n", b"a;x\r\n" + one[3:], b"-" + one):
        assert unwrap(odd, key) is None
    for held in (b"data: [DONE]\n\n", b"data: sk-secret\n\n", b"data: {}\n", b"data: {}\r\n\r\n"):
        assert unwrap(b"%x\r\n%b\r\n" % (len(held), held), key) is None


@compiled
@given(st.lists(st.sampled_from([b"5\r\n", b"0\r\n", b"\r\n", b"a", b"data:", b"[DONE]", b"\n\n", b"ffffffffff\r\n"])))
def test_chunks_are_unwrapped_alike(parts: list[bytes]) -> None:
    assert framed(b"".join(parts), b"aa") == python_framed(b"".join(parts), b"aa")


@pytest.mark.parametrize("more", [b"\n", b"\n\n", b"\n\n\n"])
def test_blank_lines_too_many_are_read_to_their_end(more: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    same_turn(b"data: [DONE]\n\n" + more, monkeypatch)
    same_turn(b'data: {"choices":[]}\n\n' + more + b"data: [DONE]\n\n" + more, monkeypatch)


@pytest.mark.parametrize("take", [take_usual, python_take_usual])
def test_a_line_that_ends_within_its_json_is_no_event_of_the_usual_shape(take: usual.TakeUsual) -> None:
    entry = {"token": " the", "logprob": -0.25}
    choice = {"index": 0, "delta": {"content": " the"}, "logprobs": {"content": [entry]}, "token_ids": [42]}
    whole = event({"choices": [choice]}, {"separators": (",", ":")})
    assert read(take, whole)[0] == len(whole)
    assert read(take, whole.replace(b',"logprobs"', b',\n"logprobs"'))[0] == 0


@compiled
def test_the_streams_of_a_real_engine_are_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in sorted(GOLDEN.glob("*.sse")):
        same_turn(path.read_bytes(), monkeypatch)


def test_an_ordinary_token_takes_the_short_way() -> None:
    entry = {"token": " the", "logprob": -0.25, "bytes": [32], "top_logprobs": [{"token": " a", "logprob": -1.5}]}
    choice = {"index": 0, "delta": {"content": " the"}, "logprobs": {"content": [entry]}, "finish_reason": None}
    data = event({"id": "x", "choices": [{**choice, "token_ids": [42]}]}, {}) * 3
    for take in (take_usual, python_take_usual):
        at, tokens, pieces = read(take, data)
        assert at == len(data) and tokens.ids == [42] * 3 and tokens.top_texts == [" a"] * 3
        assert "".join(str(getattr(each, "content", each)) for each in pieces) == " the the the"


def test_a_part_that_was_built_from_an_older_source_is_left_alone() -> None:
    older = (
        "import sys, types; part = sys.modules['rollcage.gateway._wire'] = types.ModuleType('_wire'); part.calm = None"
    )
    asked = "from rollcage.gateway import usual; print(usual.compiled, usual.calm is usual.python_calm)"
    done = subprocess.run([sys.executable, "-c", f"{older}\n{asked}"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
