"""Whole rollouts with the `serve` driver: OpenCode's own server in the box, answered by the scripted model."""

from __future__ import annotations

import itertools
from pathlib import Path

import anyio
import pytest

from rollcage.agent_events import AgentDelta, AgentText
from rollcage.agents.cli_agent import Downloads
from rollcage.agents.opencode import OpenCode
from rollcage.agents.opencode.listener import EVERY_S
from rollcage.agents.opencode.transcript import messages_of, session_of
from rollcage.errors import UsageError
from rollcage.events import AgentEmitted, TurnEnded
from rollcage.results.fold import Rollout
from rollcage.runner import Registry, Runner
from rollcage.server.transcript import transcript_of
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import (
    AgentSpec,
    Job,
    JsonObject,
    Limits,
    Outcome,
    Purpose,
    ScriptedCall,
    ScriptedTurn,
    Task,
)
from support.playing import Play

SERVE = AgentSpec(driver="serve")
DONE = ScriptedTurn(text="All done.")


def bash(command: str, **more: str) -> ScriptedTurn:
    call = ScriptedCall(name="bash", arguments={"command": command, "description": "work"})
    return ScriptedTurn(tool_calls=(call,), **more)


TASK = Task(
    instruction='Write "hello". Mind the  "quotes"  and\nthe lines.',
    files={"seed.txt": "seeded\n"},
    verify=("grep -qx hello hello.txt",),
    solution=(bash("cat seed.txt; echo hello > hello.txt", reasoning="Let me think."), DONE),
    limits=Limits(agent_timeout_s=300, verify_timeout_s=120),
)


def texts(messages: list[JsonObject], role: str) -> list[str]:
    rows = [message for message in messages if message["info"]["role"] == role]
    return [part["text"] for message in rows for part in message["parts"] if part["type"] == "text"]


def shape(rollout: Rollout) -> list[tuple[object, ...]]:
    """What of the turns must not depend on the driver: all but ids and times of the agent's own."""
    return [
        (turn.purpose, bool(turn.session), turn.parent_session, turn.status, turn.trainable, turn.finish_reason)
        for turn in rollout.turns
    ]


async def test_both_drivers_give_the_same_rollout(play: Play) -> None:
    run, serve = [await play(TASK, agent=AgentSpec(driver=driver)) for driver in ("run", "serve")]
    for rollout in (run, serve):
        assert rollout.outcome is Outcome.FINISHED, rollout.error
        assert rollout.reward == 1
        assert rollout.agent_exit_code == 0
        assert rollout.suspicions == ()
    assert shape(run) == shape(serve)
    for ours, theirs in zip(run.turns, serve.turns, strict=True):
        assert ours.request["tools"] == theirs.request["tools"]
        assert ours.request["messages"][:2] == theirs.request["messages"][:2], "system prompt and instruction"
        assert ours.request.keys() == theirs.request.keys()
    kinds = ("step_start", "text", "reasoning", "tool_use", "step_finish", "error")
    heard = [sorted(data["type"] for data in rollout.agent_raw if data["type"] in kinds) for rollout in (run, serve)]
    assert heard[0] == heard[1], "whoever reads the log need not know the driver"
    transcripts = [messages_of(rollout.agent_raw, TASK.instruction) for rollout in (run, serve)]
    for mine, other in zip(*transcripts, strict=True):
        assert mine["info"]["role"] == other["info"]["role"]
        assert mine["info"].get("finish") == other["info"].get("finish")
        assert [part["type"] for part in mine["parts"]] == [part["type"] for part in other["parts"]]
    assert all(turn.trainable for turn in serve.turns)
    for one, after in itertools.pairwise(serve.turns):
        assert after.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids
    for rollout in (run, serve):
        assert "llm.provider=rollcage" in rollout.agent_stderr_tail


