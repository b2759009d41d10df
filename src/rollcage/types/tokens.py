"""Sampled tokens: rows to look at, columns to carry. A long turn is a few lists, not thousands of small objects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, overload

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from rollcage.types.columns import FloatColumn, JsonColumn, singles


class Alternative(NamedTuple):
    """One of the engine's top candidates at a position."""

    text: str
    id: int | None
    logprob: float


class Token(NamedTuple):
    """One sampled token as the engine counted it. Rows, so that lists cannot misalign."""

    text: str
    id: int | None
    logprob: float | None
    top: tuple[Alternative, ...] = ()


class TokenColumns(Sequence[Token]):
    """Tokens, stored as columns of one length. A row is made when somebody looks at it. Look, do not touch."""

    __slots__ = ("counts", "ids", "logprobs", "texts", "top_ids", "top_logprobs", "top_texts")

    def __init__(
        self,
        texts: JsonColumn[str],
        ids: JsonColumn[int | None],
        logprobs: FloatColumn,
        counts: JsonColumn[int],
        top_texts: JsonColumn[str],
        top_ids: JsonColumn[int | None],
        top_logprobs: FloatColumn,
    ) -> None:
        """`counts`: how many alternatives each token has; those of all tokens follow each other in the last three."""
        if not len(texts) == len(ids) == len(logprobs) == len(counts):
            raise ValueError("the columns of tokens differ in length")
        if not len(top_texts) == len(top_ids) == len(top_logprobs):
            raise ValueError("the columns of alternatives differ in length")
        self.texts, self.ids, self.logprobs, self.counts = texts, ids, logprobs, counts
        self.top_texts, self.top_ids, self.top_logprobs = top_texts, top_ids, top_logprobs

    @classmethod
    def of(cls, rows: Sequence[Token]) -> TokenColumns:
        """The same tokens as columns."""
        others = list(chain.from_iterable(row.top for row in rows))
        return cls(
            JsonColumn([row.text for row in rows]),
            JsonColumn([row.id for row in rows]),
            FloatColumn([row.logprob for row in rows]).narrowed(singles),
            JsonColumn([len(row.top) for row in rows]),
            JsonColumn([each.text for each in others]),
            JsonColumn([each.id for each in others]),
            FloatColumn([each.logprob for each in others]).narrowed(singles),
        )

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[Token]:
        top = list(map(Alternative, self.top_texts, self.top_ids, self.top_logprobs))  # type: ignore[arg-type]
        ends = accumulate(self.counts)
        for text, id_, logprob, count, end in zip(self.texts, self.ids, self.logprobs, self.counts, ends, strict=True):
            yield Token(text, id_, logprob, tuple(top[end - count : end]))

    @overload
    def __getitem__(self, at: int) -> Token: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Token, ...]: ...
    def __getitem__(self, at: int | slice) -> Token | tuple[Token, ...]:
        if isinstance(at, slice):
            return tuple(self)[at]
        at = range(len(self))[at]
        start = sum(self.counts[:at])
        end = start + self.counts[at]
        columns = self.top_texts[start:end], self.top_ids[start:end], self.top_logprobs[start:end]
        top = map(Alternative, *columns)  # type: ignore[arg-type]
        return Token(self.texts[at], self.ids[at], self.logprobs[at], tuple(top))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, tuple | TokenColumns) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class AsTokens:
    """How a field of tokens is read and written: as a tuple of rows. Columns are taken as they are."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Rows, or columns that need no look."""
        rows = handler(tuple[Token, ...])
        return core_schema.no_info_wrap_validator_function(
            lambda value, check: value if isinstance(value, TokenColumns) else check(value),
            rows,
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda value, write: write(tuple(value)), schema=rows
            ),
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """That of the rows."""
        return handler(schema["schema"])
