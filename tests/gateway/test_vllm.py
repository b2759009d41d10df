"""A real vLLM behind the gateway: what is captured is held against what the engine says when it is asked directly.

Skipped only where vLLM cannot be installed; the reason is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.agents.base import Scriptable
from rollcage.agents.catalog import shipped
from rollcage.agents.cli_agent import Downloads
from rollcage.gateway import Gateway
from rollcage.runner import Registry
from rollcage.trajectory import report, sequences
from rollcage.types import AgentSpec, Endpoint, Limits, Outcome, Sampling, Task, Turn
from support.engine_client import BASH, ask, ids, logprobs
from support.hand_made import chat, rig
from support.playing import Play
from support.vllm_server import INSTALL_S, START_S, NotBuilt, build, serving

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(INSTALL_S + START_S + 900)]

TEXT = {"model": "model", "messages": [{"role": "user", "content": "List the files here."}], "max_tokens": 20}
CALL = {**TEXT, "tools": [BASH], "tool_choice": "required", "max_tokens": 60}
KINDS = pytest.mark.parametrize("body", [TEXT, CALL], ids=["text", "call"])


@pytest.fixture(scope="module")
async def vllm(state_dir: Path) -> AsyncIterator[Endpoint]:
    folder = state_dir / "cache" / "vllm-0.32.0"
    try:
        await build(folder)
    except NotBuilt as reason:
        pytest.skip(f"no vLLM here: {reason}")
    async with serving(folder) as endpoint:
        yield endpoint


@pytest.fixture
def backends(backends: Registry, state_dir: Path) -> Registry:
    """With every agent that comes with rollcage."""
    more = {agent.name: agent for agent in shipped(Downloads(state_dir / "cache"))}
    return replace(backends, agents={**backends.agents, **more})


def sampled(endpoint: Endpoint, **sampling: Any) -> Endpoint:
    return endpoint.model_copy(update={"sampling": Sampling(**sampling)})


async def captured(endpoint: Endpoint, body: dict[str, Any]) -> Turn:
    """The turn that the gateway makes of one request."""
    async with Gateway.open() as gateway:
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            assert (await gate.ask(body)).status == 200
            (turn,) = gate.recorded
    return turn


async def tokenized(endpoint: Endpoint, request: dict[str, Any]) -> list[int]:
    """What the engine itself makes of a request's messages and tools."""
    asked = {name: request[name] for name in ("messages", "tools", "chat_template_kwargs") if name in request}
    tokens = (await ask(endpoint, "/tokenize", {"model": endpoint.model, **asked})).json["tokens"]
    assert isinstance(tokens, list)
    return tokens


async def running(endpoint: Endpoint) -> float:
    """How many requests the engine is working on."""
    lines = (await ask(endpoint, "/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{"))


@KINDS
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_ids_are_as_many_as_the_engine_counts_and_prompt_ids_are_its_own(
    vllm: Endpoint, body: dict[str, Any], stream: bool
) -> None:
    turn = await captured(sampled(vllm, temperature=0), {**body, "stream": stream})
    assert (turn.error, turn.untrainable_reason, turn.trainable) == (None, "", True)
    assert len(turn.tokens) == turn.usage["completion_tokens"]
    assert len(turn.prompt_ids) == turn.usage["prompt_tokens"]
    assert list(turn.prompt_ids) == await tokenized(vllm, body)
    assert all(token.logprob is not None and token.logprob <= 0 and len(token.top) >= 1 for token in turn.tokens)


@KINDS
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
async def test_a_direct_call_with_the_same_seed_gives_the_same_tokens_and_logprobs(
    vllm: Endpoint, body: dict[str, Any], temperature: float
) -> None:
    turn = await captured(sampled(vllm, temperature=temperature, seed=11), {**body, "stream": True})
    plain = {**body, "model": vllm.model, "temperature": temperature, "seed": 11}
    direct = (await ask(vllm, "/v1/chat/completions", {**plain, "logprobs": True, "return_token_ids": True})).json
    (choice,) = direct["choices"]
    assert ids(turn) == choice["token_ids"]
    assert list(turn.prompt_ids) == direct["prompt_token_ids"]
    assert logprobs(turn) == pytest.approx([each["logprob"] for each in choice["logprobs"]["content"]], abs=1e-4)
    assert turn.finish_reason == choice["finish_reason"]