async def test_the_transcript_folded_from_the_log_is_the_one_of_the_server(play: Play, store: Store) -> None:
    rollout = await play(TASK, agent=SERVE)
    messages = messages_of(rollout.agent_raw, TASK.instruction)
    assert session_of(rollout.agent_raw) == rollout.turns[0].session
    assert [message["info"]["role"] for message in messages] == ["user", "assistant", "assistant"]
    assert texts(messages, "user") == [TASK.instruction]
    assert texts(messages, "assistant") == ["All done."]
    kinds = [part["type"] for part in messages[1]["parts"]]
    assert kinds == ["step-start", "reasoning", "tool", "step-finish"]
    assert messages[1]["parts"][2]["state"]["output"] == "seeded\n"
    assert messages[-1]["info"]["finish"] == "stop"
    served = transcript_of(await store.read(rollout.id), {"opencode": OpenCode(Downloads(Path()))})
    assert [message.model_dump() for message in served] == messages, "and the one that clients are given"


async def test_words_are_in_the_transcript_while_they_are_being_spoken(
    runner: Runner, store: Store, model: ScriptedModel
) -> None:
    """And the log holds them about twice, however long they take: as they came, and as a whole."""
    spoken = " ".join(f"word{number}" for number in range(400))
    job = Job(task=TASK, model=model.endpoint((ScriptedTurn(text=spoken, token_delay_s=0.01),)), agent=SERVE)
    rollout_id = await runner.start(job)
    said: list[JsonObject] = []
    lengths: list[int] = []
    async for entry in store.follow(rollout_id):
        if isinstance(entry.event, AgentEmitted) and entry.event.raw:
            said.append(entry.event.raw)
            lengths.append(len("".join(texts(messages_of(said), "assistant"))))
        elif isinstance(entry.event, TurnEnded):
            break
    assert len({length for length in lengths if 0 < length < len(spoken)}) >= 2, lengths
    rollout = await runner.wait(rollout_id)
    assert texts(messages_of(rollout.agent_raw), "assistant") == [spoken]
    assert len(str(rollout.agent_raw)) < 3 * len(spoken) + 20_000


@pytest.mark.slow
async def test_the_output_of_a_long_command_is_seen_before_it_ends_and_not_too_often(play: Play) -> None:
    script = (bash("for i in $(seq 30); do echo line $i; sleep 0.1; done"), DONE)
    rollout = await play(TASK, agent=SERVE, script=script)
    parts = [data["part"] for data in rollout.agent_raw if data["type"] == "part"]
    seen = [part["state"] for part in parts if part["type"] == "tool"]
    assert any("line" in str(state.get("metadata")) for state in seen)
    assert len(seen) < rollout.timings["agent"] / EVERY_S + 5


async def test_an_abort_stops_generation_at_once_and_the_transcript_says_so(
    runner: Runner, store: Store, model: ScriptedModel
) -> None:
    """The server itself is told: it breaks off its call and marks the message, before it is killed."""
    endpoint = model.endpoint((ScriptedTurn(text="word " * 2000, token_delay_s=0.05),))
    rollout_id = await runner.start(Job(task=TASK, model=endpoint, agent=SERVE))
    with anyio.fail_after(120):
        async for entry in store.follow(rollout_id):
            said = entry.event.event if isinstance(entry.event, AgentEmitted) else None
            if isinstance(said, AgentText | AgentDelta) and said.text.startswith("word"):
                break
        await runner.abort(rollout_id, "enough")
        rollout = await runner.wait(rollout_id)
    assert (rollout.outcome, rollout.reward) == (Outcome.ABORTED, None)
    assert messages_of(rollout.agent_raw)[-1]["info"]["error"]["name"] == "MessageAbortedError"
    assert rollout.turns[-1].finish_reason is None, "the turn was cut, and is in the log as cut"


@pytest.mark.slow
async def test_time_that_runs_out_in_a_command_is_scored_on_what_is_left(play: Play) -> None:
    task = TASK.model_copy(update={"limits": Limits(agent_timeout_s=40, verify_timeout_s=120)})
    rollout = await play(task, agent=SERVE, script=(bash("echo hello > hello.txt; sleep 600"),))
    assert rollout.outcome is Outcome.AGENT_TIMEOUT
    assert rollout.reward == 1


