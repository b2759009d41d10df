"""Whole rollouts, with the real OpenCode binary in a real box, answered by the scripted model."""

from __future__ import annotations

import itertools

import anyio
import pytest

from rollcage.events import AgentEmitted, StageEnded, StageStarted, TurnEnded
from rollcage.runner import Registry, Runner
from rollcage.simulators import ScriptedModel
from rollcage.store import Store
from rollcage.types import (
    HOME,
    AgentSpec,
    Endpoint,
    Job,
    Limits,
    Outcome,
    SandboxSpec,
    ScriptedCall,
    ScriptedTurn,
    Stage,
    Task,
)
from support.playing import Play


def bash(command: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments={"command": command, "description": "work"}),))


def write(path: str, content: str) -> ScriptedTurn:
    return ScriptedTurn(tool_calls=(ScriptedCall(name="write", arguments={"filePath": path, "content": content}),))


DONE = ScriptedTurn(text="Done.")
HELLO = Task(
    instruction='Write "hello" to hello.txt. Mind the  "quotes"  and\nthe lines.',
    setup=("git init -q .", "echo seeded > seed.txt"),
    verify=("grep -qx hello hello.txt", "grep -qx seeded seed.txt"),
    solution=(write(f"{HOME}/workdir/hello.txt", "hello\n"), bash("cat hello.txt; ls"), DONE),
    limits=Limits(agent_timeout_s=300, verify_timeout_s=120),
)


async def test_a_rollout_goes_through_its_stages_one_after_the_other(play: Play, store: Store) -> None:
    rollout = await play(HELLO)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.reward == 1
    marks = [e.event for e in await store.read(rollout.id) if isinstance(e.event, StageStarted | StageEnded)]
    stages = [Stage.PROVISION, Stage.SETUP, Stage.AGENT, Stage.VERIFY]
    assert [(type(mark), mark.stage) for mark in marks] == [
        pair for stage in stages for pair in ((StageStarted, stage), (StageEnded, stage))
    ]
    assert rollout.files["hello.txt"] == "hello\n"
    assert rollout.agent_exit_code == 0
    assert set(rollout.timings) == {"provision", "setup", "agent", "verify", "total"}


async def test_every_turn_is_in_the_log_with_all_its_tokens(play: Play) -> None:
    rollout = await play(HELLO)
    assert len(rollout.turns) == 3, "no title and no compaction call"
    for turn in rollout.turns:
        assert turn.trainable, turn.untrainable_reason
        assert len(turn.tokens) == turn.usage["completion_tokens"]
        assert len(turn.prompt_ids) == turn.usage["prompt_tokens"]
        assert all(token.id is not None and token.logprob is not None for token in turn.tokens)
    for one, next_one in itertools.pairwise(rollout.turns):
        assert next_one.prompt_ids[: len(one.prompt_ids)] == one.prompt_ids
    assert rollout.turns[-1].message["content"] == "Done."


async def test_the_prompt_reaches_the_model_verbatim(play: Play) -> None:
    rollout = await play(HELLO)
    user = next(m for m in rollout.turns[0].request["messages"] if m["role"] == "user")
    text = user["content"] if isinstance(user["content"], str) else user["content"][0]["text"]
    assert text == HELLO.instruction


async def test_the_agents_events_are_in_the_log_before_it_has_ended(play: Play, store: Store) -> None:
    rollout = await play(HELLO)
    entries = await store.read(rollout.id)
    said = [e for e in entries if isinstance(e.event, AgentEmitted)]
    turns = [e for e in entries if isinstance(e.event, TurnEnded)]
    tool = next(e for e in said if isinstance(e.event, AgentEmitted) and e.event.event.type == "tool_call")
    assert tool.seq < turns[-1].seq, "a tool's result is logged as it comes, not at the end"


async def test_the_real_key_and_the_host_are_nowhere_in_the_box(play: Play, model: ScriptedModel) -> None:
    look = bash("env; cat /proc/*/environ ~/.config/opencode/* 2>/dev/null | tr '\\0' '\\n'; cat /etc/hostname; ls /")
    endpoint = model.endpoint((look, DONE))
    rollout = await play(Task(instruction="look"), endpoint=endpoint)
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    seen = str(rollout.agent_events)
    assert "OPENCODE_CONFIG" in seen, "the cheat did look"
    assert endpoint.key.get_secret_value() not in seen
    assert endpoint.base_url not in seen