@KINDS
async def test_a_stream_and_a_whole_answer_make_the_same_turn(vllm: Endpoint, body: dict[str, Any]) -> None:
    endpoint = sampled(vllm, temperature=1, seed=5)
    streamed, whole = [await captured(endpoint, {**body, "stream": stream}) for stream in (True, False)]
    assert ids(streamed) == ids(whole)
    assert logprobs(streamed) == pytest.approx(logprobs(whole), abs=1e-4)
    assert streamed.prompt_ids == whole.prompt_ids
    assert streamed.finish_reason == whole.finish_reason
    assert (streamed.message.get("content") or "") == (whole.message.get("content") or "")
    assert calls(streamed) == calls(whole)


def calls(turn: Turn) -> list[tuple[str, Any]]:
    called = [call["function"] for call in turn.message.get("tool_calls", ())]
    return [(function["name"], json.loads(function["arguments"])) for function in called]


async def test_the_tokens_of_a_tool_call_are_captured_though_no_text_shows_them(vllm: Endpoint) -> None:
    turn = await captured(sampled(vllm, temperature=0), {**CALL, "stream": True})
    assert turn.finish_reason == "tool_calls"
    ((name, arguments),) = calls(turn)
    assert (name, list(arguments)) == ("bash", ["command"])
    assert not turn.message.get("content")
    spelled = (await ask(vllm, "/detokenize", {"model": vllm.model, "tokens": ids(turn)})).json["prompt"]
    assert '"name"' in spelled
    assert "bash" in spelled
    assert arguments["command"] in spelled


async def test_an_agent_that_hangs_up_stops_the_generation_in_the_engine(vllm: Endpoint) -> None:
    endless = chat(max_tokens=4000, ignore_eos=True)
    async with rig(sampled(vllm, temperature=0)) as gate:
        async with gate.connect() as client:
            client.writer.write(gate.request(endless))
            await client.head()
            for _ in range(3):
                await client.chunk()
            assert await running(vllm) == 1
        with anyio.fail_after(300):
            while await running(vllm) or not gate.recorded:
                await anyio.sleep(0.1)
        (turn,) = gate.recorded
    assert turn.error == "agent hung up"
    assert 0 < len(turn.tokens) < 1000


async def test_the_real_opencode_does_what_the_real_vllm_says_and_every_token_is_there(
    play: Play, vllm: Endpoint
) -> None:
    # The model is too small to call a tool by itself: its grammar leaves it the choice of what to run, and no other.
    command = '{"command": "(ls|pwd|cat notes.txt)", "description": "look"}'
    call = f'<tool_call>\n{{"name": "bash", "arguments": {command}}}\n</tool_call>'
    grammar = call.replace("{", r"\{").replace("}", r"\}")
    endpoint = sampled(vllm, temperature=1, seed=3, extra_body={"structured_outputs": {"regex": grammar}})
    task = Task(
        instruction="Look at the files in this folder.",
        files={"notes.txt": "hello\n"},
        verify=("test -f notes.txt",),
        limits=Limits(agent_timeout_s=300, max_tokens_cap=80, max_turns=2),
    )
    agent = AgentSpec(system_prompt="You are brief.", enabled_tools=("bash",))
    rollout = await play(task, agent=agent, endpoint=endpoint)
    assert rollout.outcome is Outcome.LIMIT_REACHED, rollout.error
    assert rollout.reward == 1
    first, second = rollout.turns
    for turn in (first, second):
        assert turn.trainable, turn.untrainable_reason
        assert len(turn.tokens) == turn.usage["completion_tokens"]
        assert list(turn.prompt_ids) == await tokenized(vllm, turn.request)
        assert turn.finish_reason == "tool_calls"
    ((_, arguments),) = calls(first)
    shown = {"ls": "notes.txt", "pwd": "/home/user/workdir", "cat notes.txt": "hello"}[arguments["command"]]
    (result,) = [message for message in second.request["messages"] if message["role"] == "tool"]
    assert shown in result["content"], "the command was run in the box, and the model was told"
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


