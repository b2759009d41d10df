"""A real byte-level BPE tokenizer, small enough to ship: 256 bytes, a few thousand merges, the tags of ChatML."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import resources

SPECIAL_TEXTS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)
"""Tags with an id of their own, which follow the last merge in this order."""

# Every run is bounded: a word costs the square of its length to merge, and a regex backtracks over whitespace.
_WORD = re.compile(
    r"'(?:s|d|m|t|ll|ve|re)(?![^\W_])"
    r"|[ _]?[^\W\d_]{1,48}"
    r"|\d{1,3}"
    r"| ?(?:[^\s\w]|_){1,48}[\r\n]{0,8}"
    r"|\s{0,48}[\r\n]{1,48}"
    r"|\s{1,48}(?!\S)"
    r"|\s{1,48}"
)
_CACHE_LIMIT = 100_000

Pair = tuple[int, int]


def split_words(text: str) -> list[str]:
    """The pieces within which merges happen; joined, they are the text again."""
    return _WORD.findall(text)


class Tokenizer:
    """Text to ids and back. `encode` never makes a special token of ordinary text unless it is asked to."""

    def __init__(self, merges: Sequence[Pair]) -> None:
        self._ranks = {pair: 256 + rank for rank, pair in enumerate(merges)}
        pieces = [bytes([value]) for value in range(256)]
        for left, right in merges:
            pieces.append(pieces[left] + pieces[right])
        first_special = len(pieces)
        pieces.extend(text.encode() for text in SPECIAL_TEXTS)
        self._bytes = pieces
        self._words: dict[str, list[int]] = {}
        self.specials: Mapping[str, int] = {text: first_special + n for n, text in enumerate(SPECIAL_TEXTS)}
        """Id of each tag."""
        self._special = re.compile("(" + "|".join(map(re.escape, SPECIAL_TEXTS)) + ")")
        self.plain_ids: tuple[int, ...] = tuple(
            n for n in range(first_special) if pieces[n].decode("utf-8", "ignore").encode() == pieces[n]
        )
        """Ids of ordinary tokens that are whole text by themselves."""

    @property
    def size(self) -> int:
        """How many ids there are."""
        return len(self._bytes)

    @property
    def eos(self) -> int:
        """Id of the token that ends an answer."""
        return self.specials["<|im_end|>"]

    def encode(self, text: str, *, specials: bool = False) -> list[int]:
        """Ids of a text; with `specials`, tags in it become their own tokens. What UTF-8 cannot hold becomes `?`."""
        if specials:
            ids: list[int] = []
            for part in self._special.split(text):
                special = self.specials.get(part)
                ids.extend(self.encode(part) if special is None else (special,))
            return ids
        words = self._words
        ids = []
        for word in _WORD.findall(text):
            known = words.get(word)
            ids.extend(self._merge_word(word) if known is None else known)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, tags included; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes one token stands for."""
        if not 0 <= id < len(self._bytes):
            raise ValueError(f"no token {id}: ids go from 0 to {len(self._bytes) - 1}")
        return self._bytes[id]

    def token_text(self, id: int) -> str:
        """One token as engines show it: U+FFFD where it is only part of a character."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def _merge_word(self, word: str) -> list[int]:
        ids = list(word.encode("utf-8", "replace"))
        ranks = self._ranks
        while len(ids) > 1:
            best = min((ranks[pair] for pair in itertools.pairwise(ids) if pair in ranks), default=None)
            if best is None:
                break
            ids = _join(ids, best, ranks)
        if len(self._words) >= _CACHE_LIMIT:
            self._words.clear()
        self._words[word] = ids
        return ids


def _join(ids: list[int], merged: int, ranks: Mapping[Pair, int]) -> list[int]:
    out: list[int] = []
    at = 0
    while at < len(ids):
        if at + 1 < len(ids) and ranks.get((ids[at], ids[at + 1])) == merged:
            out.append(merged)
            at += 2
        else:
            out.append(ids[at])
            at += 1
    return out


@lru_cache(maxsize=1)
def default_tokenizer() -> Tokenizer:
    """The tokenizer that ships with the package, read once."""
    lines = resources.files(__package__).joinpath("merges.txt").read_text(encoding="ascii").splitlines()
    merges: list[Pair] = []
    for line in lines:
        left, right = line.split(" ")
        merges.append((int(left), int(right)))
    return Tokenizer(merges)
