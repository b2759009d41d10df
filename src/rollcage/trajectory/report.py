"""How well a rollout's turns merged: counted once per rollout, for tables and for trainers that watch it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from rollcage.events import Rollout
from rollcage.trajectory.merge import choose, sequences
from rollcage.trajectory.sequence import Break
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
