"""How well a rollout's turns merged: counted once per rollout, for tables and for trainers that watch it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal

from rollcage.results.fold import Rollout
from rollcage.trajectory.merge import choose, sequences
from rollcage.trajectory.sequence import Break, Sequence
from rollcage.types import POLICY, Purpose, Turn, Value


class MergeReport(Value):
    """What became of a rollout's turns."""

    rollout_id: str
    """The rollout."""
    turns: int
    """Model calls in all."""
    policy_turns: int
    """Those that a trainer should get: not replaced, of the purposes asked for."""
    sequences: int
    """Sequences they merge into; one per conversation is the best there is."""
    clean: int
    """Policy turns that begin a conversation, or continue one token by token."""
    broken: tuple[Break, ...] = ()
    """The others, and why."""
    breaks: dict[str, int] = {}
    """How many of each kind."""
    left_out: dict[str, int] = {}
    """Turns that are not for training, by why: `replaced`, `empty`, or their purpose."""
    sampled_tokens: int
    """Tokens the model said in policy turns, as the engine counted."""
    trained_tokens: int
    """Tokens that are trained."""
    delivered_fraction: float
    """Trained of sampled; 1.0 is the goal."""


def report(rollout: Rollout, *, purposes: Collection[Purpose] = POLICY) -> MergeReport:
    """What `sequences` makes of a rollout, in numbers."""
    merged = sequences(rollout, purposes=purposes)
    replaced = {turn.replaces for turn in rollout.turns}
    outside = Counter[str]()
    policy: list[Turn] = []
    for turn in rollout.turns:
        if turn.purpose not in purposes:
            outside[turn.purpose.value] += 1
        elif turn.index in replaced:
            outside["replaced"] += 1
        elif turn.trainable and not turn.tokens:
            outside["empty"] += 1
        else:
            policy.append(turn)
    starts = [each for sequence in merged for each in sequence.breaks if each.kind != "untrainable"]
    broken = sorted([*starts, *(hole for _, hole in choose(rollout.turns, purposes).holes)], key=lambda each: each.turn)
    sampled = sum(_sampled(turn) for turn in policy)
    trained = sum(sequence.trained_tokens for sequence in merged)
    return MergeReport(
        rollout_id=rollout.id,
        turns=len(rollout.turns),
        policy_turns=len(policy),
        sequences=len(merged),
        clean=len(policy) - len(broken),
        broken=tuple(broken),
        breaks=dict(Counter(each.kind for each in broken)),
        left_out=dict(outside),
        sampled_tokens=sampled,
        trained_tokens=trained,
        delivered_fraction=trained / sampled if sampled else 1.0,
    )


def _sampled(turn: Turn) -> int:
    counted = turn.usage.get("completion_tokens")
    return max(len(turn.tokens), counted if isinstance(counted, int) and not isinstance(counted, bool) else 0)


Fate = Literal["trained", "untrainable", "replaced", "empty", "other"]


class MergedTurn(Value):
    """What became of one model call."""

    index: int
    """The turn."""
    fate: Fate
    """`trained` in a sequence; `untrainable`; `replaced` by another attempt; `empty`: nothing was sampled; `other`:
    made for something else than the policy's work."""
    purpose: Purpose
    """What the agent made the call for."""
    tokens: int = 0
    """Tokens that the model said."""
    reason: str = ""
    """Why it is not trained."""


class MergedPart(Value):
    """A stretch of a sequence: context, or the answer of a turn."""

    turn: int
    """The turn whose answer it is, or that it leads up to."""
    tokens: int
    """How long it is."""
    trained: bool
    """Whether it is that turn's answer."""


class MergedSequence(Value):
    """A sequence without its ids: how its turns join."""

    index: int
    """Its place among the sequences of the rollout."""
    session: str = ""
    """The agent's own session."""
    purpose: Purpose = Purpose.AGENT
    """What these calls were made for."""
    parts: tuple[MergedPart, ...] = ()
    """From its first token to its last."""
    trained_tokens: int = 0
    """Tokens that are trained."""
    truncated: bool = False
    """One of its answers was cut at the ceiling of tokens."""
    policy_versions: tuple[str, ...] = ()
    """The weights of each of its turns."""
    breaks: tuple[Break, ...] = ()
    """Why it begins where it does, and what it passes over."""


class MergeView(Value):
    """How a rollout's turns join into sequences, what is trained, and where and why a sequence breaks."""

    report: MergeReport
    """In numbers."""
    sequences: tuple[MergedSequence, ...] = ()
    """In order."""
    turns: tuple[MergedTurn, ...] = ()
    """Every model call, in order of arrival."""


def merge_view(rollout: Rollout) -> MergeView:
    """What there is to see of a rollout's merging."""
    turns = {turn.index: turn for turn in rollout.turns}
    merged = sequences(rollout)
    trained = {index for sequence in merged for index in sequence.turns}
    return MergeView(
        report=report(rollout),
        sequences=tuple(_merged(sequence, turns) for sequence in merged),
        turns=tuple(_fate(turn, trained, rollout) for turn in sorted(turns.values(), key=lambda turn: turn.index)),
    )


def _merged(sequence: Sequence, turns: Mapping[int, Turn]) -> MergedSequence:
    parts: list[MergedPart] = []
    at = 0
    for index in sequence.turns:
        start, said = len(turns[index].prompt_ids), len(turns[index].tokens)
        if start > at:
            parts.append(MergedPart(turn=index, tokens=start - at, trained=False))
        parts.append(MergedPart(turn=index, tokens=said, trained=True))
        at = start + said
    return MergedSequence(
        index=sequence.index,
        session=sequence.session,
        purpose=sequence.purpose,
        parts=tuple(parts),
        trained_tokens=sequence.trained_tokens,
        truncated=sequence.truncated,
        policy_versions=sequence.policy_versions,
        breaks=sequence.breaks,
    )


def _fate(turn: Turn, trained: Collection[int], rollout: Rollout) -> MergedTurn:
    again = next((each.index for each in rollout.turns if each.replaces == turn.index), None)
    fate, reason = ("trained", "") if turn.index in trained else _why_not(turn, again)
    return MergedTurn(index=turn.index, fate=fate, purpose=turn.purpose, tokens=_sampled(turn), reason=reason)


def _why_not(turn: Turn, again: int | None) -> tuple[Fate, str]:
    if again is not None:
        return "replaced", f"turn {again + 1} repeats it, and the agent went on from there"
    if turn.purpose not in POLICY:
        return "other", f"it was made for a {turn.purpose.value}"
    if turn.trainable:
        return "empty", "nothing was sampled"
    return "untrainable", turn.untrainable_reason or turn.error or ""