async def test_a_model_that_refuses_ends_the_session_with_its_error(play: Play) -> None:
    rollout = await play(TASK, agent=SERVE, script=(ScriptedTurn(status=401, text="no such key"),))
    assert (rollout.outcome, rollout.agent_exit_code) == (Outcome.MODEL_UNREACHABLE, 1)
    assert "no such key" in str(rollout.agent_error)


@pytest.mark.slow
async def test_the_turn_limit_ends_the_session(play: Play) -> None:
    task = TASK.model_copy(update={"limits": Limits(max_turns=1)})
    rollout = await play(task, agent=SERVE)
    assert rollout.outcome is Outcome.LIMIT_REACHED
    assert rollout.reward is not None


async def test_a_server_that_the_agent_kills_ends_the_rollout_by_name(play: Play) -> None:
    rollout = await play(TASK, agent=SERVE, script=(bash("echo hello > hello.txt; kill -9 $PPID; sleep 60"),))
    assert rollout.outcome is Outcome.AGENT_FAILED
    assert rollout.agent_exit_code not in (0, None)
    assert rollout.reward is not None, "and what it left is scored"
    assert rollout.reward == 1


async def test_a_server_that_cannot_start_is_an_agent_that_failed(play: Play) -> None:
    task = TASK.model_copy(update={"setup": ("echo 'exit 3' > ~/.rollcage/bin/opencode",)})
    rollout = await play(task, agent=SERVE)
    assert (rollout.outcome, rollout.agent_exit_code) == (Outcome.AGENT_FAILED, 3)


async def test_what_needs_a_permission_that_nobody_gives_is_refused_and_not_waited_for(play: Play) -> None:
    agent = AgentSpec(driver="serve", config={"permission": {"bash": "ask"}})
    rollout = await play(TASK, agent=agent)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.files == {"seed.txt": "seeded\n"}


@pytest.mark.slow
async def test_subagents_are_told_apart_and_stay_out_of_the_transcript(play: Play) -> None:
    """The scripted model goes by the number of answers in what it is sent: the subagent starts from the top again."""
    call = {"description": "sub", "prompt": "Say something.", "subagent_type": "general"}
    script = (ScriptedTurn(tool_calls=(ScriptedCall(name="task", arguments=call),)), DONE)
    rollout = await play(TASK, agent=SERVE, script=script)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    below = [turn for turn in rollout.turns if turn.purpose is Purpose.SUBAGENT]
    assert {turn.parent_session for turn in below} == {rollout.turns[0].session}
    assert rollout.turns[-1].purpose is Purpose.AGENT
    assert texts(messages_of(rollout.agent_raw), "assistant") == ["All done."]


@pytest.mark.slow
async def test_configuration_reaches_the_server(play: Play) -> None:
    agent = AgentSpec(driver="serve", system_prompt="You are Bob.", enabled_tools=("bash",), env={"GREETING": "salut"})
    rollout = await play(TASK, agent=agent, script=(bash('echo "$GREETING"'), DONE))
    request = rollout.turns[0].request
    assert request["messages"][0]["content"].startswith("You are Bob.")
    assert {tool["function"]["name"] for tool in request["tools"]} == {"bash"}
    assert "salut" in str(rollout.agent_raw)


async def test_a_driver_it_does_not_have_is_named(backends: Registry) -> None:
    with pytest.raises(UsageError, match=r"driver: no 'telepathy'.*run and serve"):
        backends.agents["opencode"].check(AgentSpec(driver="telepathy"))


@pytest.mark.slow
async def test_a_model_that_never_answers_gives_null_though_the_call_is_broken_off_by_us(play: Play) -> None:
    task = TASK.model_copy(update={"limits": Limits(agent_timeout_s=40, verify_timeout_s=120)})
    rollout = await play(task, agent=SERVE, script=(ScriptedTurn(text="never", delay_s=600),))
    assert (rollout.outcome, rollout.reward) == (Outcome.MODEL_UNREACHABLE, None)
