"""Replay and fork: recorded answers in a new box, what differs and at which turn, live continuations from one point."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage import UsageError
from rollcage.agents.base import Scriptable
from rollcage.events import TurnEnded
from rollcage.results.fold import Rollout
from rollcage.runner import Runner
from rollcage.runner.registry import Registry
from rollcage.runner.replay import fork, replay, report_of
from rollcage.runner.reverify import Correction
from rollcage.settings import Settings
from rollcage.simulators import ScriptedModel
from rollcage.simulators.recorded import difference
from rollcage.store import Store
from rollcage.tasks import load
from rollcage.trajectory import sequences
from rollcage.types import Check, Outcome, Purpose, ScriptedCall, ScriptedTurn, Task
from rollcage.wiring import agents
from support.paths import ROOT
from support.playing import Play


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),))


SCRIPT = (bash("date > when.txt; echo one"), bash("echo two > two.txt"), ScriptedTurn(text="Done."))
TASK = Task(id="replayed", instruction="Write two.txt.", verify=("test -e two.txt",))


@pytest.fixture
async def original(play: Play) -> Rollout:
    rollout = await play(TASK, agent="mini", script=SCRIPT)
    assert rollout.reward == 1.0 and len(rollout.turns) == 3
    return rollout


async def test_a_replay_asks_and_earns_the_same_without_a_model(
    original: Rollout, runner: Runner, model: ScriptedModel
) -> None:
    await model.__aexit__(None, None, None)
    played, report = await replay(runner, original)
    assert (report.same_reward, report.same_requests, report.requests) == (True, True, 3)
    assert report.same + report.alike == 3 and played.outcome == original.outcome
    assert [turn.message for turn in played.turns] == [turn.message for turn in original.turns]
    assert [turn.tokens for turn in played.turns] == [turn.tokens for turn in original.turns]
    assert [turn.prompt_ids for turn in played.turns] == [turn.prompt_ids for turn in original.turns]
    assert played.origin and (played.origin.rollout_id, played.origin.how) == (original.id, "replay")


@pytest.mark.parametrize("task", sorted(Path("examples").glob("*.toml")), ids=lambda path: path.stem)
async def test_every_example_is_replayed_as_it_was(task: Path, play: Play, runner: Runner) -> None:
    """The history that one of them makes in git is the same in every box."""
    file = load(task)
    original = await play(file.task, script=file.task.solution)
    _, report = await replay(runner, original)
    assert (report.differences, report.reward_before, report.reward) == ((), 1.0, 1.0)
    assert report.requests >= len(file.task.solution)


TESTED = """
import unittest

class Two(unittest.TestCase):
    def test_two(self):
        with open("two.txt") as file:
            self.assertEqual(file.read(), "two\\n")
