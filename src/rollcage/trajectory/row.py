"""One row per rollout, for trainers that take no more: which of its sequences, and what that leaves out."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Literal

from rollcage.trajectory.sequence import Sequence
from rollcage.types import Value

Keep = Literal["longest", "last"]
"""`longest`: the sequence that trains most tokens, so that fewest are lost; of equal ones the later. `last`: the one
that the rollout's last turn is in."""


class Row(Value):
    """A sequence as prompt and response, and what of the rollout is not in it."""

    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    response_mask: tuple[int, ...] = ()
    """1 where the model spoke."""
    response_logprobs: tuple[float, ...] = ()
    turns: tuple[int, ...] = ()
    """The turns that it trains."""
    truncated: bool = False
    """An answer was cut, by the engine or by `most`."""
    dropped_sequences: int = 0
    """The rollout's other sequences."""
    dropped_tokens: int = 0
    """Sampled tokens that are not trained here: of other sequences, and beyond `most`."""

    @property
    def trained_tokens(self) -> int:
        """How many of its tokens are trained."""
        return sum(self.response_mask)

    def masked(self, end: int) -> Row:
        """The same with nothing to train: one masked token, since trainers take no empty response."""
        empty = {"response_ids": (end,), "response_mask": (0,), "response_logprobs": (0.0,)}
        return self.model_copy(update={"prompt_ids": self.prompt_ids or (end,), **empty})


def row_of(sequences: Items[Sequence], *, keep: Keep = "longest", most: int | None = None) -> Row:
    """The one row of a rollout; an empty one where nothing can be trained.

    `most`: tokens that the response may have. A longer one ends with the last whole answer that fits, or inside the
    first one.
    """
    usable = [each for each in sequences if each.trained_tokens]
    if not usable:
        return Row(dropped_sequences=len(sequences))
    if keep == "last":
        chosen = max(usable, key=lambda each: max(each.turns))
    else:
        chosen = max(reversed(usable), key=lambda each: each.trained_tokens)
    prompt, response, mask, logprobs = chosen.split()
    end = len(response) if most is None or len(response) <= most else _end(mask, most)
    return Row(
        prompt_ids=prompt,
        response_ids=response[:end],
        response_mask=mask[:end],
        response_logprobs=logprobs[:end],
        turns=chosen.turns,
        truncated=chosen.truncated or end < len(response),
        dropped_sequences=len(sequences) - 1,
        dropped_tokens=sum(each.trained_tokens for each in sequences) - sum(mask[:end]),
    )


def _end(mask: tuple[int, ...], most: int) -> int:
    """Where an answer ends, at most there: what tools said must not come last."""
    ends = (at for at in range(most, 0, -1) if mask[at - 1] and not mask[at])
    return next(ends, most)
