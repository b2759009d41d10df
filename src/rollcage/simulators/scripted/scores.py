"""Made-up log probabilities: plausible, and always the same for the same token after the same prefix."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from rollcage.simulators.scripted.tokenizer import default_tokenizer

MASKED = -9999.0
"""What vLLM shows for a token that a grammar rules out."""


class Score(NamedTuple):
    """A token's log probability, with the best other candidates at its place, best first."""

    id: int
    logprob: float
    others: tuple[tuple[int, float], ...]


def digest_of(ids: Iterable[int]) -> bytes:
    """Stands for a prefix."""
    return blake2b(b"".join(id.to_bytes(4, "big") for id in ids), digest_size=16).digest()


def scores(prompt: Sequence[int], ids: Sequence[int], *, others: int, forced: int = 0) -> list[Score]:
    """One score per token; the first `forced` ones were the only choice a grammar left."""
    state = digest_of(prompt)
    out: list[Score] = []
    for n, id in enumerate(ids):
        state = blake2b(state + id.to_bytes(4, "big"), digest_size=16).digest()
        if n < forced:
            masked = [default_tokenizer().specials["<|endoftext|>"], *_candidates(state, id, max(0, others - 1))]
            out.append(Score(id, 0.0, tuple((other, MASKED) for other in masked[:others])))
        else:
            out.append(_score(state, id, others))
    return out


def _score(state: bytes, id: int, others: int) -> Score:
    chance = int.from_bytes(state[:4], "big") / 2**32
    logprob = -6.0 * chance**4 - 1e-6
    rest = -math.expm1(logprob)
    alternatives = enumerate(_candidates(state, id, others))
    return Score(id, logprob, tuple((other, math.log(rest * 0.55 * 0.45**n)) for n, other in alternatives))


def _candidates(state: bytes, id: int, count: int) -> list[int]:
    plain = default_tokenizer().plain_ids
    at = int.from_bytes(state[4:8], "big")
    step = int.from_bytes(state[8:10], "big")
    found: list[int] = []
    while len(found) < count:
        candidate = plain[at % len(plain)]
        if candidate != id and candidate not in found:
            found.append(candidate)
            at += step
        at += 1
    return found