"""
SCRIPTED = """test "$(untrusted cat two.txt)" = two && echo '{"reward": 0.5, "style": 1}' > ${REWARD_FILE%.txt}.json"""


async def test_what_tests_leave_is_replayed_and_held_to_its_original(
    original: Rollout, store: Store, state_dir: Path, tmp_path: Path
) -> None:
    """`scripts/replay_tests.py`: of two logs one is as it was, and one as if a command had printed something else."""
    changed = otherwise(original)
    for name, turns in (("same", original.turns), ("other", changed.turns)):
        (tmp_path / "left" / name).mkdir(parents=True)
        async with Store.open(tmp_path / "left" / name / "rollouts.db") as copy:
            for entry in await store.read(original.id):
                event = entry.event
                event = TurnEnded(turn=turns[event.turn.index]) if isinstance(event, TurnEnded) else event
                await copy.append(original.id, event)
    command = [sys.executable, str(ROOT / "scripts/replay_tests.py"), str(tmp_path / "left"), "--state", str(state_dir)]
    ended = await anyio.run_process(command, check=False)
    said = ended.stdout.decode()
    assert ended.returncode == 1, said + ended.stderr.decode()
    assert f"same: {original.id} by mini, finished: the same" in said, said
    assert f"other: {original.id} by mini, finished: turn 3: messages[" in said, said


STYLES: dict[str, tuple[dict[str, Any], float | None]] = {
    "commands": ({"verify": ("test -e two.txt", "test -e three.txt")}, 0.5),
    "checks": ({"checks": (Check(kind="unittest", path="test_it.py"),), "tests": {"test_it.py": TESTED}}, 1.0),
    "script": ({"test_script": SCRIPTED, "isolate": True}, 0.5),
    "fresh": ({"verify": ("test -e two.txt",), "verify_in": "fresh"}, 1.0),
    "restored": ({"verify": ("grep -q old two.txt",), "files": {"two.txt": "old"}, "restore": ("two.txt",)}, 1.0),
    "none": ({}, None),
    "setup fails": ({"setup": ("false",), "verify": ("true",)}, None),
}


@pytest.mark.parametrize("style", STYLES)
async def test_every_style_of_verifier_is_replayed_as_it_was(style: str, play: Play, runner: Runner) -> None:
    fields, reward = STYLES[style]
    original = await play(Task.model_validate({"instruction": "Write two.txt.", **fields}), agent="mini", script=SCRIPT)
    played, report = await replay(runner, original)
    assert (original.reward, report.reward, report.differences) == (reward, reward, ()), (original.error, played.error)
    assert (played.outcome, played.blame, played.score) == (original.outcome, original.blame, original.score)


def otherwise(original: Rollout, at: int = 2) -> Rollout:
    """The same record, as if the command before this turn had said something else."""
    turns = list(original.turns)
    request = turns[at].request
    messages = [*request["messages"][:-1], {**request["messages"][-1], "content": "something else"}]
    turns[at] = turns[at].model_copy(update={"request": {**request, "messages": messages}})
    return original.model_copy(update={"turns": tuple(turns)})


@pytest.mark.parametrize(("verify", "reward"), [(("grep -q two two.txt",), 1.0), (("true", "test -e three.txt"), 0.5)])
async def test_a_verifier_of_today_is_tried_on_the_rollouts_of_yesterday(
    verify: tuple[str, ...], reward: float, original: Rollout, runner: Runner
) -> None:
    task = TASK.model_copy(update={"verify": verify})
    played, report = await replay(runner, original, correction=Correction(task=task))
    assert (report.same_requests, report.reward_before, report.reward) == (True, 1.0, reward), played.error
    assert report.same_reward == (reward == 1.0)


async def test_where_the_agent_asks_something_else_it_says_which_turn_and_stops(
    original: Rollout, runner: Runner
) -> None:
    played, report = await replay(runner, otherwise(original))
    assert not report.same_requests and [each.turn for each in report.differences] == [3]
    assert "messages[" in report.differences[0].what and "something else" in report.differences[0].what
    assert played.turns[2].status == 400 and "differs from turn 3 on" in (played.turns[2].error or "")


async def test_or_goes_on_by_position_or_hands_over_to_a_live_model(
    original: Rollout, runner: Runner, model: ScriptedModel
) -> None:
    played, report = await replay(runner, otherwise(original), on_difference="position")
    assert played.turns[2].message == original.turns[2].message and not report.same_requests
    assert sequences(original) and not sequences(played), "it is its original's"
    live = model.endpoint((*SCRIPT[:2], ScriptedTurn(text="Live words.")))
    played, _ = await replay(runner, otherwise(original), on_difference="live", live=live)
    assert played.turns[2].message["content"] == "Live words." and played.reward == 1.0
    assert [turn.recorded for turn in played.turns] == [True, True, False]
    (sequence,) = sequences(played)
    assert sequence.turns == (2,) and sum(sequence.loss_mask) == len(played.turns[2].tokens)
    with pytest.raises(UsageError, match="hand over"):
        await replay(runner, original, on_difference="live")


async def test_a_fork_shares_the_turns_before_and_goes_on_live(
    original: Rollout, runner: Runner, model: ScriptedModel, store: Store
) -> None:
    live = model.endpoint((SCRIPT[0], bash("true"), ScriptedTurn(text="Gave up.")))
    forked = await fork(runner, original, at=2, live=live, n=2)
    assert [rollout.reward for rollout in forked] == [0.0, 0.0]
    for rollout in forked:
        assert rollout.turns[0].tokens == original.turns[0].tokens
        assert rollout.turns[-1].message["content"] == "Gave up."
        assert rollout.origin and (rollout.origin.how, rollout.origin.turn) == ("fork", 2)
        assert rollout.job.group_id == f"fork:{original.id}:2"
        (sequence,) = sequences(rollout)
        prefix = len(rollout.turns[0].prompt_ids) + len(rollout.turns[0].tokens)
        assert (sequence.forked_from, sequence.shared_prefix) == (original.id, prefix)
        assert not any(sequence.loss_mask[:prefix]) and any(sequence.loss_mask[prefix:])
    with pytest.raises(UsageError, match="there is no turn 9"):
        await fork(runner, original, at=9, live=live)


async def test_a_fork_that_does_not_get_to_its_turn_says_so_and_does_not_go_on(
    original: Rollout, runner: Runner, model: ScriptedModel
) -> None:
    changed, live = otherwise(original, at=1), model.endpoint(SCRIPT)
    (stopped,) = await fork(runner, changed, at=3, live=live)
    (odd,) = report_of(changed, stopped).differences
    assert odd.turn == 2 and "something else" in odd.what
    assert (stopped.outcome, stopped.reward) == (Outcome.ABORTED, None)
    assert len(stopped.turns) == 2 and not sequences(stopped)
    (placed,) = await fork(runner, changed, at=3, live=live, on_difference="position")
    assert [turn.recorded for turn in placed.turns] == [True, True, False] and placed.reward == 1.0
    assert [each.turn for each in report_of(changed, placed).differences] == [2]


async def test_what_comes_before_its_turn_at_a_fork_is_asked_live_and_trained_as_such(
    play: Play, runner: Runner, model: ScriptedModel
) -> None:
    """An agent whose calls run beside each other may make them in another order."""
    calls = [CURL.format(path="chat/completions", body=BODY % word) for word in ("first", "second")]
    task = Task(id="two", instruction="; ".join(calls), verify=("true",))
    original = await play(task, agent="shell", script=(ScriptedTurn(text="One."), ScriptedTurn(text="Two.")))
    first, second = original.turns
    turns = (second.model_copy(update={"index": 0}), first.model_copy(update={"index": 1}))
    live = model.endpoint((ScriptedTurn(text="Live."),))
    (forked,) = await fork(runner, original.model_copy(update={"turns": turns}), at=2, live=live)
    assert [(turn.recorded, turn.message["content"]) for turn in forked.turns] == [(False, "Live."), (True, "One.")]
    (sequence,) = sequences(forked)
    assert (sequence.turns, sequence.shared_prefix) == ((0,), 0) and any(sequence.loss_mask)


async def test_the_answer_at_the_fork_can_be_given_by_hand(
    original: Rollout, runner: Runner, model: ScriptedModel
) -> None:
    live = model.endpoint((*SCRIPT[:2], ScriptedTurn(text="After the edit.")))
    call = {"id": "by-hand", "type": "function"}
    call["function"] = {"name": "bash", "arguments": '{"command": "echo x > two.txt"}'}  # type: ignore[assignment]
    (rollout,) = await fork(runner, original, at=2, live=live, edit={"content": None, "tool_calls": [call]})
    assert rollout.reward == 1.0 and rollout.files["two.txt"] == "x\n"
    assert rollout.turns[2].message["content"] == "After the edit." and not rollout.turns[1].trainable


def test_times_and_ids_are_no_difference_and_words_are() -> None:
    def request(text: str) -> dict[str, object]:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 5}

    was = request("Wed Nov 18 2026: 3 passed in 0.12s, session 0a1b2c3d4e")
    now = {**request("Thu Nov 19 2026: 3 passed in 1.50s, session 99aabbcc00"), "max_tokens": 9, "logprobs": True}
    assert difference(was, now) is None
    lent = [
        request(f"apiKey: sk-{key}, timeout: 5")
        for key in ("-UOgSzxcHFxvM8szifON9VgjLhV6PQ4n", "HguYUXnjekpvm6MCX154Puig3")
    ]
    assert difference(*lent) is None
    assert difference(request("[main 0a1b2c3] Add it"), request("[main 9f8e7d6] Add it")) is None
    found = difference(was, request("Wed Nov 18 2026: 2 passed in 0.12s, session 0a1b2c3d4e"))
    assert found and found.path == "messages[0].content"


def test_what_an_engine_adds_to_its_answer_is_no_difference_when_the_agent_sends_it_back() -> None:
    def request(message: dict[str, object], **call: object) -> dict[str, object]:
        calls = [{"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}, **call}]
        return {"messages": [{"role": "assistant", "content": "", "tool_calls": calls, **message}]}

    assert difference(request({"annotations": [], "audio": None}, index=0), request({})) is None
    found = difference(request({"annotations": []}, index=0), request({"content": "Done."}))
    assert found and found.path == "messages[0].content"


BODY = '{"model": "m", "messages": [{"role": "user", "content": "%s"}], "stream": true}'
CURL = """curl -sf $OPENAI_BASE_URL/{path} -H "Authorization: Bearer $OPENAI_API_KEY" -d '{body}' > said"""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("messages", '{"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}'),
        (
            "messages",
            '{"model": "m", "max_tokens": 50, "stream": true, "messages": [{"role": "user", "content": "hi"}]}',
        ),
        ("responses", '{"model": "m", "input": "hi"}'),
        ("responses", '{"model": "m", "input": "hi", "stream": true}'),
        ("chat/completions", '{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": true}'),
        ("completions", '{"model": "m", "prompt": "hi"}'),
    ],
)
async def test_every_wire_is_replayed_as_it_was_recorded(path: str, body: str, play: Play, runner: Runner) -> None:
    task = Task(id="wire", instruction=CURL.format(path=path, body=body), verify=("grep -q Wor said",))
    original = await play(task, agent="shell", script=(ScriptedTurn(text="Words."),))
    assert original.reward == 1.0
    played, report = await replay(runner, original)
    assert (report.same, report.requests, report.same_reward) == (1, 1, True)
    assert played.turns[0].tokens == original.turns[0].tokens and played.turns[0].usage == original.turns[0].usage


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["opencode", "claude-code", "codex", "pi", "qwen-code", "mini-swe-agent"])
async def test_a_rollout_of_a_real_agent_is_replayed_as_it_was_and_forked(
    name: str, play: Play, runner: Runner, backends: Registry, model: ScriptedModel
) -> None:
    """What such a program sends beside the conversation (dates, ids, paths of its own) is no difference."""
    agent = agents(Settings.from_environ(os.environ))[name]
    assert isinstance(agent, Scriptable) and isinstance(backends.agents, dict)
    backends.agents[name] = agent
    words = agent.tool_words
    end = (words.run(words.submit),) if words.submit else ()
    script = (ScriptedTurn(tool_calls=(words.run("echo two > two.txt"),)), ScriptedTurn(text="Done.", tool_calls=end))
    original = await play(TASK, agent=name, script=script)
    assert original.reward == 1.0, original.error
    played, report = await replay(runner, original)
    assert (report.differences, report.same_reward, played.outcome) == ((), True, original.outcome)
    before, second = [turn for turn in original.turns if turn.purpose is Purpose.AGENT][:2]
    other = ScriptedTurn(tool_calls=(words.run("rm two.txt"),))
    live = model.endpoint((script[0], other, script[1]))
    (forked,) = await fork(runner, original, at=second.index + 1, live=live)
    assert (report_of(original, forked).differences, forked.reward) == ((), 0.0), forked.error
    assert [turn.index for turn in forked.turns if turn.recorded] == list(range(second.index))
    assert all(turn.recorded or turn.index >= second.index for turn in forked.turns)
    if before.trainable:
        (sequence,) = [each for each in sequences(forked) if each.shared_prefix]
        assert sequence.shared_prefix >= len(before.prompt_ids) + len(before.tokens)