async def test_system_prompt_tools_and_extra_config_take_effect(play: Play) -> None:
    agent = AgentSpec(
        system_prompt="You are Bob the builder.",
        enabled_tools=("bash", "read"),
        config={"agent": {"build": {"options": {"min_p": 0.125}}}},
        env={"GREETING": "salut"},
    )
    rollout = await play(Task(instruction="x"), agent=agent, script=(bash('echo "$GREETING"'), DONE))
    request = rollout.turns[0].request
    assert request["messages"][0]["content"].startswith("You are Bob the builder.")
    assert {tool["function"]["name"] for tool in request["tools"]} == {"bash", "read"}
    assert request["min_p"] == 0.125
    assert "salut" in str(rollout.agent_events)


async def test_disabled_tools_are_not_offered(play: Play) -> None:
    agent = AgentSpec(disabled_tools=("webfetch", "task", "skill", "todowrite"))
    rollout = await play(Task(instruction="x"), agent=agent, script=(DONE,))
    offered = {tool["function"]["name"] for tool in rollout.turns[0].request["tools"]}
    assert offered == {"bash", "edit", "glob", "grep", "read", "write"}


async def test_the_search_tools_work_offline(play: Play) -> None:
    script = (
        ScriptedTurn(
            tool_calls=(
                ScriptedCall(name="grep", arguments={"pattern": "need.e", "path": f"{HOME}/workdir"}),
                ScriptedCall(name="glob", arguments={"pattern": "*.txt", "path": f"{HOME}/workdir"}),
            )
        ),
        DONE,
    )
    rollout = await play(Task(instruction="x", files={"hay.txt": "a needle\n"}), script=script)
    states = [data["part"]["state"] for data in rollout.agent_raw if data["type"] == "tool_use"]
    assert [state["status"] for state in states] == ["completed", "completed"]
    assert all("hay.txt" in state["output"] for state in states)


async def test_bash_children_that_outlive_the_agent_die_with_its_stage(play: Play) -> None:
    daemon = "setsid nohup bash -c 'while :; do date >> ~/workdir/alive; sleep 0.05; done' >/dev/null 2>&1 & "
    daemon += "until [ -s alive ]; do sleep 0.05; done"
    task = Task(
        instruction="x",
        verify=("a=$(wc -l < alive); sleep 0.5; test $a -gt 0 && test $a = $(wc -l < alive)",),
        solution=(bash(daemon), DONE),
    )
    rollout = await play(task)
    assert rollout.reward == 1, rollout.verify


async def test_a_failed_setup_never_reaches_the_agent(play: Play, model: ScriptedModel) -> None:
    endpoint = model.endpoint((DONE,))
    task = Task(instruction="x", setup=("true", "echo broken >&2; exit 3", "touch never"), verify=("true",))
    rollout = await play(task, endpoint=endpoint)
    assert (rollout.outcome, rollout.error_code, rollout.reward) == (Outcome.SETUP_FAILED, "setup_failed", None)
    assert "exit code 3" in str(rollout.error)
    assert "broken" in str(rollout.error)
    assert len(rollout.setup) == 2
    assert model.requests(endpoint) == []
    assert Stage.AGENT.value not in rollout.timings


async def test_a_setup_command_that_hangs_ends_within_its_limit(play: Play) -> None:
    task = Task(instruction="x", setup=("echo so far; sleep 600",), limits=Limits(setup_timeout_s=3))
    rollout = await play(task)
    assert (rollout.outcome, rollout.error_code, rollout.reward) == (Outcome.SETUP_FAILED, "setup_timeout", None)
    assert rollout.setup[0].timed_out
    assert rollout.setup[0].stdout == "so far\n"
    assert rollout.timings["total"] < 300