@pytest.mark.parametrize("name", ["claude-code", "codex", "pi", "qwen-code", "mini-swe-agent"])
async def test_another_agent_does_what_the_real_vllm_says_and_every_token_is_there(
    name: str, play: Play, backends: Registry, vllm: Endpoint
) -> None:
    agent = backends.agents[name]
    assert isinstance(agent, Scriptable)
    wanted = agent.tool_words.run("COMMAND")
    call = json.dumps({"name": wanted.name, "arguments": wanted.arguments})
    grammar = re.escape(f"<tool_call>\n{call}\n</tool_call>").replace("COMMAND", "(ls|cat notes\\.txt)")
    endpoint = sampled(vllm, temperature=1, seed=3, extra_body={"structured_outputs": {"regex": grammar}})
    # As little to read as the agent allows: that takes most of the time.
    tools = {"enabled_tools": (wanted.name,)} if getattr(agent, "tools", ()) else {}
    spec = AgentSpec.model_validate({"name": name, "system_prompt": "You are brief.", **tools})
    limits = Limits(agent_timeout_s=1200, max_tokens_cap=120, max_turns=2)
    task = Task(instruction="Look at the files.", files={"notes.txt": "hello\n"}, limits=limits)
    rollout = await play(task, agent=spec, endpoint=endpoint)
    assert rollout.outcome is Outcome.LIMIT_REACHED, rollout.error
    first, second = rollout.turns
    for turn in (first, second):
        assert turn.trainable, turn.untrainable_reason
        assert len(turn.tokens) == turn.usage["completion_tokens"]
        assert list(turn.prompt_ids) == await tokenized(vllm, turn.request)
        assert [called for called, _ in calls(turn)] == [wanted.name]
    (result,) = [message for message in second.request["messages"] if message["role"] == "tool"]
    assert any(shown in str(result["content"]) for shown in ("notes.txt", "hello")), "the command was run in the box"
    assert sum(sequence.trained_tokens for sequence in sequences(rollout)) == sum(
        len(ids(turn)) for turn in rollout.turns
    )


async def test_the_whole_prompt_of_an_agent_as_it_comes_is_the_engines_own(play: Play, vllm: Endpoint) -> None:
    limits = Limits(agent_timeout_s=300, max_tokens_cap=8, max_turns=1)
    rollout = await play(Task(instruction="Say hello.", limits=limits), endpoint=sampled(vllm, temperature=0))
    (turn,) = rollout.turns
    assert turn.trainable, turn.untrainable_reason
    assert len(turn.request["tools"]) > 5, "the agent's own tools, all of them"
    assert len(turn.prompt_ids) == turn.usage["prompt_tokens"] > 5000
    assert list(turn.prompt_ids) == await tokenized(vllm, turn.request)


def sampled_so_far(turn: Turn) -> tuple[int | None, ...]:
    return (*turn.prompt_ids, *ids(turn))


def joined(turns: Sequence[Turn]) -> tuple[list[int], dict[int, float]]:
    """The one sequence that turns make which continue each other, and the logprob of each sampled position in it."""
    scored: dict[int, float] = {}
    for n, turn in enumerate(turns):
        if n:
            before = sampled_so_far(turns[n - 1])
            assert turn.prompt_ids[: len(before)] == before, f"turn {n} does not continue turn {n - 1}: {turn.history}"
        start = len(turn.prompt_ids)
        scored |= {start + at: token.logprob for at, token in enumerate(turn.tokens) if token.logprob is not None}
    return [id for id in sampled_so_far(turns[-1]) if id is not None], scored


