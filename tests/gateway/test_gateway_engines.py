"""The gateway before the scripted model, which passes for each engine and version in turn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollcage.gateway import Gateway
from rollcage.gateway.capture import AnswerEnd, ModelCall, TurnBuilder
from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn
from rollcage.sse import EventReader
from support.hand_made import Reply, chat, rig

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
SAYS = ScriptedTurn(text="All done here.")
CALLS = ScriptedTurn(
    text="Let me look.",
    tool_calls=(ScriptedCall(name="bash", arguments={"command": "ls"}), ScriptedCall(name="bash", arguments={"x": 1})),
)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("script", [SAYS, CALLS], ids=["text", "calls"])
async def test_vllm_gives_a_trainable_turn_with_every_token(script: ScriptedTurn, stream: bool) -> None:
    async with ScriptedModel() as model, Gateway.open() as gateway:
        endpoint = model.endpoint([script])
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            assert (await gate.ask(chat(stream=stream, tools=[TOOL]))).status == 200
            (turn,) = gate.recorded
        assert (turn.untrainable_reason, turn.trainable) == ("", True)
        assert len(turn.tokens) == turn.usage["completion_tokens"]
        assert len(turn.prompt_ids) == turn.usage["prompt_tokens"]
        assert turn.message["content"].strip() == script.text
        names = [call["function"]["name"] for call in turn.message.get("tool_calls", [])]
        assert names == [call.name for call in script.tool_calls]
        assert all(len(token.top) == 5 for token in turn.tokens)


PROFILES = ["vllm-0.32", "vllm-0.20", "vllm-0.12", "sglang", "llamacpp"]


def told(reply: Reply) -> dict[str, Any]:
    """The message that an agent puts together from a stream, and what else it sees."""
    events = [event.data for event in EventReader().feed(reply.body)]
    assert events[-1] == b"[DONE]"
    chunks = [json.loads(data) for data in events[:-1]]
    answer = TurnBuilder()
    answer.feed(reply.body)
    turn = answer.turn(ModelCall(0, {}), AnswerEnd(200))
    return {"message": turn.message, "finish": turn.finish_reason, "usage": turn.usage, "chunks": chunks}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("profile", PROFILES)
async def test_every_engine_that_tells_ids_gives_trainable_turns_streamed_or_not(profile: str, stream: bool) -> None:
    async with ScriptedModel() as model, Gateway.open() as gateway:
        endpoint = model.endpoint([CALLS], profile=profile)
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            reply = await gate.ask(chat(stream=stream, tools=[TOOL]))
            assert reply.status == 200
            (turn,) = gate.recorded
        assert (turn.untrainable_reason, turn.trainable, turn.error) == ("", True, None)
        assert (len(turn.tokens), len(turn.prompt_ids)) == (
            turn.usage["completion_tokens"],
            turn.usage["prompt_tokens"],
        )
        assert all(token.logprob is not None and token.id is not None for token in turn.tokens)
        assert [call["function"]["name"] for call in turn.message["tool_calls"]] == ["bash", "bash"]
        assert turn.streamed is stream
        assert len(model.requests(endpoint)) == 1  # asked rightly the first time
        if stream:
            seen = told(reply)
            assert (seen["message"], seen["finish"]) == (turn.message, turn.finish_reason)
            assert seen["usage"]["completion_tokens"] == turn.usage["completion_tokens"]


async def test_openai_tells_no_ids_and_the_turn_says_so() -> None:
    async with ScriptedModel() as model, Gateway.open() as gateway:
        endpoint = model.endpoint([SAYS], profile="openai").model_copy(update={"kind": "openai"})
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            assert (await gate.ask(chat(tools=[TOOL]))).status == 200
            (turn,) = gate.recorded
        assert turn.untrainable_reason == "the engine gave no token ids (OpenAI tells no token ids)"
        assert [token.logprob is not None for token in turn.tokens] == [True] * len(turn.tokens)
        assert len(model.requests(endpoint)) == 1


async def test_an_old_vllm_that_swallows_tokens_of_a_plain_stream_is_named_as_the_reason() -> None:
    thinks = ScriptedTurn(reasoning="Let me think about it.", text="Done.")
    async with ScriptedModel() as model, Gateway.open() as gateway:
        endpoint = model.endpoint([thinks], profile="vllm-0.12")
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            await gate.ask()
            (turn,) = gate.recorded
        assert not turn.trainable
        assert turn.untrainable_reason.endswith(
            "(vLLM 0.12.0 drops tokens of a stream that its parsers swallow, 0.13 and later do not)"
        )


@pytest.mark.parametrize("profile", ["vllm-0.32", "sglang", "llamacpp"])
async def test_an_engine_nobody_asked_who_it_is_is_still_served_and_its_lesson_kept(profile: str) -> None:
    async with ScriptedModel() as model:
        endpoint = model.endpoint([CALLS], profile=profile)
        async with rig(endpoint) as gate:
            assert [(await gate.ask(chat(tools=[TOOL]))).status for _ in range(2)] == [200, 200]
        first, second = gate.recorded
        assert (second.status, second.error, len(second.message["tool_calls"])) == (200, None, 2)
        # Both who mind ids or logprobs in a stream are asked for none, and tell what they can.
        assert second.request["stream"] is (profile == "vllm-0.32")
        assert second.tokens == first.tokens
        assert all(token.logprob is not None for token in second.tokens)
        assert len(model.requests(endpoint)) == (2 if profile == "vllm-0.32" else 3)


async def test_two_engines_behind_one_address_are_told_apart_by_their_keys() -> None:
    async with ScriptedModel() as model, Gateway.open() as gateway:
        for profile in ("sglang", "vllm-0.32", "llamacpp"):
            endpoint = model.endpoint([CALLS], profile=profile)
            await gateway.check(endpoint)
            async with rig(endpoint, gateway=gateway) as gate:
                await gate.ask(chat(tools=[TOOL]))
                assert gate.recorded[0].trainable
                assert gate.recorded[0].request["stream"] is (profile == "vllm-0.32")


@pytest.mark.parametrize("profile", ["sglang", "llamacpp"])
async def test_a_black_box_streams_live_whatever_the_engine(profile: str) -> None:
    async with ScriptedModel() as model, Gateway.open() as gateway:
        endpoint = model.endpoint([CALLS], profile=profile)
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway, mode="black_box") as gate:
            assert told(await gate.ask(chat(tools=[TOOL])))["message"]["tool_calls"]
        assert model.requests(endpoint)[0].body["stream"] is True


async def test_a_script_with_faults_leaves_one_turn_for_each_attempt() -> None:
    script = [
        ScriptedTurn(text="busy", status=503, times=1),
        ScriptedTurn(text="one two three four five six", cut_after=3, times=1),
        ScriptedTurn(text="one two three four five six", error_after=3, times=1),
        ScriptedTurn(text="fine"),
    ]
    async with ScriptedModel() as model, rig(model.endpoint(script)) as gate:
        replies = [await gate.ask() for _ in range(4)]
        assert [(reply.status, reply.cut) for reply in replies] == [
            (503, False),
            (200, True),
            (200, False),
            (200, False),
        ]
        errors = [turn.error or "" for turn in gate.recorded]
        assert errors[0].startswith("upstream answered 503: busy")
        assert errors[1] == "the upstream broke off"
        assert errors[2].startswith("the engine reported an error")
        assert errors[3] == ""
        assert [turn.trainable for turn in gate.recorded] == [False, False, False, True]
        assert gate.recorded[1].tokens
        assert gate.recorded[2].tokens
        assert gate.lease.last_failure is None
