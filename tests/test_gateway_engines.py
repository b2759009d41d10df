"""The gateway before the scripted model, which passes for each engine and version in turn."""

from __future__ import annotations

import pytest

from hand_made import chat, rig
from rollcage.gateway import Gateway
from rollcage.testing import ScriptedCall, ScriptedModel, ScriptedTurn

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


@pytest.mark.parametrize(
    ("profile", "stream", "reason"),
    [
        ("vllm-0.20", True, ""),
        ("vllm-0.12", True, "tokens captured, but the engine counted"),
        ("vllm-0.12", False, ""),
        ("sglang", True, "token ids but"),
        ("sglang", False, ""),
        ("llamacpp", True, "neither token ids nor logprobs"),
        ("llamacpp", False, "no prompt token ids"),
    ],
)
async def test_other_engines_give_what_they_can_and_say_what_they_cannot(
    profile: str, stream: bool, reason: str
) -> None:
    async with ScriptedModel() as model, Gateway.open() as gateway:
        # The scripted model signs no engine's name, so the catalog entry has to say it.
        endpoint = model.endpoint([CALLS], profile=profile).model_copy(update={"kind": profile.partition("-")[0]})
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            assert (await gate.ask(chat(stream=stream, tools=[TOOL]))).status == 200
            (turn,) = gate.recorded
        assert reason in turn.untrainable_reason
        assert turn.trainable == (not reason)
        assert len(turn.message["tool_calls"]) == 2
        assert turn.error is None
        assert len(model.requests(endpoint)) == 1  # asked rightly the first time


@pytest.mark.parametrize("profile", ["vllm-0.32", "sglang", "llamacpp"])
async def test_an_engine_nobody_asked_who_it_is_is_still_served(profile: str) -> None:
    async with ScriptedModel() as model:
        endpoint = model.endpoint([CALLS], profile=profile)
        async with rig(endpoint) as gate:
            assert (await gate.ask(chat(tools=[TOOL]))).status == 200
            (turn,) = gate.recorded
        assert (turn.status, turn.error, len(turn.message["tool_calls"])) == (200, None, 2)


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