async def test_an_agent_that_hangs_is_scored_on_what_it_left(play: Play) -> None:
    task = Task(
        instruction="touch here; sleep 600",
        verify=("test -e here",),
        limits=Limits(agent_timeout_s=3),
    )
    rollout = await play(task, agent="shell")
    assert (rollout.outcome, rollout.error_code) == (Outcome.AGENT_TIMEOUT, "agent_timeout")
    assert rollout.reward == 1
    assert rollout.agent_exit_code is None


async def test_an_agent_that_fails_keeps_its_exit_code_and_is_scored(play: Play) -> None:
    rollout = await play(Task(instruction="exit 7", verify=("true",)), agent="shell")
    assert (rollout.outcome, rollout.agent_exit_code) == (Outcome.AGENT_FAILED, 7)
    assert rollout.reward == 1


async def test_nothing_to_verify_is_reward_null_and_not_zero(play: Play) -> None:
    rollout = await play(Task(instruction="true"), agent="shell")
    assert (rollout.outcome, rollout.reward) == (Outcome.FINISHED, None)


@pytest.mark.parametrize(
    ("verify", "code"),
    [
        ("sleep 600", "verify_timeout"),
        ("echo banana > $REWARD_FILE", "bad_reward"),
        ('mkfifo "$REWARD_FILE"', "bad_reward"),
        ('mkdir "$REWARD_FILE"', "bad_reward"),
        ('echo 1 > "$REWARD_FILE"; chmod 444 "$REWARD_FILE"', "bad_reward"),
    ],
)
async def test_a_verifier_that_breaks_gives_null_and_its_name(verify: str, code: str, play: Play) -> None:
    seconds = 3 if code == "verify_timeout" else 120
    task = Task(instruction="true", verify=(verify,), limits=Limits(verify_timeout_s=seconds))
    rollout = await play(task, agent="shell")
    assert (rollout.outcome, rollout.error_code, rollout.reward) == (Outcome.VERIFY_FAILED, code, None)


async def test_a_test_script_that_breaks_is_not_hidden_by_commands_that_pass(play: Play) -> None:
    rollout = await play(Task(instruction="true", test_script="exit 3", verify=("true",)), agent="shell")
    assert (rollout.outcome, rollout.reward, rollout.error_code) == (Outcome.VERIFY_FAILED, None, "bad_reward")
    quiet = await play(Task(instruction="true", test_script="true", verify=("true", "false")), agent="shell")
    assert quiet.reward == 0.5


async def test_a_test_script_that_writes_no_reward_is_a_broken_verifier(play: Play) -> None:
    rollout = await play(Task(instruction="true", test_script="true"), agent="shell")
    assert (rollout.outcome, rollout.reward) == (Outcome.VERIFY_FAILED, None)


async def test_a_verifier_that_prints_a_gigabyte_is_cut_and_scored(play: Play) -> None:
    task = Task(instruction="true", verify=("head -c 1000000000 /dev/zero | tr '\\0' x; echo; echo the end",))
    rollout = await play(task, agent="shell")
    assert rollout.reward is not None
    assert rollout.verify[0].truncated
    assert rollout.verify[0].stdout.endswith("the end\n")
    assert len(rollout.verify[0].stdout) <= 64 << 10


@pytest.mark.parametrize(
    "instruction",
    [
        "f() { f | f & }; f; sleep 5",
        "head -c 10G /dev/zero > big",
        "python3 -c 'x = bytearray(9_000_000_000)'",
        "kill -9 1; kill -9 -1; sleep 30",
        "yes | head -c 1G",
    ],
    ids=["forks without end", "writes 10 GB", "eats memory", "kills its box", "prints 1 GB"],
)
async def test_an_agent_that_runs_wild_ends_in_a_named_outcome(instruction: str, play: Play) -> None:
    task = Task(instruction=instruction, verify=("true",), limits=Limits(agent_timeout_s=8))
    rollout = await play(task, agent="shell", sandbox=SandboxSpec(pids=64))
    assert rollout.outcome in (Outcome.FINISHED, Outcome.AGENT_FAILED, Outcome.AGENT_TIMEOUT), rollout.error
    assert rollout.reward == 1


