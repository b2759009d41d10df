"""Cuts a JSON value into a small body and content-addressed blobs, so that what repeats is stored once.

In a packed value an object with exactly one of these keys stands for something else:

    {"$blob": "name"}             the value in the blob of that name
    {"$list": [part, ...]}        one list: its parts, each itself a list, one after the other
    {"$columns": [column, ...]}   a list of equally long rows, stored column by column
    {"$nested": [lengths, flat]}  a list of lists, stored as one flat list and the length of each
    {"$plain": {...}}             an object of the user's that looks like one of these

The rules know shapes, not events. Lists are cut from the front into parts of a fixed size, so that a list that
grows at its end (a conversation, a prompt's token ids) shares all its full parts with its earlier self.
"""

from __future__ import annotations

import base64
import json
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec
from pydantic_core import PydanticSerializationError, from_json, to_json

from rollcage.types import FloatColumn, JsonColumn

LIMIT = 512
"""What takes more bytes of JSON than this becomes a blob."""
FAN = 16
"""Elements per part of a list of objects, and parts per node of a long list."""
BLOCK = 512
"""Integers per part of a list of integers."""
SLICE = 1 << 18
"""Characters that are encoded at a stretch."""
ROWS = 8
"""Shorter lists of lists stay as they are."""

_SIMPLE = frozenset({int, float, bool, type(None)})

_REFERENCE = re.compile(rb'\{"\$blob": ?"([A-Za-z0-9_-]{22})"\}')
"""Quotes within strings are escaped: no text of a user's looks like this."""

MARKS = frozenset({"$blob", "$list", "$columns", "$nested", "$plain"})


class Codec(IntEnum):
    """How a blob's bytes, once decompressed, are to be read."""

    JSON = 0
    FLOATS = 1
    """A list of numbers as little-endian 32-bit floats, used only where that loses nothing."""


class Blob(NamedTuple):
    """A piece of content before compression; its name is a hash of it."""

    codec: Codec
    raw: bytes

    @property
    def digest(self) -> bytes:
        """The name: equal contents have equal names."""
        return blake2b(self.raw, digest_size=16, person=bytes([self.codec])).digest()


class Ids(NamedTuple):
    """A list of nothing but whole numbers: it is not looked through."""

    items: Sequence[int]


class Own(NamedTuple):
    """An object that no other repeats as a whole: its members are packed, and it stays in the body."""

    members: dict[str, Any]


class Columns(NamedTuple):
    """A list of rows, given column by column; each column is a `JsonColumn`, a `FloatColumn`, or `Nested`."""

    columns: tuple[JsonColumn[Any] | FloatColumn | Nested, ...]


class Nested(NamedTuple):
    """A list of lists, given as the length of each and all their items, one after the other."""

    lengths: JsonColumn[int]
    items: Columns


Fetch = Callable[[Sequence[bytes]], Mapping[bytes, Blob]]
"""Gets blobs by their names, many at a time."""


class Damaged(ValueError):
    """A packed value refers to something that is not there, or that is not what its name says."""


def dumps(value: Any) -> bytes:
    """Compact JSON that `loads` reads back exactly: infinities, huge integers and lone surrogates included."""
    try:
        raw = msgspec.json.encode(value)
        if b"null" not in raw:  # which to this encoder infinities are, too
            return raw
    except (ValueError, TypeError, OverflowError, RecursionError):
        pass
    try:
        return to_json(value, inf_nan_mode="constants")
    except PydanticSerializationError:
        # JavaScript agents cut strings in the middle of a character; only an escape can carry what is left of it.
        return json.dumps(value, separators=(",", ":")).encode()


def dumps_plain(value: Any) -> bytes:
    """The same, several times faster, of what has no floats in it: to this encoder infinities are nothing."""
    try:
        return msgspec.json.encode(value)
    except (ValueError, OverflowError):
        return dumps(value)


def loads(raw: bytes) -> Any:
    """The value of some JSON."""
    try:
        return from_json(raw)
    except ValueError:
        # Lone surrogates, and nesting too deep for the fast parser.
        return json.loads(raw)


def pack(value: Mapping[str, Any]) -> tuple[bytes, dict[bytes, Blob]]:
    """The body of an object, and the blobs it needs by their names. The body names at least the object's own keys."""
    body, found = pack_beside(LongTexts(0), value)
    return body, {digest: blob_of(content) for digest, content in found.items()}


def pack_beside(texts: LongTexts, value: Mapping[str, Any]) -> tuple[bytes, dict[bytes, Blob | str]]:
    """The same; a long text that is among these comes as it is: nearly always it is stored already."""
    packer = _Packer(texts)
    body = dumps({key: packer.pack(item) for key, item in value.items()})
    return body, packer.blobs


def blob_of(content: Blob | str) -> Blob:
    """What `pack_beside` gave, encoded."""
    return Blob(Codec.JSON, _text(content)) if isinstance(content, str) else content


