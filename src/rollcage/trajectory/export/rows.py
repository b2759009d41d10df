"""A rollout as rows of a format: pure."""

from __future__ import annotations

from collections.abc import Iterable

from rollcage.results.fold import Rollout
from rollcage.trajectory.export.atif import trajectory_of
from rollcage.trajectory.export.columns import COLUMNS, Format
from rollcage.trajectory.merge import sequences
from rollcage.trajectory.sequence import Sequence
from rollcage.types import POLICY, JsonObject, Turn

IGNORED = -100
"""The label of what is not trained, as every trainer knows it."""


def rows_of(rollout: Rollout, format: Format, *, per_turn: bool = False) -> list[JsonObject]:
    """What a file of this format holds of a rollout; nothing where it has none of it.

    `per_turn`: one sequence per turn (`sequences` and `sft`).
    """
    match format:
        case "sequences":
            return [sequence_row(each) for each in sequences(rollout, per_turn=per_turn)]
        case "sft":
            return [_sft(rollout, each) for each in sequences(rollout, per_turn=per_turn)]
        case "turns":
            return [_turn(rollout, turn) for turn in rollout.turns]
        case "messages":
            return [_messages(rollout, turn) for turn in _conversations(rollout.turns)]
        case "atif":
            return [{**_of_rollout(rollout), "trajectory": trajectory_of(rollout)}] if rollout.turns else []


def _of_rollout(rollout: Rollout) -> JsonObject:
    return {
        "rollout_id": rollout.id,
        "group_id": rollout.job.group_id,
        "task_id": rollout.job.task.id,
        "reward": rollout.reward,
        "trust": rollout.trust,
        "blame": rollout.blame.value if rollout.blame else None,
        "outcome": rollout.outcome.value if rollout.outcome else None,
    }


def sequence_row(sequence: Sequence) -> JsonObject:
    """A sequence as files and the server write it."""
    # Not `model_dump`: it would copy each of many thousand ids.
    row = {name: getattr(sequence, name) for name in COLUMNS["sequences"]}
    row["outcome"] = sequence.outcome.value if sequence.outcome else None
    row["purpose"] = sequence.purpose.value
    row["blame"] = sequence.blame.value if sequence.blame else None
    row["breaks"] = [each.model_dump(mode="json") for each in sequence.breaks]
    return row


def _sft(rollout: Rollout, sequence: Sequence) -> JsonObject:
    marked = zip(sequence.input_ids, sequence.loss_mask, strict=True)
    return {
        "input_ids": sequence.input_ids,
        "assistant_masks": sequence.loss_mask,
        "labels": tuple(id_ if mask else IGNORED for id_, mask in marked),
        **_of_rollout(rollout),
    }


def _turn(rollout: Rollout, turn: Turn) -> JsonObject:
    tokens = turn.tokens if turn.trainable else ()
    return {
        **_of_rollout(rollout),
        "turn": turn.index,
        "purpose": turn.purpose.value,
        "session": turn.session,
        "parent_session": turn.parent_session,
        "replaces": turn.replaces,
        "prompt_token_ids": turn.prompt_ids if turn.trainable else (),
        "completion_token_ids": [token.id for token in tokens],
        "logprobs": [token.logprob for token in tokens],
        "trainable": turn.trainable,
        "untrainable_reason": turn.untrainable_reason,
        "policy_version": turn.policy_version,
        "finish_reason": turn.finish_reason,
        "error": turn.error,
        "sampling": turn.sampling,
        "request": turn.request,
        "message": turn.message,
        "usage": turn.usage,
    }


def _messages(rollout: Rollout, turn: Turn) -> JsonObject:
    return {
        **_of_rollout(rollout),
        "session": turn.session,
        "purpose": turn.purpose.value,
        "messages": [*_list(turn, "messages"), turn.message],
        "tools": _list(turn, "tools"),
    }


def _conversations(turns: Iterable[Turn]) -> list[Turn]:
    """The last turn of each conversation: its request has all that came before, until the agent began anew."""
    turns = list(turns)
    replaced = {turn.replaces for turn in turns}
    ends: list[Turn] = []
    open_: dict[tuple[str, str], Turn] = {}
    for turn in turns:
        if turn.purpose not in POLICY or turn.error is not None or turn.index in replaced or not turn.message:
            continue
        place = (turn.session, turn.purpose.value)
        before = open_.get(place)
        if before is not None and len(_list(turn, "messages")) <= len(_list(before, "messages")):
            ends.append(before)
        open_[place] = turn
    return sorted([*ends, *open_.values()], key=lambda turn: turn.index)


def _list(turn: Turn, name: str) -> list[JsonObject]:
    value = turn.request.get(name)
    return value if isinstance(value, list) else []
