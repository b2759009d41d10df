"""Merges a rollout's turns into sequences, by the ids that the engine told: exact, or not at all.

A turn continues another one where its prompt begins with all of that one's tokens, prompt and answer. Of several the
longest counts, whenever each arrived: turns form a graph. Each path from a first turn to a last one is a sequence, and
a turn that two paths share is trained in the one that goes further. Nothing is realigned or tokenised again: a prompt
that differs in one token begins a sequence of its own, and a `Break` says where and why.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from rollcage.results.fold import Rollout
from rollcage.trajectory.breaks import compared, left_out
from rollcage.trajectory.sequence import Break, Sequence
from rollcage.types import POLICY, Purpose, TokenColumns, Turn

WIDTH = 4
"""Bytes per id."""
_SIGN = WIDTH - 1 if sys.byteorder == "little" else 0
_INFINITE = float("inf")
NO_LOGPROB = -9999.0
"""What vLLM writes where it has none."""


@dataclass(eq=False)
class LinkedTurn:
    """A turn that can be trained on, and how it hangs together with the others."""

    turn: Turn
    sampled: tuple[int, ...]
    """Its answer."""
    raw: bytes
    """Prompt and answer, `WIDTH` bytes each."""
    parent: LinkedTurn | None = None
    children: list[LinkedTurn] = field(default_factory=list)
    reach: int = 0
    """Tokens of the longest path through it."""

    @property
    def start(self) -> int:
        """Where its answer begins."""
        return len(self.turn.prompt_ids)

    @property
    def end(self) -> int:
        """Where its answer ends."""
        return len(self.turn.prompt_ids) + len(self.sampled)

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.turn.prompt_ids, *self.sampled)


Path = tuple[list[LinkedTurn], list[Break]]
"""The turns that a sequence trains, and why it begins where it does."""


class Chosen(NamedTuple):
    """The turns of a rollout, sorted out."""

    nodes: dict[tuple[str, Purpose], list[LinkedTurn]]
    """Those that can be trained on, by conversation, in order of arrival."""
    holes: list[tuple[Turn, Break]]
    """Those that cannot, and why."""


def sequences(rollout: Rollout, *, per_turn: bool = False, purposes: Collection[Purpose] = POLICY) -> list[Sequence]:
    """What a trainer takes of a rollout. Every token of a trainable turn is trained exactly once.

    `per_turn`: one sequence per turn, for trainers that take steps. `purposes`: what else is trained beside the agent
    and its subagents.
    """
    chosen = choose(rollout.turns, purposes)
    found: list[Path] = []
    for nodes in chosen.nodes.values():
        if per_turn:
            found += [([node], []) for node in nodes]
        else:
            found += _paths(nodes)
    found.sort(key=lambda each: each[0][0].turn.index)
    for turn, hole in chosen.holes:
        if (breaks := _passing_over(turn, found)) is not None:
            breaks.append(hole)
    # What was answered from the record of another rollout was sampled there, and is trained there.
    found = [(path, breaks) for path, breaks in found if not path[-1].turn.recorded]
    return [_sequence(rollout, place, path, breaks) for place, (path, breaks) in enumerate(found)]


def choose(turns: Iterable[Turn], purposes: Collection[Purpose] = POLICY) -> Chosen:
    """The turns that count, and those that should and cannot. What was replaced never was, for the agent."""
    turns = sorted(turns, key=lambda turn: turn.index)
    replaced = {turn.replaces for turn in turns}
    chosen = Chosen({}, [])
    for turn in turns:
        if turn.purpose not in purposes or turn.index in replaced:
            continue
        node = _node(turn) if turn.trainable else None
        if node is None:
            chosen.holes.append((turn, left_out(turn)))
        elif node.sampled:
            chosen.nodes.setdefault((turn.session, turn.purpose), []).append(node)
    return chosen


def _node(turn: Turn) -> LinkedTurn | None:
    """None where its ids are none that a trainer could take."""
    sampled = tuple(_column(turn, "ids"))
    try:
        # Unsigned is twice as quick as signed; the sign is looked for in every fourth byte.
        raw = array("I", turn.prompt_ids).tobytes() + array("I", sampled).tobytes()
    except (OverflowError, TypeError):
        return None
    return LinkedTurn(turn, sampled, raw) if raw[_SIGN::WIDTH].isascii() else None


def _column(turn: Turn, name: Literal["texts", "ids", "logprobs"]) -> Values[Any]:
    """What a turn's tokens have of one kind, without a look at their alternatives."""
    if isinstance(turn.tokens, TokenColumns):
        return getattr(turn.tokens, name)  # type: ignore[no-any-return]
    at = ("texts", "ids", "logprobs").index(name)
    return [token[at] for token in turn.tokens]


