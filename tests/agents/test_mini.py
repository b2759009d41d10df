"""Whole rollouts with the agent `mini`: its program in a real box, answered by the scripted model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from rollcage.agent_events import AgentReasoning, AgentReportedError, AgentSession, AgentText, AgentToolCall, AgentUsage
from rollcage.agents.mini import Mini, agent
from rollcage.errors import UsageError
from rollcage.results.fold import Rollout
from rollcage.simulators import ScriptedModel
from rollcage.types import HOME, AgentSpec, Limits, Outcome, ScriptedCall, ScriptedTurn, Task
from support.playing import Play

MINI = AgentSpec(name="mini")
DONE = ScriptedTurn(text="All done.")
LIMITS = Limits(agent_timeout_s=300, verify_timeout_s=120)


def bash(command: str, **more: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command}),), **more)


def task(*solution: ScriptedTurn, **more: object) -> Task:
    return Task.model_validate({"instruction": "Do it.", "solution": solution, "limits": LIMITS, **more})


def tools(rollout: Rollout) -> list[AgentToolCall]:
    events = (entry.event for entry in rollout.agent_events)
    return [event for event in events if isinstance(event, AgentToolCall) and event.ended]


async def test_it_works_in_its_box_and_its_history_is_what_the_model_said(play: Play) -> None:
    work = task(
        bash("cat seed.txt; echo hello > hello.txt", reasoning="Let me think.", text="I write it."),
        bash("pwd; cat hello.txt", reasoning="Look."),
        DONE,
        files={"seed.txt": "seeded\n"},
        verify=("grep -qx hello hello.txt",),
    )
    rollout = await play(work, agent=MINI)
    assert (rollout.outcome, rollout.agent_exit_code, rollout.error) == (Outcome.FINISHED, 0, None)
    assert rollout.reward == 1.0
    assert [(turn.trainable, turn.error) for turn in rollout.turns] == [(True, None)] * 3
    assert len({turn.session for turn in rollout.turns}) == 1
    assert rollout.turns[0].session.startswith("ses_")
    for before, after in pairwise(rollout.turns):
        exact = (*before.prompt_ids, *(token.id for token in before.tokens))
        assert after.prompt_ids[: len(exact)] == exact, "the prompt continues what was sampled, thoughts included"
    first, second = tools(rollout)
    assert (first.name, first.kind, first.title) == ("bash", "execute", "cat seed.txt; echo hello > hello.txt")
    assert (first.result, first.exit_code) == ("seeded", 0)
    assert second.result == f"{HOME}/workdir\nhello"
    said = [entry.event for entry in rollout.agent_events]
    assert [event.text for event in said if isinstance(event, AgentReasoning)] == ["Let me think.", "Look."]
    assert [event.text for event in said if isinstance(event, AgentText)] == ["I write it.", "All done."]
    assert isinstance(said[0], AgentSession)
    counted = [event.output_tokens for event in said if isinstance(event, AgentUsage)]
    assert counted == [len(turn.tokens) for turn in rollout.turns]


async def test_a_command_that_fails_hangs_or_floods_costs_the_agent_one_step(play: Play) -> None:
    work = task(
        bash("echo oops >&2; exit 3"),
        bash("echo before; sleep 1000"),
        bash("seq 100000"),
        bash("sleep 1000 & echo started"),
        bash("true"),
        DONE,
    )
    spec = AgentSpec(name="mini", config={"command_timeout_s": 1.5, "output_limit": 400})
    rollout = await play(work, agent=spec)
    assert rollout.outcome is Outcome.FINISHED
    failed, hung, flooded, left, silent = tools(rollout)
    assert (failed.result, failed.exit_code) == ("oops\n[exit code 3]", 3)
    assert (hung.result, hung.exit_code) == ("before\n[killed after 1.5 s]", 124)
    assert flooded.result.startswith("1\n2\n3\n")
    assert flooded.result.endswith("\n100000")
    assert "bytes are left out]" in flooded.result
    assert len(flooded.result) < 500
    assert left.result == "started"
    assert silent.result == "(no output)"


async def test_a_call_that_makes_no_sense_is_answered_and_the_history_stays_renderable(play: Play) -> None:
    odd = (
        ScriptedCall(name="python", arguments={"command": "1"}),
        ScriptedCall(name="bash", raw_arguments='{"command": "ls'),
        ScriptedCall(name="bash", arguments={"command": ["ls"]}),
    )
    rollout = await play(task(ScriptedTurn(tool_calls=odd), DONE), agent=MINI)
    assert rollout.outcome is Outcome.FINISHED
    assert [call.status for call in tools(rollout)] == ["error"] * 3
    (_, _, answer, *results) = rollout.turns[1].request["messages"]
    arguments = [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]]
    assert arguments == [{"command": "1"}, {"invalid": '{"command": "ls'}, {"command": ["ls"]}]
    assert [result["role"] for result in results] == ["tool"] * 3


async def test_a_passing_failure_of_the_model_is_tried_again_and_a_limit_ends_it(play: Play) -> None:
    passing = ScriptedTurn(status=503, text="busy", times=1)
    rollout = await play(task(passing, bash("true"), DONE), agent=MINI)
    assert rollout.outcome is Outcome.FINISHED
    assert [turn.replaces for turn in rollout.turns] == [None, 0, None]
    limited = task(bash("true"), bash("true"), DONE, limits=LIMITS.model_copy(update={"max_turns": 1}))
    rollout = await play(limited, agent=MINI)
    assert rollout.outcome is Outcome.LIMIT_REACHED
    (told,) = [entry.event for entry in rollout.agent_events if isinstance(entry.event, AgentReportedError)]
    assert "turn limit reached" in told.text


async def test_a_prompt_of_the_callers_own_replaces_its_own(play: Play, model: ScriptedModel) -> None:
    work = task(DONE)
    endpoint = model.endpoint(work.solution)
    await play(work, agent=AgentSpec(name="mini", system_prompt="Be brief."), endpoint=endpoint)
    (asked,) = model.requests(endpoint)
    assert [message["content"] for message in asked.body["messages"]] == ["Be brief.", "Do it."]
    assert [tool["function"]["name"] for tool in asked.body["tools"]] == ["bash"]
    await play(work, agent=MINI, endpoint=endpoint)
    assert model.requests(endpoint)[-1].body["messages"][0]["content"] == agent.SYSTEM_PROMPT


async def test_a_box_without_python_is_a_clear_error(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_START", agent._START.replace("python3", "python-that-is-not-there"))
    rollout = await play(task(DONE), agent=MINI)
    assert (rollout.outcome, rollout.error_code) == (Outcome.AGENT_FAILED, "agent_not_started")
    assert "needs python3, which this box lacks; choose an image that has it" in (rollout.error or "")
    assert rollout.turns == ()


@pytest.mark.parametrize(
    "spec",
    [
        {"driver": "run"},
        {"enabled_tools": ("bash",)},
        {"disabled_tools": ("bash",)},
        {"config": {"command_timeout": 5}},
        {"config": {"output_limit": 0}},
    ],
)
def test_what_it_cannot_follow_is_refused_before_anything_starts(spec: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        Mini().check(AgentSpec.model_validate({"name": "mini", **spec}))


def test_its_program_needs_nothing_but_an_old_python() -> None:
    program = Path(agent.__file__).with_name("inside.py")
    compile(program.read_text(), "inside.py", "exec")
    bare = [shutil.which("python3") or sys.executable, "-I", "-S", "-c", program.read_text()]
    ended = subprocess.run(bare, input=b"{}", capture_output=True, check=False, timeout=60)
    assert b"KeyError: 'session'" in ended.stderr, "it starts without site-packages, and misses its orders"