async def test_an_unreachable_model_is_named_before_a_box_is_opened(play: Play) -> None:
    nobody = Endpoint(base_url="http://127.0.0.1:9/v1", model="m")
    rollout = await play(HELLO, endpoint=nobody)
    assert (rollout.outcome, rollout.reward) == (Outcome.MODEL_UNREACHABLE, None)
    assert "127.0.0.1:9" in str(rollout.error)
    assert rollout.sandbox_id == ""


async def test_a_model_that_fails_during_the_rollout_gives_null(play: Play) -> None:
    script = (ScriptedTurn(status=401, text="no such key"),)
    rollout = await play(HELLO, script=script)
    assert (rollout.outcome, rollout.reward) == (Outcome.MODEL_UNREACHABLE, None)
    assert rollout.agent_exit_code == 1
    assert "401" in str(rollout.error)


ASK = """
curl -s "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -d "{
    \\"model\\": \\"$OPENAI_MODEL\\", \\"messages\\": [{\\"role\\": \\"user\\", \\"content\\": \\"speak\\"}$more]}"
"""
"""A script for the agent `shell`: asks its model, and is there much sooner than a real agent, which matters where
time is to run out after the call and not before."""


async def test_a_model_that_dies_after_a_good_turn_gives_null_also_when_time_runs_out(play: Play) -> None:
    script = (ScriptedTurn(text="good"), ScriptedTurn(status=500, text="gone"))
    again = 'more=\', {"role": "assistant", "content": "good"}, {"role": "user", "content": "more"}\''
    task = Task(instruction=f"{ASK}{again}{ASK}sleep 600", verify=("true",), limits=Limits(agent_timeout_s=10))
    rollout = await play(task, agent="shell", script=script)
    assert [turn.status for turn in rollout.turns] == [200, 500]
    assert rollout.agent_exit_code is None, "time ran out"
    assert (rollout.outcome, rollout.reward) == (Outcome.MODEL_UNREACHABLE, None)


async def test_a_model_that_never_answers_gives_null(play: Play) -> None:
    script = (ScriptedTurn(text="never", delay_s=600),)
    task = Task(instruction=ASK, verify=("true",), limits=Limits(agent_timeout_s=10))
    rollout = await play(task, agent="shell", script=script)
    assert rollout.agent_exit_code is None, "time ran out"
    assert (rollout.outcome, rollout.reward) == (Outcome.MODEL_UNREACHABLE, None)


async def test_a_model_that_speaks_and_is_too_slow_is_scored_on_what_is_left(play: Play) -> None:
    script = (ScriptedTurn(text="word " * 200, token_delay_s=1),)
    slow = ASK.replace('\\"model\\"', '\\"stream\\": true, \\"model\\"', 1)
    assert slow != ASK
    task = Task(instruction=f"touch done; {slow}", verify=("test -e done",), limits=Limits(agent_timeout_s=15))
    rollout = await play(task, agent="shell", script=script)
    assert rollout.agent_exit_code is None, "time ran out"
    assert [turn.first_token_s is not None for turn in rollout.turns] == [True]
    assert (rollout.outcome, rollout.reward) == (Outcome.AGENT_TIMEOUT, 1.0)


async def test_a_model_that_fails_in_black_box_mode_gives_null_too(runner: Runner, model: ScriptedModel) -> None:
    endpoint = model.endpoint((ScriptedTurn(status=401, text="no such key"),))
    rollout = await runner.wait(await runner.start(Job(task=HELLO, model=endpoint, mode="black_box")))
    assert (rollout.outcome, rollout.reward) == (Outcome.MODEL_UNREACHABLE, None)


async def test_a_verify_command_that_hangs_is_named_and_its_output_kept(play: Play) -> None:
    task = Task(instruction="true", verify=("echo so far; sleep 600",), limits=Limits(verify_timeout_s=5))
    rollout = await play(task, agent="shell")
    assert "echo so far" in str(rollout.error)
    assert rollout.verify[0].stdout == "so far\n"