def unpack(bodies: Iterable[bytes], fetch: Fetch) -> Iterator[dict[str, Any]]:
    """The objects whose bodies these are, one by one. What they share is one Python object: look, do not touch."""
    unpacker = _Unpacker(fetch)
    roots = [(loads(body), b'"$' in body) for body in bodies]
    unpacker.load(item for root, marked in roots if marked for item in root.values())
    for root, marked in roots:
        yield {key: unpacker.resolve(item) for key, item in root.items()} if marked else root


def _text(value: str) -> bytes:
    """The same of a text; a long one in slices, because an encoder does not let other threads run."""
    if len(value) <= SLICE:
        return dumps_plain(value)
    slices = [dumps_plain(value[at : at + SLICE])[1:-1] for at in range(0, len(value), SLICE)]
    return b"".join((b'"', *slices, b'"'))


_Encode = Callable[[Any], bytes]


class LongTexts:
    """The names of long texts that were packed lately: comparing two is much quicker than hashing one."""

    def __init__(self, size: int = 2 << 20) -> None:
        """`size`: characters of them that are remembered."""
        self._left = size
        self._known: dict[tuple[int, str, str], tuple[str, bytes]] = {}

    def digest_of(self, text: str) -> bytes | None:
        """Its name, where it is known."""
        known = self._known.get(_look(text))
        return known[1] if known is not None and known[0] == text else None

    def remember(self, text: str, digest: bytes) -> None:
        """This is its name. Of two that look alike the first is remembered; the oldest are forgotten."""
        if len(text) > SLICE or _look(text) in self._known:
            return
        self._known[_look(text)] = (text, digest)
        self._left -= len(text)
        while self._left < 0:
            self._left += len(self._known.pop(next(iter(self._known)))[0])


def _look(text: str) -> tuple[int, str, str]:
    return len(text), text[:32], text[-64:]


