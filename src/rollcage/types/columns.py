"""Columns of many small values, kept as the bytes in which they come and are stored. Values are made when looked at."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import nan
from typing import Generic, TypeVar, overload

from pydantic_core import from_json, to_json

V = TypeVar("V")


class _Column(Sequence[V], Generic[V]):
    """A sequence that is equal to every list and tuple of the same values."""

    __slots__ = ("raw",)

    def __init__(self, values: Iterable[V] = ()) -> None:
        self.raw = bytearray()
        if values:
            self.extend(values)

    def extend(self, values: Iterable[V]) -> None:
        """Append these."""
        raise NotImplementedError

    def values(self) -> Sequence[V]:
        """All of them, as Python has them."""
        raise NotImplementedError

    @overload
    def __getitem__(self, at: int) -> V: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[V, ...]: ...
    def __getitem__(self, at: int | slice) -> V | tuple[V, ...]:
        found = self.values()[at]
        return tuple(found) if isinstance(at, slice) else found  # type: ignore[arg-type, return-value]

    def __iter__(self) -> Iterator[V]:
        return iter(self.values())

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, list | tuple | _Column) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class JsonColumn(_Column[V]):
    """Texts, whole numbers and None."""

    __slots__ = ("_size", "_values")

    def __init__(self, values: Iterable[V] = ()) -> None:
        self._size = 0
        self._values: Sequence[V] | None = None
        super().__init__(values)

    def extend(self, values: Iterable[V]) -> None:
        some = list(values)
        if some:
            try:
                self.raw += b"," + to_json(some)[1:-1]
            except ValueError:  # halves of characters, which only an escape can carry
                self.raw += b"," + json.dumps(some, separators=(",", ":")).encode()[1:-1]
        self.grew(len(some))

    def grew(self, by: int) -> None:
        """So many values were put into `raw`, each behind a comma."""
        self._size += by
        self._values = None

    @property
    def json(self) -> bytes:
        """The JSON of the list."""
        return b"[" + self.raw[1:] + b"]"

    @property
    def holes(self) -> bool:
        """Whether some of these numbers are None."""
        return b"null" in self.raw

    def values(self) -> Sequence[V]:
        if self._values is None:
            try:
                self._values = from_json(self.json)
            except ValueError:
                self._values = json.loads(self.json)
        return self._values

    def __len__(self) -> int:
        return self._size


class FloatColumn(_Column[float | None]):
    """Numbers, as doubles or as 32-bit floats; None is no number."""

    __slots__ = ("narrow",)

    def __init__(self, values: Iterable[float | None] = ()) -> None:
        self.narrow = False
        """Whether they are 32-bit floats, the lower byte first; then it is complete."""
        super().__init__(values)

    def extend(self, values: Iterable[float | None]) -> None:
        self.raw += array("d", [nan if value is None else value for value in values]).tobytes()

    def narrowed(self, singles: Callable[[bytearray], bytes | None]) -> FloatColumn:
        """The same numbers in half the space, where `singles` can have them so."""
        raw = singles(self.raw) if self.raw else None
        if raw is None:
            return self
        column = FloatColumn()
        column.raw, column.narrow = bytearray(raw), True
        return column

    @property
    def holes(self) -> bool:
        """Whether some are None."""
        return not self.narrow and None in self.values()

    def values(self) -> Sequence[float | None]:
        numbers = array("f" if self.narrow else "d")
        numbers.frombytes(bytes(self.raw))
        if self.narrow and sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist() if self.narrow else [None if each != each else each for each in numbers]

    def __len__(self) -> int:
        return len(self.raw) // (4 if self.narrow else 8)


def singles(doubles: bytearray) -> bytes | None:
    """These doubles as little-endian 32-bit floats; None where that loses something."""
    numbers = array("d", bytes(doubles))
    narrow = array("f", [number if abs(number) < 3e38 else 0 for number in numbers])
    if array("d", narrow) != numbers:
        return None
    if sys.byteorder == "big":
        narrow.byteswap()
    return narrow.tobytes()