async def test_a_workdir_that_became_a_file_is_judged_as_an_empty_one(play: Play) -> None:
    task = Task(instruction="cd ~; rm -rf workdir; echo > workdir", verify=("test -e done",), tests={"t": "x"})
    rollout = await play(task, agent="shell")
    assert rollout.reward is not None, rollout.error
    assert rollout.reward == 0


async def test_the_turn_limit_stops_the_agent_at_once_and_its_work_is_scored(play: Play) -> None:
    task = HELLO.model_copy(update={"limits": Limits(max_turns=2)})
    rollout = await play(task)
    assert (rollout.outcome, rollout.error_code) == (Outcome.LIMIT_REACHED, "limit_reached")
    assert rollout.reward == 1
    assert len([turn for turn in rollout.turns if turn.status == 200]) == 2


async def test_one_deadline_covers_everything_and_keeps_a_reserve_for_scoring(play: Play) -> None:
    task = Task(instruction="sleep 600", verify=("true",), limits=Limits(timeout_s=12, agent_timeout_s=600))
    rollout = await play(task, agent="shell")
    assert rollout.outcome is Outcome.AGENT_TIMEOUT
    assert rollout.reward == 1
    assert rollout.timings["total"] < 300
    slow = task.model_copy(update={"setup": ("sleep 600",)})
    late = await play(slow, agent="shell")
    assert (late.outcome, late.reward) == (Outcome.TIMED_OUT, None)


async def test_an_abort_ends_the_rollout_at_once_and_nothing_stays(
    runner: Runner, store: Store, model: ScriptedModel
) -> None:
    job = Job(task=HELLO, model=model.endpoint((ScriptedTurn(text="never", delay_s=600),)))
    rollout_id = await runner.start(job)
    async for entry in store.follow(rollout_id):
        if isinstance(entry.event, StageStarted) and entry.event.stage is Stage.AGENT:
            await runner.abort(rollout_id, "changed my mind")
    with anyio.fail_after(120):
        rollout = await runner.wait(rollout_id)
    assert (rollout.outcome, rollout.reward) == (Outcome.ABORTED, None)
    assert rollout.abort_requested


async def test_many_rollouts_at_once_do_not_mix(play: Play) -> None:
    async def one(number: int) -> None:
        task = Task(
            instruction=f"echo {number} > mine; sleep 0.2; test $(cat mine) = {number}",
            verify=(f"grep -qx {number} mine",),
        )
        rollout = await play(task, agent="shell")
        assert rollout.outcome is Outcome.FINISHED
        assert rollout.reward == 1

    async with anyio.create_task_group() as tasks:
        for number in range(24):
            tasks.start_soon(one, number)


async def test_no_more_rollouts_run_at_once_than_were_allowed(
    store: Store, backends: Registry, model: ScriptedModel
) -> None:
    async with Runner.open(store, backends, at_once=1) as runner:
        job = Job(task=Task(instruction="sleep 0.3"), model=model.endpoint(()), agent=AgentSpec(name="shell"))
        ids = [await runner.start(job) for _ in range(3)]
        for rollout_id in ids:
            await runner.wait(rollout_id)
    spans = sorted([(log[1].time, log[-1].time) for log in [await store.read(rollout_id) for rollout_id in ids]])
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))


async def test_what_the_agent_program_keeps_for_itself_is_no_news(play: Play) -> None:
    assert (await play(HELLO)).suspicions == ()


async def test_verification_too_ends_with_the_one_deadline(play: Play) -> None:
    limits = Limits(timeout_s=8, agent_timeout_s=1, verify_timeout_s=600)
    rollout = await play(Task(instruction="true", verify=("sleep 600",), limits=limits), agent="shell")
    assert (rollout.outcome, rollout.error_code) == (Outcome.VERIFY_FAILED, "verify_timeout")
    assert rollout.timings["total"] < 300


async def test_black_box_mode_relays_and_records_nothing(runner: Runner, model: ScriptedModel) -> None:
    job = Job(task=HELLO, model=model.endpoint(HELLO.solution), mode="black_box")
    rollout = await runner.wait(await runner.start(job))
    assert rollout.outcome is Outcome.FINISHED, rollout.error
    assert rollout.turns == ()
    assert "logprobs" not in model.requests(job.model)[0].body
