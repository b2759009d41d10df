"""Turns become sequences: exactly, once each, whatever the order they came in."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rollcage
from rollcage.results.fold import Rollout
from rollcage.trajectory import merge, report, sequences
from rollcage.types import Endpoint, Job, Outcome, Purpose, Reward, Task, Token, Turn
from support.turns import turn

JOB = Job(
    task=Task(id="t", instruction="do it"), model=Endpoint(base_url="http://x/v1", model="m"), group_id="g", metadata={}
)


def rollout(turns: Iterable[Turn], **more: Any) -> Rollout:
    return Rollout(id="r1", job=JOB, turns=tuple(turns), **more)


def test_turns_that_continue_each_other_become_one_sequence() -> None:
    turns = [turn(0, [1, 2], [3, 4]), turn(1, [1, 2, 3, 4, 9], [5]), turn(2, [1, 2, 3, 4, 9, 5, 8, 8], [6, 7])]
    (only,) = sequences(rollout(turns, score=Reward(total=0.5), outcome=Outcome.FINISHED))
    assert only.input_ids == (1, 2, 3, 4, 9, 5, 8, 8, 6, 7)
    assert only.loss_mask == (0, 0, 1, 1, 0, 1, 0, 0, 1, 1)
    assert only.logprobs == (0, 0, -0.0, -1 / 1024, 0, -1, 0, 0, -2, -2 - 1 / 1024)
    assert (only.turns, only.prompt_length, only.breaks, only.truncated) == ((0, 1, 2), 2, (), False)
    assert (only.reward, only.outcome, only.group_id, only.task_id) == (0.5, Outcome.FINISHED, "g", "t")


def test_the_package_offers_both_names() -> None:
    (only,) = rollcage.sequences(rollout([turn(0, [1], [2])]))
    assert isinstance(only, rollcage.Sequence) and repr(only).startswith("<Sequence 0 of r1")


def test_a_sequence_splits_at_its_first_answer_and_shifts_by_one() -> None:
    (only,) = sequences(rollout([turn(1, [1, 2], [3]), turn(2, [1, 2, 3, 4], [5])]))
    assert only.split() == ((1, 2), (3, 4, 5), (1, 0, 1), (-1.0, 0.0, -2.0))
    inputs, targets, mask, logprobs = only.shifted()
    assert (inputs, targets) == ((1, 2, 3, 4), (2, 3, 4, 5))
    assert (mask, logprobs) == ((0, 1, 0, 1), (0.0, -1.0, 0.0, -2.0))


def test_an_answer_that_came_back_as_other_tokens_begins_a_sequence_and_says_where() -> None:
    first, second = sequences(rollout([turn(0, [1, 2], [3, 4, 5]), turn(1, [1, 2, 3, 40, 50, 6], [3])]))
    assert (first.turns, first.breaks, second.turns) == ((0,), (), (1,))
    (found,) = second.breaks
    assert (found.kind, found.turn, found.after, found.position) == ("answer", 1, 0, 3)
    assert (found.expected, found.found, found.expected_text) == ((4, 5), (40, 50, 6), "<4><5>")
    assert "token 1 of the answer of turn 1" in found.reason


def test_a_change_before_the_answer_is_told_from_one_inside_it() -> None:
    _, second = sequences(rollout([turn(0, [1, 2, 3], [4]), turn(1, [1, 9, 3, 4, 5], [6])]))
    assert [(each.kind, each.position) for each in second.breaks] == [("prompt", 1)]


def test_a_prompt_that_ends_early_is_told_as_such() -> None:
    _, second = sequences(rollout([turn(0, [1, 2, 3], [4]), turn(1, [1, 2], [6])]))
    assert [(each.kind, each.position) for each in second.breaks] == [("shorter", 2)]


def test_an_attempt_that_was_replaced_is_never_trained() -> None:
    turns = [turn(0, [1, 2], [3, 3]), turn(1, [1, 2], [3, 4], replaces=0), turn(2, [1, 2, 3, 4], [5])]
    (only,) = sequences(rollout(turns))
    assert only.turns == (1, 2) and report(rollout(turns)).left_out == {"replaced": 1}


def test_titles_and_compactions_are_left_out_unless_asked_for() -> None:
    turns = [turn(0, [7], [8], purpose=Purpose.TITLE, session="s"), turn(1, [1], [2], session="s")]
    assert [each.turns for each in sequences(rollout(turns))] == [(1,)]
    both = sequences(rollout(turns), purposes=set(Purpose))
    assert [(each.purpose, each.turns, each.breaks) for each in both] == [("title", (0,), ()), ("agent", (1,), ())]
    assert report(rollout(turns)).left_out == {"title": 1}


def test_a_subagent_between_two_turns_breaks_nothing() -> None:
    sub: dict[str, Any] = {"purpose": Purpose.SUBAGENT, "session": "b", "parent_session": "a"}
    turns = [
        turn(0, [1], [2], session="a"),
        turn(1, [5], [6], **sub),
        turn(2, [5, 6, 7], [8], **sub),
        turn(3, [1, 2, 3], [4], session="a"),
    ]
    agent, subagent = sequences(rollout(turns))
    assert (agent.turns, agent.session, subagent.turns) == ((0, 3), "a", (1, 2))
    assert (subagent.session, subagent.parent_session, subagent.breaks) == ("b", "a", ())
    assert report(rollout(turns)).clean == 4


def test_two_conversations_in_one_session_do_not_disturb_each_other() -> None:
    turns = [turn(0, [1], [2]), turn(1, [5], [6]), turn(2, [1, 2, 3], [4]), turn(3, [5, 6, 7], [8])]
    assert [each.turns for each in sequences(rollout(turns))] == [(0, 2), (1, 3)]


def test_a_turn_that_two_paths_share_is_trained_in_the_one_that_goes_further() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1, 2, 3], [4]), turn(2, [1, 2, 5], [6]), turn(3, [1, 2, 5, 6], [7])]
    long, short = sequences(rollout(turns))
    assert (long.turns, short.turns) == ((0, 2, 3), (1,))
    assert (short.input_ids, short.loss_mask, short.prompt_length) == ((1, 2, 3, 4), (0, 0, 0, 1), 3)
    assert [(each.kind, each.after, each.position) for each in short.breaks] == [("branch", 2, 2)]


def test_an_untrainable_turn_is_context_and_a_hole_that_is_told() -> None:
    turns = [
        turn(0, [1], [2]),
        turn(1, [1, 2], [3], trainable=False, untrainable_reason="the engine gave no logprobs"),
        turn(2, [1, 2, 3, 4], [5]),
    ]
    (only,) = sequences(rollout(turns))
    assert (only.turns, only.loss_mask) == ((0, 2), (0, 1, 0, 0, 1))
    assert [(each.turn, each.kind) for each in only.breaks] == [(1, "untrainable")]
    said = report(rollout(turns))
    assert (said.policy_turns, said.clean, said.breaks) == (3, 2, {"untrainable": 1})
    assert (said.sampled_tokens, said.trained_tokens) == (3, 2) and said.delivered_fraction == pytest.approx(2 / 3)


def test_a_token_without_a_logprob_of_its_own_is_not_trained() -> None:
    tokens = (Token("a", 2, -1.0), Token("b", 3, -9999.0), Token("c", 4, float("nan")))
    (only,) = sequences(rollout([turn(0, [1], []).model_copy(update={"tokens": tokens})]))
    assert (only.loss_mask, only.logprobs) == ((0, 1, 0, 0), (0.0, -1.0, 0.0, 0.0))


def test_ids_that_no_trainer_takes_make_a_turn_a_hole() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1, 2], [1 << 40])]
    assert [each.kind for each in sequences(rollout(turns))[0].breaks] == ["untrainable"]


def test_an_answer_cut_at_the_ceiling_is_trained_and_flagged() -> None:
    (only,) = sequences(rollout([turn(0, [1], [2], finish_reason="length")]))
    assert only.truncated and only.loss_mask == (0, 1)


def test_policy_versions_stand_beside_the_turns() -> None:
    turns = [turn(0, [1], [2], policy_version="7"), turn(1, [1, 2], [3], policy_version="8")]
    assert sequences(rollout(turns))[0].policy_versions == ("7", "8")


def test_per_turn_gives_every_turn_its_own_sequence() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1, 2, 3], [4])]
    rows = sequences(rollout(turns), per_turn=True)
    assert [(row.input_ids, row.loss_mask) for row in rows] == [((1, 2), (0, 1)), ((1, 2, 3, 4), (0, 0, 0, 1))]


IDS = st.lists(st.integers(0, 2), max_size=4)


@st.composite
def histories(draw: st.DrawFn) -> list[Turn]:
    """Turns of which many continue others, some nearly: few ids, so that beginnings are often alike by chance."""
    turns: list[Turn] = []
    for index in range(draw(st.integers(1, 12))):
        base: list[int] = []
        if len(turns) > 0 and draw(st.booleans()):
            before = draw(st.sampled_from(turns))
            base = [*before.prompt_ids, *(token.id or 0 for token in before.tokens)]
            if base and draw(st.integers(0, 3)) == 0:
                base[draw(st.integers(0, len(base) - 1))] = 2
        prompt = [*base, *draw(IDS)] or [0]
        answer = draw(st.lists(st.integers(0, 2), min_size=0 if index % 5 == 4 else 1, max_size=3))
        made = turn(
            index,
            prompt,
            answer,
            session=draw(st.sampled_from(["a", "a", "b"])),
            purpose=draw(st.sampled_from([Purpose.AGENT, Purpose.AGENT, Purpose.TITLE])),
            trainable=draw(st.integers(0, 5)) > 0,
            replaces=draw(st.sampled_from([None, None, None, index - 1])) if index else None,
        )
        turns.append(made)
    return turns


def wanted(turns: list[Turn]) -> list[Turn]:
    """The turns whose tokens must be trained."""
    replaced = {each.replaces for each in turns}
    return [each for each in turns if each.trainable and each.purpose is Purpose.AGENT and each.index not in replaced]


@given(histories(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_every_sampled_token_is_trained_once_with_its_own_logprob_and_nothing_else_is(
    turns: list[Turn], per_turn: bool
) -> None:
    merged = sequences(rollout(turns), per_turn=per_turn)
    trained = Counter(
        (id_, logprob)
        for row in merged
        for id_, mask, logprob in zip(row.input_ids, row.loss_mask, row.logprobs, strict=True)
        if mask
    )
    assert trained == Counter((token.id, token.logprob) for each in wanted(turns) for token in each.tokens)
    assert all(
        logprob == 0 for row in merged for mask, logprob in zip(row.loss_mask, row.logprobs, strict=True) if not mask
    )


@given(histories())
@settings(max_examples=400, deadline=None)
def test_each_trained_token_stands_behind_exactly_what_the_model_saw(turns: list[Turn]) -> None:
    by_index = {each.index: each for each in turns}
    for row in sequences(rollout(turns)):
        for index in row.turns:
            own = by_index[index]
            whole = (*own.prompt_ids, *(token.id for token in own.tokens))
            assert row.input_ids[: len(whole)] == whole
            assert set(row.loss_mask[len(own.prompt_ids) : len(whole)]) == {1}


@given(histories())
@settings(max_examples=400, deadline=None)
def test_each_turn_continues_the_longest_one_it_can(turns: list[Turn]) -> None:
    """Found by trying all pairs."""
    for nodes in merge.choose(turns).nodes.values():
        merge.link(nodes)
        for node in nodes:
            prompt = node.turn.prompt_ids
            fits = [len(other.ids) for other in nodes if prompt[: len(other.ids)] == other.ids]
            assert (len(node.parent.ids) if node.parent else 0) == max(fits, default=0)


@given(histories(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_the_order_in_which_turns_came_changes_nothing(turns: list[Turn], chance: random.Random) -> None:
    shuffled = list(turns)
    chance.shuffle(shuffled)
    assert sequences(rollout(shuffled)) == sequences(rollout(turns))
    unreplaced = [each.model_copy(update={"replaces": None}) for each in turns]
    numbers = list(range(len(turns)))
    chance.shuffle(numbers)
    renumbered = [each.model_copy(update={"index": n}) for each, n in zip(unreplaced, numbers, strict=True)]
    assert Counter(row.input_ids for row in sequences(rollout(renumbered))) == Counter(
        row.input_ids for row in sequences(rollout(unreplaced))
    )


@given(histories())
@settings(max_examples=300, deadline=None)
def test_the_report_adds_up(turns: list[Turn]) -> None:
    said, merged = report(rollout(turns)), sequences(rollout(turns))
    assert said.turns == said.policy_turns + sum(said.left_out.values())
    assert said.sequences == len(merged) and said.clean + len(said.broken) == said.policy_turns
    assert said.trained_tokens == sum(len(each.tokens) for each in wanted(turns))
    firsts = {each.turn for each in said.broken if each.kind != "untrainable"}
    assert firsts <= {row.turns[0] for row in merged}
    assert all(each.reason for each in said.broken) and 0 <= said.delivered_fraction <= 1


class Counting:
    """Counts what is hashed, and how often a hash is read."""

    bytes = reads = 0

    def __init__(self, real: Any = None, **options: Any) -> None:
        self._real = real or blake2b(**options)

    def update(self, data: memoryview) -> None:
        Counting.bytes += len(data)
        self._real.update(data)

    def copy(self) -> Counting:
        return Counting(self._real.copy())

    def digest(self) -> Any:
        Counting.reads += 1
        return self._real.digest()


def chain(count: int, step: int) -> list[Turn]:
    """One conversation that grows."""
    ids, turns = list(range(step)), []
    for index in range(count):
        answer = [index] * step
        turns.append(turn(index, ids, answer))
        ids = [*ids, *answer]
    return turns


@pytest.mark.parametrize(
    "turns",
    [
        chain(60, 3),
        [turn(index, range(200), [index]) for index in range(60)],
        [turn(index, range(index + 1), [99]) for index in range(60)],
        [turn(index, [*range(100), index], range(index + 1)) for index in range(60)],
    ],
    ids=["a chain", "one prompt again and again", "prompts that grow and never fit", "answers of every length"],
)
def test_merging_takes_no_more_steps_than_there_are_tokens(turns: list[Turn], monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    def counted(one: bytes, other: bytes) -> int:
        nonlocal compared
        compared += min(len(one), len(other))
        return real(one, other)

    real = merge.common
    monkeypatch.setattr(merge, "common", counted)
    monkeypatch.setattr(merge, "blake2b", Counting)
    Counting.bytes = Counting.reads = 0
    merged = sequences(rollout(turns))
    tokens = sum(len(each.prompt_ids) + len(each.tokens) for each in turns)
    assert Counting.bytes == merge.WIDTH * tokens and Counting.reads <= tokens and compared <= merge.WIDTH * tokens
    assert sum(len(row.input_ids) for row in merged) <= tokens
