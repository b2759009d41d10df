"""Says why a turn does not continue another one: where they differ, and what stands there."""

from __future__ import annotations

from collections.abc import Mapping

from rollcage.trajectory.sequence import Break, BreakKind
from rollcage.types import Turn

SHOWN = 8
"""Ids that a break shows of either side."""
LONGEST = 80
"""Characters of text that its reason quotes."""


def left_out(turn: Turn) -> Break:
    """A turn that cannot be trained on."""
    reason = turn.untrainable_reason or "its token ids are no 32-bit numbers"
    return Break(turn=turn.index, kind="untrainable", reason=f"turn {turn.index + 1} cannot be trained on: {reason}")


def compared(
    other: Turn, ids: tuple[int, ...], turn: Turn, at: int, texts: Mapping[int | None, str], *, branch: bool
) -> Break:
    """A turn that begins a sequence, beside the one it might have continued.

    `ids` are those of the other, prompt and answer; `at`: how many of them the turn's prompt begins with. `texts`: of
    tokens that were sampled somewhere. `branch`: whether both continue a third one.
    """
    start, mine = len(other.prompt_ids), turn.prompt_ids
    kind: BreakKind = "branch" if branch or at == len(mine) == start else _place(at, start, len(mine))
    expected, found = ids[at : at + SHOWN], mine[at : at + SHOWN]
    saying = "".join(token[0] for token in other.tokens[max(at - start, 0) :][:SHOWN]) if at >= start else ""
    known = all(each in texts for each in found)
    there = "".join(texts[each] for each in found) if known else ""
    return Break.model_construct(
        None,
        turn=turn.index,
        kind=kind,
        after=other.index,
        position=at,
        expected=expected,
        found=found,
        expected_text=saying,
        found_text=there,
        reason=_words(kind, turn, other, at, saying or list(expected), there or list(found)),
    )


def _place(at: int, start: int, length: int) -> BreakKind:
    return "shorter" if at == length else "answer" if at >= start else "prompt"


def _words(kind: str, turn: Turn, other: Turn, at: int, expected: object, found: object) -> str:
    start = len(other.prompt_ids)
    where = f"token {at} of its prompt"
    if at >= start:
        where += f", token {at - start} of the answer of turn {other.index + 1}"
    if kind == "shorter":
        return f"turn {turn.index + 1} does not continue turn {other.index + 1}: its prompt ends at {where}"
    if kind == "branch" and at == len(turn.prompt_ids):
        return f"turn {turn.index + 1} was sampled after the same prompt as turn {other.index + 1}"
    said = f"{_quoted(expected)} was there, it has {_quoted(found)}"
    verb = "leaves the path of" if kind == "branch" else "does not continue"
    return f"turn {turn.index + 1} {verb} turn {other.index + 1}: at {where}, {said}"


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