class _Packer:
    """Packs one value, collecting its blobs."""

    def __init__(self, texts: LongTexts) -> None:
        self.blobs: dict[bytes, Blob | str] = {}
        self._texts = texts

    def _long(self, value: str) -> dict[str, str]:
        """A long text. Conversations repeat theirs turn by turn: one that was here before is known by its look."""
        digest = self._texts.digest_of(value)
        if digest is None:
            blob = Blob(Codec.JSON, _text(value))
            self._texts.remember(value, blob.digest)
            return self._ref(blob)
        self.blobs[digest] = value
        return {"$blob": _name(digest)}

    def pack(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._long(value) if len(value) > LIMIT else value
        if isinstance(value, dict):
            return self._pack_dict(value)
        if isinstance(value, Own):
            return self._pack_dict(value.members, own=True)
        if isinstance(value, Ids):
            return self._parts(value.items, BLOCK, dumps_plain) if len(value.items) > BLOCK // 4 else value.items
        if isinstance(value, Columns):
            return self._encoded(dumps_plain(self._turned(value)))
        if isinstance(value, (list, tuple)):
            return self._pack_list(value)
        return value

    def _pack_dict(self, value: dict[str, Any], own: bool = False) -> Any:
        packed = {
            key: item if (kind := type(item)) in _SIMPLE or (kind is str and len(item) <= LIMIT) else self.pack(item)
            for key, item in value.items()
        }
        if own:
            return packed
        if len(packed) == 1 and not MARKS.isdisjoint(packed):
            packed = {"$plain": packed}
        return self._shrink(packed)

    def _pack_list(self, value: Sequence[Any]) -> Any:
        kinds = set(map(type, value))
        if kinds == {int}:
            return self._parts(value, BLOCK) if len(value) > BLOCK // 4 else value
        if dict in kinds:
            return self._parts([self.pack(item) for item in value], FAN)
        return self._shrink(self._columns(value, kinds))

    def _turned(self, value: Columns | Nested | JsonColumn[Any] | FloatColumn) -> Any:
        """What is given as columns already, as `_columns` would have turned its rows."""
        if isinstance(value, Columns):
            return {"$columns": [self._turned(column) for column in value.columns]}
        if isinstance(value, Nested):
            return {"$nested": [msgspec.Raw(value.lengths.json), self._turned(value.items)]}
        if isinstance(value, JsonColumn):
            return msgspec.Raw(value.json)
        if value.narrow and len(value.raw) * 2 > LIMIT:
            return self._ref(Blob(Codec.FLOATS, bytes(value.raw)))
        return msgspec.Raw(dumps(value.values()))

    def _columns(self, value: Sequence[Any], kinds: set[type]) -> Any:
        """A list turned so that like stands beside like, which is what compresses well."""
        if kinds == {float}:
            return self._floats(value if isinstance(value, list) else list(value))
        if len(value) >= ROWS and _rows(kinds):
            lengths = list(map(len, value))
            if min(lengths) == max(lengths) >= 2:
                columns = [(column, set(map(type, column))) for column in zip(*value, strict=True)]
                if not _rows(set().union(*(inner for _, inner in columns))):
                    return {"$columns": [self._columns(list(column), inner) for column, inner in columns]}
            flat = list(chain.from_iterable(value))
            return {"$nested": [lengths, self._columns(flat, set(map(type, flat)))]}
        if kinds <= _SIMPLE or (kinds == {str} and max(map(len, value)) <= LIMIT):
            return value
        return [self.pack(item) for item in value]

    def _floats(self, value: list[float]) -> Any:
        numbers = array("f", value)
        # Engines compute in 32 bits: their logprobs take 4 bytes here and some 18 digits as text.
        if len(value) * 8 <= LIMIT or numbers.tolist() != value:
            return value
        return self._ref(Blob(Codec.FLOATS, _little_endian(numbers).tobytes()))

    def _parts(self, items: Sequence[Any], size: int, encode: _Encode = dumps) -> Any:
        """A list as a tree of parts, of which all but the last of each level are full."""
        whole = len(items) - len(items) % size
        level = [self._shrink(items[at : at + size], encode) for at in range(0, whole, size)]
        rest = [self._shrink(items[whole:], encode)] if whole < len(items) else []
        while len(level) > FAN:
            whole = len(level) - len(level) % FAN
            rest = level[whole:] + rest
            level = [self._shrink({"$list": level[at : at + FAN]}) for at in range(0, whole, FAN)]
        nodes = level + rest
        return nodes[0] if len(nodes) == 1 else self._shrink({"$list": nodes}) if nodes else []

    def _shrink(self, packed: Any, encode: _Encode = dumps) -> Any:
        raw = encode(packed)
        return self._ref(Blob(Codec.JSON, raw)) if len(raw) > LIMIT else packed

    def _encoded(self, raw: bytes) -> Any:
        """The same of what is encoded already."""
        return self._ref(Blob(Codec.JSON, raw)) if len(raw) > LIMIT else loads(raw)

    def _ref(self, blob: Blob) -> dict[str, str]:
        digest = blob.digest
        self.blobs[digest] = blob
        return {"$blob": _name(digest)}


class _Unpacker:
    """Gets the blobs that some packed values need, level by level, and puts the values together."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._packed: dict[str, Any] = {}
        self._done: dict[str, Any] = {}
        self._uses: Counter[str] = Counter()

    def load(self, roots: Iterable[Any]) -> None:
        for root in roots:
            _collect(root, self._uses)
        while wanted := self._uses.keys() - self._packed.keys() - self._done.keys():
            digests = {_digest(name): name for name in wanted}
            found = self._fetch(list(digests))
            for digest, name in digests.items():
                blob = found.get(digest)
                if blob is None:
                    raise Damaged(f"blob {name} is missing")
                self._take(name, blob)

    def _take(self, name: str, blob: Blob) -> None:
        if blob.codec is Codec.FLOATS:
            numbers = array("f")
            numbers.frombytes(blob.raw)
            self._done[name] = _little_endian(numbers).tolist()
        elif b'"$' in blob.raw:
            self._packed[name] = loads(blob.raw)
            _collect(self._packed[name], self._uses)
        else:
            self._done[name] = loads(blob.raw)

    def resolve(self, value: Any) -> Any:
        if isinstance(value, list):
            return value if _flat(value) else [self.resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        match value:
            case {"$blob": name} if len(value) == 1:
                return self._blob(name)
            case {"$list": parts} if len(value) == 1:
                return list(chain.from_iterable(self.resolve(part) for part in parts))
            case {"$columns": columns} if len(value) == 1:
                return [list(row) for row in zip(*map(self.resolve, columns), strict=True)]
            case {"$nested": [lengths, flat]} if len(value) == 1:
                items = iter(self.resolve(flat))
                return [list(islice(items, length)) for length in lengths]
            case {"$plain": inner} if len(value) == 1:
                return {key: self.resolve(item) for key, item in inner.items()}
        return {key: self.resolve(item) for key, item in value.items()}

    def _blob(self, name: str) -> Any:
        # What is used once is not kept: a turn's prompt may be very long, and only its parts are shared.
        if self._uses[name] == 1:
            return self._done.pop(name) if name in self._done else self.resolve(self._packed.pop(name))
        if name not in self._done:
            self._done[name] = self.resolve(self._packed[name])
        return self._done[name]


def _collect(value: Any, names: Counter[str]) -> None:
    """Count the blobs that a packed value refers to, by their names."""
    if isinstance(value, list):
        if not _flat(value):
            for item in value:
                _collect(item, names)
    elif isinstance(value, dict):
        if len(value) == 1 and isinstance(name := value.get("$blob"), str):
            names[name] += 1
        elif len(value) == 1 and isinstance(inner := value.get("$plain"), dict):
            _collect(list(inner.values()), names)
        else:
            _collect(list(value.values()), names)


def _rows(kinds: set[type]) -> bool:
    """Whether values of these types are all lists, or the tuples that stand for lists."""
    return bool(kinds) and all(issubclass(kind, (list, tuple)) for kind in kinds)


def _flat(value: list[Any]) -> bool:
    return set(map(type, value)).isdisjoint((dict, list))


def references(raw: bytes) -> set[bytes]:
    """The names of the blobs that a body, or a blob of JSON, refers to itself; it may name a few that it does not."""
    return {_digest(name.decode()) for name in _REFERENCE.findall(raw)}


def _name(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest)[:22].decode()


def _digest(name: str) -> bytes:
    return base64.urlsafe_b64decode(name + "==")


def _little_endian(numbers: array[float]) -> array[float]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
