"""Recognises an attempt that repeats a broken one, so that the log says which of the two the agent went on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollcage.types import JsonObject

REMEMBERED = 16
"""Attempts of a rollout that are remembered; an agent that repeats one does so soon."""
REMEMBERED_BYTES = 32 << 20
"""How much they may hold between them."""

_CONVERSATION = ("messages", "prompt", "system", "instructions", "input", "tools")
"""What a repeated request has in common with the first. The rest may differ: some agents try again without a stream."""


@dataclass
class Attempt:
    """A call, as far as one needs to know it to recognise it."""

    index: int
    session: str
    body: JsonObject
    """As one of chat completions, before policy."""
    size: int
    """Of the body, about."""
    broken: bool = False
    """Whether it failed, or its agent has left it."""


class Attempts:
    """The calls of one rollout that are running or broke: those that may be repeated."""

    def __init__(self) -> None:
        self._attempts: list[Attempt] = []

    def begin(self, attempt: Attempt, headers: Mapping[str, str]) -> int | None:
        """A call begins; returns the index of the one it repeats, if it does.

        A call that merely says the same as a good one before it repeats nothing.
        """
        again = headers.get("x-stainless-retry-count", "0") != "0"
        repeated = next(
            (earlier for earlier in reversed(self._attempts) if (earlier.broken or again) and _same(earlier, attempt)),
            None,
        )
        others = [earlier for earlier in self._attempts if earlier is not repeated]
        self._attempts = [*others[-REMEMBERED:], attempt]
        while sum(each.size for each in self._attempts) > REMEMBERED_BYTES:
            del self._attempts[0]
        return None if repeated is None else repeated.index

    def leave(self, index: int) -> None:
        """The agent has left a call that is still running."""
        for attempt in self._attempts:
            if attempt.index == index:
                attempt.broken = True

    def end(self, index: int, *, broken: bool) -> None:
        """A call is over. Good ones are forgotten."""
        for attempt in self._attempts:
            if attempt.index == index:
                attempt.broken = broken
        if not broken:
            self._attempts = [attempt for attempt in self._attempts if attempt.index != index]


def _same(one: Attempt, other: Attempt) -> bool:
    if one.session != other.session:
        return False
    return all(one.body.get(name) == other.body.get(name) for name in _CONVERSATION)
