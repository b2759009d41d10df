"""Packing: any JSON comes back exactly, and what was seen before costs nothing again."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.store.packing import MARKS, Blob, Codec, Damaged, LongTexts, blob_of, pack, pack_beside, unpack

keys = st.text(max_size=8) | st.sampled_from(sorted(MARKS))
words = st.text(max_size=8) | st.sampled_from(sorted(MARKS)) | st.text(alphabet='a\ud83d\U0001f600\x00"\\', min_size=1)
singles = st.floats(width=32, allow_nan=False)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | singles | words
longs = (
    st.lists(st.integers(), min_size=100, max_size=1200)
    | st.lists(singles, min_size=60, max_size=100)
    | st.lists(
        st.tuples(words, singles, st.lists(st.tuples(words, singles).map(list), max_size=3)).map(list), min_size=8
    )
    | st.lists(st.lists(scalars, max_size=3), min_size=8, max_size=40)
    | st.lists(st.dictionaries(keys, scalars, max_size=2), min_size=10, max_size=60)
    | st.builds(lambda word, times: word * times, words, st.integers(0, 800))
)
values = st.recursive(
    scalars | longs,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=30,
)
objects = st.dictionaries(keys, values, max_size=4)


class Shelf:
    """Blobs kept in memory."""

    def __init__(self) -> None:
        self.blobs: dict[bytes, Blob] = {}
        self.trips = 0

    def put(self, value: Mapping[str, Any]) -> bytes:
        body, blobs = pack(value)
        self.blobs |= blobs
        return body

    def fetch(self, digests: Sequence[bytes]) -> Mapping[bytes, Blob]:
        self.trips += 1
        return {digest: self.blobs[digest] for digest in digests if digest in self.blobs}

    @property
    def size(self) -> int:
        return sum(len(blob.raw) for blob in self.blobs.values())


def shape(value: Any) -> Any:
    """A value in which 1, 1.0 and true, and 0.0 and -0.0, differ."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return (type(value), struct.pack("d", value) if isinstance(value, float) else value)


@settings(max_examples=100, deadline=None)
@given(st.lists(objects, max_size=3))
@example([{"$blob": "x"}, {"$plain": {"$plain": {"$list": [{"$blob": 1}]}}, "b": {"$blob": "abc" * 500}}])
@example([{"a": [[]] * 20, "b": [[1]] * 20, "c": [[[1, 2]], [], [[3]], *([[]] * 8)], "d": [[True, 1, 1.0]] * 9}])
@example([{"a": [0.1] * 200, "b": [0.5, -0.0] * 100, "c": [float("inf")] * 99, "d": [1e300] * 99, "e": [1, 2.0] * 300}])
def test_any_json_comes_back_exactly(objects: list[dict[str, Any]]) -> None:
    shelf = Shelf()
    bodies = [shelf.put(value) for value in objects]
    assert shape(list(unpack(bodies, shelf.fetch))) == shape(objects)


def test_not_a_number_survives() -> None:
    shelf = Shelf()
    [value] = unpack([shelf.put({"a": [float("nan")] * 100, "b": float("nan")})], shelf.fetch)
    assert [str(one) for one in (*value["a"], value["b"])] == ["nan"] * 101


def test_deep_nesting_survives() -> None:
    value: Any = "bottom" * 200
    for _ in range(150):
        value = [{"x": value}]
    shelf = Shelf()
    assert list(unpack([shelf.put({"a": value})], shelf.fetch)) == [{"a": value}]


def test_a_list_that_grew_shares_all_its_full_parts_with_its_earlier_self() -> None:
    shelf = Shelf()
    ids = [number * 7919 % 150_000 for number in range(50_000)]
    shelf.put({"ids": ids})
    before = shelf.size
    shelf.put({"ids": [*ids, 1, 2, 3]})
    assert shelf.size - before < before / 50


def test_a_text_is_stored_once_wherever_it_stands() -> None:
    shelf = Shelf()
    text = "the output of some tool " * 1000
    shelf.put({"part": {"state": {"output": text}}})
    before = shelf.size
    shelf.put({"request": {"messages": [{"role": "tool", "content": text}]}, "again": [text, text]})
    assert shelf.size - before < 1000


@pytest.mark.parametrize("text", ["word\n" * 200_000, 'é😀 "\\' * 100_000, "a\ud800b" * 200_000])
def test_a_long_text_is_written_in_slices_and_is_the_same_text(text: str) -> None:
    body, blobs = pack({"text": text})
    assert len(blobs) == 1
    assert next(unpack([body], lambda names: {name: blobs[name] for name in names})) == {"text": text}
    if "\ud800" not in text:
        assert next(iter(blobs.values())).raw == msgspec.json.encode(text)


def test_logprobs_of_a_32_bit_engine_take_four_bytes() -> None:
    rows = [[f"t{n}", n, struct.unpack("f", struct.pack("f", -n / 977))[0]] for n in range(1, 1001)]
    _, blobs = pack({"tokens": rows})
    assert [len(blob.raw) for blob in blobs.values() if blob.codec is Codec.FLOATS] == [4000]


def test_a_long_log_is_fetched_in_few_trips() -> None:
    shelf = Shelf()
    messages = [{"role": "user", "content": f"{number} " * 400} for number in range(1000)]
    bodies = [shelf.put({"messages": messages[:count]}) for count in range(0, 1000, 100)]
    assert len(list(unpack(bodies, shelf.fetch))) == 10
    assert shelf.trips <= 6


def test_a_missing_blob_is_named() -> None:
    body, _ = pack({"text": "long " * 500})
    with pytest.raises(Damaged, match="is missing"):
        next(unpack([body], lambda digests: {}))


def test_a_long_text_that_was_here_before_is_named_without_a_hash_and_never_mistaken_for_another() -> None:
    texts = LongTexts(5000)
    one, other = "a" * 2000, "a" * 1000 + "b" + "a" * 999
    body, found = pack_beside(texts, {"text": one})
    again, same = pack_beside(texts, {"text": one})
    assert again == body and list(same.values()) == [one]
    assert {name: blob_of(content) for name, content in same.items()} == found
    assert all(isinstance(content, Blob) for content in pack_beside(texts, {"text": other})[1].values())
    assert pack_beside(texts, {"text": other}) == (*pack({"text": other}),)
    for letter in "xyz":
        pack_beside(texts, {"text": letter * 2000})
    assert texts.digest_of(one) is None and texts.digest_of("z" * 2000) is not None