async def recomputed(endpoint: Endpoint, sequence: list[int]) -> list[float]:
    """The logprob of each id but the first, from one forward pass over all of them."""
    asked = {"model": endpoint.model, "prompt": sequence, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    (choice,) = (await ask(endpoint, "/v1/completions", asked)).json["choices"]
    rows = choice["prompt_logprobs"][1:]
    return [row[str(id)]["logprob"] for row, id in zip(rows, sequence[1:], strict=True)]


async def test_an_exact_history_is_one_sequence_whose_logprobs_one_forward_pass_gives_again(vllm: Endpoint) -> None:
    endpoint = sampled(vllm, temperature=1, seed=17, history="exact")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Tell me of the sea."}]
    async with Gateway.open() as gateway:
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            for n in range(6):
                limit = 12 if n == 2 else 40  # one is certainly cut
                assert (
                    await gate.ask({**TEXT, "messages": messages, "max_tokens": limit, "stream": True})
                ).status == 200
                said = gate.recorded[-1].message["content"].strip()
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
            turns = list(gate.recorded)
    assert [turn.history and turn.history.exact for turn in turns] == [False, *[True] * 5]
    sequence, scored = joined(turns)
    assert len(scored) == sum(turn.usage["completion_tokens"] for turn in turns)
    again = await recomputed(vllm, sequence)
    assert max(abs(again[at - 1] - logprob) for at, logprob in scored.items()) < 1e-3


@pytest.mark.parametrize("agent", ["opencode", "mini"])
async def test_a_real_agents_session_with_an_exact_history_is_one_sequence(
    play: Play, vllm: Endpoint, agent: str
) -> None:
    # Written as no template writes it. A grammar changes logprobs, so that no forward pass gives these again.
    spec = '{"command":"(ls|pwd|cat notes.txt)",  "description":"look"}'
    call = f'<tool_call>{{"name":"bash", "arguments":{spec}}}</tool_call>'
    grammar = call.replace("{", r"\{").replace("}", r"\}")
    exact = {"temperature": 1, "seed": 3, "history": "exact", "extra_body": {"structured_outputs": {"regex": grammar}}}
    limits = Limits(agent_timeout_s=600, max_tokens_cap=80, max_turns=4)
    task = Task(instruction="Look at the files here.", files={"notes.txt": "hello\n"}, limits=limits)
    brief: dict[str, Any] = {"system_prompt": "You are brief."}
    if agent == "opencode":
        brief["enabled_tools"] = ("bash",)
    rollout = await play(task, agent=AgentSpec(name=agent, **brief), endpoint=sampled(vllm, **exact))
    assert rollout.outcome is Outcome.LIMIT_REACHED, rollout.error
    assert [turn.trainable for turn in rollout.turns] == [True] * 4, [turn.untrainable_reason for turn in rollout.turns]
    (sequence,) = sequences(rollout)
    assert list(sequence.input_ids) == joined(rollout.turns)[0]
    assert sequence.trained_tokens == sum(turn.usage["completion_tokens"] for turn in rollout.turns)
    assert report(rollout).delivered_fraction == 1.0
    assert [turn.history and turn.history.exact for turn in rollout.turns] == [False, True, True, True]
    drifts = [turn.history.differs_at for turn in rollout.turns[1:] if turn.history]
    assert None not in drifts, "the template would have made other ids of every answer"


@pytest.mark.parametrize("agent", ["opencode", "mini"])
async def test_a_session_that_no_grammar_holds_has_the_logprobs_of_one_forward_pass(
    play: Play, vllm: Endpoint, agent: str
) -> None:
    # What even this model does by itself: it says again what it is told.
    call = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    limits = Limits(agent_timeout_s=600, max_tokens_cap=48, max_turns=3)
    task = Task(instruction=f"Repeat:\n{call}", files={"notes.txt": "hello\n"}, limits=limits)
    said: dict[str, Any] = {"system_prompt": "You repeat what you are told, word for word."}
    if agent == "opencode":
        said["enabled_tools"] = ("bash",)
    endpoint = sampled(vllm, temperature=0, history="exact")
    rollout = await play(task, agent=AgentSpec(name=agent, **said), endpoint=endpoint)
    assert len(rollout.turns) > 1, rollout.turns[0].message
    (sequence,) = sequences(rollout)
    assert report(rollout).delivered_fraction == 1.0
    again = [0.0, *await recomputed(vllm, list(sequence.input_ids))]
    rows = zip(sequence.loss_mask, sequence.logprobs, again, strict=True)
    assert max(abs(then - now) for trained, then, now in rows if trained) < 1e-3
