"""Puts the sampled tokens of an answer together, column by column, from whatever an engine tells of them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from rollcage.gateway.shapes import Logprobs, TokenEntry, Top
from rollcage.types import TokenColumns

TOKEN_ID = "token_id:"  # noqa: S105
"""How vLLM spells a token when asked for ids in place of texts."""


class TokenDraft:
    """Tokens in the making, as seven columns: of the tokens, how many alternatives each has, and of these."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int | None] = []
        self.logprobs: list[float | None] = []
        self.counts: list[int] = []
        self.top_texts: list[str] = []
        self.top_ids: list[int | None] = []
        self.top_logprobs: list[float] = []

    def __len__(self) -> int:
        return len(self.texts)

    def lists(self) -> _Lists:
        """The columns themselves, for whoever appends to all of them."""
        return (
            self.texts,
            self.ids,
            self.logprobs,
            self.counts,
            self.top_texts,
            self.top_ids,
            self.top_logprobs,
        )

    def add_one(self, entry: TokenEntry, id_: int) -> None:
        """Take in one token. What nearly every chunk brings: its speed counts."""
        self.texts.append(entry.token)
        self.ids.append(id_)
        self.logprobs.append(entry.logprob)
        self._add_top(entry.top_logprobs or ())

    def add(self, logprobs: Logprobs, ids: list[int] | None, spellings: list[str] | None = None) -> str:
        """Take in the tokens of one chunk; what does not fit, in words.

        `spellings`: their texts by their bytes, where the engine's texts may be ids.
        """
        texts, own, scores, tops = _columns(logprobs)
        if spellings is not None:
            texts, own, tops = _spelled(texts, own, tops, spellings)
        if ids and len(ids) != len(texts):
            self.add_ids(ids)
            return f"a chunk has {len(ids)} token ids but {len(texts)} logprobs" if texts else ""
        self.texts += texts
        self.ids += ids or own
        self.logprobs += scores
        for top in tops:
            self._add_top(top)
        return ""

    def add_ids(self, ids: Sequence[int]) -> None:
        """Take in tokens of which nothing but the ids is known."""
        self.texts += [""] * len(ids)
        self.ids += ids
        self.logprobs += [None] * len(ids)
        self.counts += [0] * len(ids)

    def name(self, ids: Sequence[int]) -> str:
        """These are the ids of all tokens, told apart from them (SGLang, at the end of a stream); what does not fit."""
        if self.ids.count(None) != len(self.ids):
            return ""  # they were known
        if not self.texts:
            self.add_ids(ids)
        elif len(ids) != len(self.texts):
            return f"the engine gave {len(ids)} token ids but {len(self.texts)} logprobs"
        else:
            self.ids[:] = ids
        return ""

    def fill_gaps(self, ids: Sequence[int]) -> str:
        """These are the ids of all tokens, and some are missing here; what is missing still.

        llama.cpp tells one logprob for the tokens of a character, that of the last; their ids it tells elsewhere.
        """
        filled = TokenDraft()
        at = 0
        for id_ in ids:
            if at < len(self) and self.ids[at] == id_:
                filled.texts.append(self.texts[at])
                filled.ids.append(id_)
                filled.logprobs.append(self.logprobs[at])
                filled.counts.append(self.counts[at])
                at += 1
            else:
                filled.add_ids((id_,))
        if at < len(self):
            return ""
        self.texts, self.ids, self.logprobs, self.counts = filled.texts, filled.ids, filled.logprobs, filled.counts
        missing = self.logprobs.count(None)
        return f"no logprobs for {missing} of {len(ids)} tokens: the engine has none inside a character"

    def columns(self) -> TokenColumns:
        """The tokens as they stand."""
        return TokenColumns(*self.lists())

    def _add_top(self, top: Sequence[Top]) -> None:
        known = [each for each in top if each.logprob is not None]
        self.counts.append(len(known))
        self.top_texts += [each.token for each in known]
        self.top_ids += [each.id for each in known]
        self.top_logprobs += [each.logprob for each in known]  # type: ignore[misc]


_Lists = tuple[list[str], list[int | None], list[float | None], list[int], list[str], list[int | None], list[float]]
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
