"""Puts the sampled tokens of an answer together, column by column, from whatever an engine tells of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

from rollcage.gateway.shapes import Logprobs, Top
from rollcage.types import FloatColumn, JsonColumn, TokenColumns

TOKEN_ID = "token_id:"  # noqa: S105
"""How vLLM spells a token when asked for ids in place of texts."""


class TokenDraft:
    """Tokens in the making, as seven columns: of the tokens, how many alternatives each has, and of these."""

    def __init__(self) -> None:
        self.texts = JsonColumn[str]()
        self.ids = JsonColumn[int | None]()
        self.logprobs = FloatColumn()
        self.counts = JsonColumn[int]()
        self.top_texts = JsonColumn[str]()
        self.top_ids = JsonColumn[int | None]()
        self.top_logprobs = FloatColumn()

    def __len__(self) -> int:
        return len(self.texts)

    def buffers(self) -> Buffers:
        """The columns' bytes, for whoever appends to all of them and then tells with `grew`."""
        return (
            self.texts.raw,
            self.ids.raw,
            self.logprobs.raw,
            self.counts.raw,
            self.top_texts.raw,
            self.top_ids.raw,
            self.top_logprobs.raw,
        )

    def grew(self, tokens: int, tops: int) -> None:
        """So many tokens, with so many alternatives in all, were appended to the buffers."""
        for column in (self.texts, self.ids, self.counts):
            column.grew(tokens)
        self.top_texts.grew(tops)
        self.top_ids.grew(tops)

    def add(self, logprobs: Logprobs, ids: Sequence[int] | None, spellings: list[str] | None = None) -> str:
        """Take in the tokens of one chunk; what does not fit, in words.

        `spellings`: their texts by their bytes, where the engine's texts may be ids.
        """
        texts, own, scores, tops = _columns(logprobs)
        if spellings is not None:
            texts, own, tops = _spelled(texts, own, tops, spellings)
        if ids and len(ids) != len(texts):
            self.add_ids(ids)
            return f"a chunk has {len(ids)} token ids but {len(texts)} logprobs" if texts else ""
        known = [[each for each in top if each.logprob is not None] for top in tops]
        others = list(chain.from_iterable(known))
        self.texts.extend(texts)
        self.ids.extend(ids or own)
        self.logprobs.extend(scores)
        self.counts.extend(map(len, known))
        self.top_texts.extend(each.token for each in others)
        self.top_ids.extend(each.id for each in others)
        self.top_logprobs.extend(each.logprob for each in others)
        return ""

    def add_ids(self, ids: Sequence[int]) -> None:
        """Take in tokens of which nothing but the ids is known."""
        self.texts.extend([""] * len(ids))
        self.ids.extend(ids)
        self.logprobs.extend([None] * len(ids))
        self.counts.extend([0] * len(ids))

    def name(self, ids: Sequence[int]) -> str:
        """These are the ids of all tokens, told apart from them (SGLang, at the end of a stream); what does not fit."""
        if any(id_ is not None for id_ in self.ids):
            return ""  # they were known
        if not self.texts:
            self.add_ids(ids)
        elif len(ids) != len(self.texts):
            return f"the engine gave {len(ids)} token ids but {len(self.texts)} logprobs"
        else:
            self.ids = JsonColumn(ids)
        return ""

    def fill_gaps(self, ids: Sequence[int]) -> str:
        """These are the ids of all tokens, and some are missing here; what is missing still.

        llama.cpp tells one logprob for the tokens of a character, that of the last; their ids it tells elsewhere.
        """
        known = list(zip(self.texts, self.ids, self.logprobs, self.counts, strict=True))
        filled: list[tuple[str, int | None, float | None, int]] = []
        at = 0
        for id_ in ids:
            here = at < len(known) and known[at][1] == id_
            filled.append(known[at] if here else ("", id_, None, 0))
            at += here
        if at < len(known):
            return ""
        texts, named, scores, counts = zip(*filled, strict=True)
        self.texts, self.ids, self.counts = JsonColumn(texts), JsonColumn(named), JsonColumn(counts)
        self.logprobs = FloatColumn(scores)
        missing = scores.count(None)
        return f"no logprobs for {missing} of {len(ids)} tokens: the engine has none inside a character"

    def columns(self, singles: Callable[[bytearray], bytes | None]) -> TokenColumns:
        """The tokens as they stand. `singles` makes 32-bit floats of doubles."""
        logprobs, others = self.logprobs.narrowed(singles), self.top_logprobs.narrowed(singles)
        return TokenColumns(self.texts, self.ids, logprobs, self.counts, self.top_texts, self.top_ids, others)


Buffers = tuple[bytearray, bytearray, bytearray, bytearray, bytearray, bytearray, bytearray]
_Columns = tuple[list[str], list[int | None], list[float | None], list[Sequence[Top]]]


def _columns(logprobs: Logprobs) -> _Columns:
    if rows := logprobs.content:
        return (
            [row.token for row in rows],
            [row.id for row in rows],
            [row.logprob for row in rows],
            [row.top_logprobs or () for row in rows],
        )
    together = list(zip_longest(logprobs.tokens or (), logprobs.token_logprobs or (), logprobs.top_logprobs or ()))
    return (
        [text or "" for text, _, _ in together],
        [None] * len(together),
        [score for _, score, _ in together],
        [[Top(name, score) for name, score in (top or {}).items()] for _, _, top in together],
    )


def _spelled(
    texts: list[str], ids: list[int | None], tops: list[Sequence[Top]], spellings: list[str]
) -> tuple[list[str], list[int | None], list[Sequence[Top]]]:
    """Columns whose texts are `token_id:` strings: the ids are taken from there, the texts from the bytes beside."""
    known = spellings if len(spellings) == len(texts) else texts
    found = [_id_in(text) for text in texts]
    named = [[_named(each) for each in top] for top in tops]
    return (
        [text if id_ is None else other for text, other, id_ in zip(texts, known, found, strict=True)],
        [own if id_ is None else id_ for own, id_ in zip(ids, found, strict=True)],
        list(named),
    )


def _named(top: Top) -> Top:
    id_ = _id_in(top.token)
    return top if id_ is None else Top(top.token, top.logprob, id_)


def _id_in(text: str) -> int | None:
    if text.startswith(TOKEN_ID) and text[len(TOKEN_ID) :].isdecimal():
        return int(text[len(TOKEN_ID) :])
    return None