def link(nodes: list[LinkedTurn]) -> None:
    """Find for each turn the one it continues. Linear in tokens: each is hashed once.

    A parent is shorter than its child, so it is known by the hash of all its tokens when the child's turn comes, and a
    prompt is looked up at the lengths of those that are known.
    """
    lengths = sorted({len(node.raw) for node in nodes})
    whole: dict[bytes, LinkedTurn] = {}
    for node in sorted(nodes, key=lambda node: (node.start, node.turn.index)):
        view, hashed, at = memoryview(node.raw), blake2b(digest_size=16), 0
        for length in lengths[: bisect_right(lengths, node.start * WIDTH)]:
            hashed.update(view[at:length])
            at = length
            node.parent = whole.get(hashed.copy().digest()) or node.parent
        hashed.update(view[at:])
        whole.setdefault(hashed.digest(), node)
        if node.parent is not None:
            node.parent.children.append(node)


def _paths(nodes: list[LinkedTurn]) -> list[Path]:
    """The sequences of one conversation, as the turns that each of them trains, with why each begins where it does."""
    link(nodes)
    for node in sorted(nodes, key=lambda node: -node.start):
        # Children first: each has a longer prompt than its parent.
        node.reach = max([node.end, *[child.reach for child in node.children]])
    paths: list[Path] = []
    texts: dict[int | None, str] = {}
    if len(nodes) > 1:
        for node in nodes:
            texts.update(each for each in zip(node.sampled, _column(node.turn, "texts"), strict=True) if each[1])
    for place, node in enumerate(nodes):
        main = _main(node.parent) if node.parent else None
        if main is node:
            continue
        path, child = [node], _main(node)
        while child is not None:
            path.append(child)
            child = _main(child)
        other = main or (nodes[place - 1] if place else None)
        paths.append((path, [_break(other, node, texts, branch=main is not None)] if other else []))
    return paths


def _main(node: LinkedTurn) -> LinkedTurn | None:
    """Of the turns that continue this one, the one whose path goes furthest."""
    return min(node.children, key=lambda child: (-child.reach, child.turn.index), default=None)


def _break(other: LinkedTurn, node: LinkedTurn, texts: dict[int | None, str], *, branch: bool) -> Break:
    at = common(other.raw, node.raw[: node.start * WIDTH]) // WIDTH
    return compared(other.turn, other.ids, node.turn, at, texts, branch=branch)


def common(one: bytes, other: bytes) -> int:
    """How many bytes two beginnings have in common: by halves, so that it stays linear and quick."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _passing_over(turn: Turn, found: list[Path]) -> list[Break] | None:
    """The breaks of the sequence with the last turn before this one, in the same conversation; None: there is none."""
    mine = [(path, breaks) for path, breaks in found if path[0].turn.session == turn.session]
    before = [(node.turn.index, breaks) for path, breaks in mine for node in path if node.turn.index < turn.index]
    return max(before, key=lambda each: each[0])[1] if before else mine[0][1] if mine else None


def _sequence(rollout: Rollout, place: int, path: list[LinkedTurn], breaks: list[Break]) -> Sequence:
    last = path[-1]
    shared = [node for node in path if node.turn.recorded]
    path = path[len(shared) :]
    first = path[0].turn
    ids = last.ids
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    for node in path:
        scores = _column(node.turn, "logprobs")
        usable = [score is not None and NO_LOGPROB < score < _INFINITE for score in scores]
        mask[node.start : node.end] = map(int, usable)
        logprobs[node.start : node.end] = (
            scores if all(usable) else [score if use else 0.0 for score, use in zip(scores, usable, strict=True)]
        )
    return Sequence.model_construct(
        None,
        input_ids=ids,
        loss_mask=tuple(mask),
        logprobs=tuple(logprobs),
        reward=rollout.reward,
        trust=rollout.trust,
        blame=rollout.blame,
        rollout_id=rollout.id,
        group_id=rollout.job.group_id,
        task_id=rollout.job.task.id,
        index=place,
        session=first.session,
        parent_session=first.parent_session,
        purpose=first.purpose,
        turns=tuple(node.turn.index for node in path),
        prompt_length=path[0].start,
        truncated=any(node.turn.finish_reason == "length" for node in path),
        policy_versions=tuple(node.turn.policy_version for node in path),
        outcome=rollout.outcome,
        breaks=tuple(breaks),
        forked_from=rollout.origin.rollout_id if rollout.origin else "",
        shared_prefix=shared[-1].end if shared else 0,
    )
