"""Agents that speak Anthropic's Messages or OpenAI's Responses, through the gateway, with their real clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import ToolUseBlock
from openai.types.responses import ResponseFunctionToolCall

from rollcage.gateway import Gateway
from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn
from rollcage.types import Limits, Turn
from support.hand_made import Asked, Rig, chunked, hand_made, head, listener, plain, rig, says, whole

CALLS = ScriptedTurn(
    reasoning="I must look.",
    text="Let me look.",
    tool_calls=(ScriptedCall(name="bash", arguments={"command": "ls"}), ScriptedCall(name="bash", arguments={"x": 1})),
)
SAYS = ScriptedTurn(text="All done here.")
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL: Any = {"name": "bash", "description": "Runs it.", "input_schema": SCHEMA}
FUNCTION: Any = {"type": "function", "name": "bash", "description": "Runs it.", "parameters": SCHEMA, "strict": False}
HELLO: Any = [{"role": "user", "content": "hi"}]
PROFILES = ["vllm-0.32", "vllm-0.12", "sglang", "llamacpp"]


def claude(gate: Rig, **how: Any) -> anthropic.AsyncAnthropic:
    root = f"http://127.0.0.1:{gate.port}"
    return anthropic.AsyncAnthropic(base_url=root, api_key=how.pop("key", gate.key), max_retries=0, timeout=120, **how)


def codex(gate: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{gate.port}/v1", api_key=gate.key, max_retries=0, timeout=120)


@asynccontextmanager
async def scripted(*turns: ScriptedTurn, profile: str = "vllm-0.32", **how: Any) -> AsyncIterator[Rig]:
    async with ScriptedModel() as model, Gateway.open() as gateway:
        endpoint = model.endpoint(turns, profile=profile)
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway, **how) as gate:
            yield gate


@pytest.mark.parametrize("profile", PROFILES)
async def test_an_anthropic_client_streams_thinking_text_and_tool_calls(profile: str) -> None:
    async with scripted(CALLS, profile=profile) as gate, claude(gate) as client:
        async with client.messages.stream(model="m", max_tokens=100, messages=HELLO, tools=[TOOL]) as stream:
            kinds = [event.type async for event in stream]
            message = await stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        first, second = (block for block in message.content if isinstance(block, ToolUseBlock))
        assert (first.name, first.input, second.input) == ("bash", {"command": "ls"}, {"x": 1})
        assert (message.model, message.stop_reason) == ("m", "tool_use")
        (turn,) = gate.recorded
        assert (turn.trainable, turn.untrainable_reason, turn.streamed) == (True, "", True)
        assert message.usage.output_tokens == turn.usage["completion_tokens"] == len(turn.tokens)
        assert [call["id"] for call in turn.message["tool_calls"]] == [first.id, second.id]
        assert turn.request["messages"] == HELLO
        assert turn.request["tools"][0]["function"]["name"] == "bash"


@pytest.mark.parametrize("profile", PROFILES)
async def test_an_anthropic_client_that_does_not_stream_gets_one_message(profile: str) -> None:
    async with scripted(CALLS, profile=profile) as gate, claude(gate) as client:
        message = await client.messages.create(model="m", max_tokens=100, messages=HELLO, tools=[TOOL])
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
        (turn,) = gate.recorded
        assert (turn.trainable, turn.streamed, turn.request["max_tokens"]) == (True, False, 100)


@pytest.mark.parametrize("profile", PROFILES)
async def test_a_responses_client_streams_items_as_they_come(profile: str) -> None:
    async with scripted(CALLS, profile=profile) as gate, codex(gate) as client:
        async with client.responses.stream(model="m", input="hi", tools=[FUNCTION]) as stream:
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
        calls = [item for item in response.output if isinstance(item, ResponseFunctionToolCall)]
        assert [json.loads(call.arguments) for call in calls] == [{"command": "ls"}, {"x": 1}]
        (turn,) = gate.recorded
        assert (turn.trainable, turn.untrainable_reason) == (True, "")
        assert response.usage is not None
        assert response.usage.output_tokens == len(turn.tokens)


async def test_a_responses_client_that_does_not_stream_gets_one_response() -> None:
    async with scripted(SAYS) as gate, codex(gate) as client:
        response = await client.responses.create(model="m", input="hi")
        assert response.output_text == SAYS.text
        assert gate.recorded[0].trainable


async def test_a_conversation_goes_on_over_the_wire_and_its_prompts_extend_each_other() -> None:
    async with scripted(CALLS, SAYS) as gate, claude(gate) as client:
        said: Any = [*HELLO]
        first = await client.messages.create(model="m", max_tokens=100, messages=said, tools=[TOOL])
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": "ok"}
            for block in first.content
            if block.type == "tool_use"
        ]
        said += [{"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
        second = await client.messages.create(model="m", max_tokens=100, messages=said, tools=[TOOL])
        assert second.content[0].type == "text"
        one, two = gate.recorded
        sampled = one.prompt_ids + tuple(token.id or 0 for token in one.tokens)
        assert two.prompt_ids[: len(sampled)] == sampled


async def test_an_event_of_the_wire_leaves_before_the_next_chunk_exists() -> None:
    role, *rest = whole("Hel", "lo")
    seen = asyncio.Event()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + chunked(role) + chunked(rest[0]))
        await seen.wait()
        writer.write(b"".join(map(chunked, rest[1:])) + b"0\r\n\r\n")

    async with hand_made(answer) as model, rig(model.endpoint()) as gate, claude(gate) as client:
        async with client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream:
            async for text in stream.text_stream:
                assert text in ("Hel", "lo")
                seen.set()
        assert seen.is_set()
        assert gate.recorded[0].trainable


async def test_the_turn_is_kept_before_the_closing_events_leave() -> None:
    recording, may_end = asyncio.Event(), asyncio.Event()

    async def record(_: Turn) -> None:
        recording.set()
        await may_end.wait()

    async with ScriptedModel() as model, Gateway.open() as gateway:
        sock = listener()
        port = sock.getsockname()[1]
        async with gateway.lend(
            model.endpoint([CALLS]), sock, limits=Limits(), mode="transparent_proxy", record=record
        ) as lease:
            gate = Rig(gateway, lease, [], port)
            async with gate.connect() as client:
                body = {"model": "m", "max_tokens": 100, "messages": HELLO, "tools": [TOOL], "stream": True}
                client.writer.write(gate.request(body, path="/v1/messages"))
                await recording.wait()
                so_far = await client.reader.readuntil(b"tool_use")
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        while data := await client.reader.read(1024):
                            so_far += data
                assert b"message_stop" not in so_far
                assert b"ls" not in so_far.partition(b"tool_use")[2]
                may_end.set()
                assert b"message_stop" in await client.reader.readuntil(b"0\r\n\r\n")


async def test_errors_have_the_wires_own_shape_and_status() -> None:
    faults = [ScriptedTurn(status=429, text="slow down", times=1), ScriptedTurn(status=503, text="busy")]
    async with scripted(*faults) as gate, claude(gate) as client:
        with pytest.raises(anthropic.RateLimitError, match="slow down") as refused:
            await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert refused.value.response.headers["retry-after"] == "1"
        assert refused.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
        with pytest.raises(anthropic.APIStatusError) as busy:
            await client.messages.create(model="m", max_tokens=9, messages=HELLO, stream=True)
        assert (busy.value.status_code, busy.value.body["error"]["type"]) == (503, "overloaded_error")  # type: ignore[index]
        assert [turn.status for turn in gate.recorded] == [429, 503]
        with pytest.raises(anthropic.BadRequestError, match="at least one message"):
            await client.messages.create(model="m", max_tokens=9, messages=[])
        assert len(gate.recorded) == 2
        async with claude(gate, key="sk-wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError, match="incorrect API key") as unknown:
                await stranger.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert unknown.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


async def test_a_model_that_is_not_there_is_an_error_of_the_wire() -> None:
    async with hand_made(says("a")) as model:
        endpoint = model.endpoint()
    async with rig(endpoint) as gate, claude(gate) as client, codex(gate) as other:
        with pytest.raises(anthropic.APIStatusError, match="cannot be reached"):
            await client.messages.create(model="m", max_tokens=9, messages=HELLO, stream=True)
        with pytest.raises(openai.APIStatusError, match="cannot be reached"):
            await other.responses.create(model="m", input="hi")
        assert [turn.status for turn in gate.recorded] == [0, 0]


@pytest.mark.parametrize("fault", ["cut_after", "error_after"])
async def test_a_stream_that_breaks_says_so_in_the_wires_own_words_and_closes_no_tool_call(fault: str) -> None:
    broken = CALLS.model_copy(update={fault: 9})
    async with scripted(broken) as gate, claude(gate) as client, codex(gate) as other:
        with pytest.raises(anthropic.APIStatusError) as error:
            async with client.messages.stream(model="m", max_tokens=99, messages=HELLO, tools=[TOOL]) as stream:
                async for event in stream:
                    assert event.type != "content_block_stop" or event.content_block.type != "tool_use"
        assert error.value.body["type"] == "error"  # type: ignore[index]
        events = await other.responses.create(model="m", input="hi", tools=[FUNCTION], stream=True)
        kinds = [happened.type async for happened in events]
        assert kinds[-1] == "response.failed"
        assert "response.function_call_arguments.done" not in kinds
        assert all(turn.error and turn.tokens and not turn.trainable for turn in gate.recorded)


async def test_tokens_are_counted_without_asking_the_model_or_using_up_a_turn() -> None:
    async with scripted(SAYS, limits=Limits(max_turns=1)) as gate, claude(gate) as client:
        for _ in range(3):
            counted = await client.messages.count_tokens(model="m", messages=HELLO)
            assert counted.input_tokens > 0
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.count_tokens(model="m", messages=[])
        assert gate.recorded == []
        await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        with pytest.raises(anthropic.BadRequestError, match="turn limit reached"):
            await client.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert gate.lease.limit_reached == "turn limit reached"


async def test_both_libraries_can_list_the_one_model() -> None:
    async with scripted(SAYS) as gate, claude(gate) as client, codex(gate) as other:
        assert [model.id async for model in client.models.list()] == ["model"]
        assert [model.id async for model in other.models.list()] == ["model"]


async def test_an_upstream_that_answers_a_stream_with_json_is_still_understood() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        choice = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}
        writer.write(plain("200 OK", {"id": "x", "choices": [choice], "usage": {"completion_tokens": 1}}))

    async with (
        hand_made(answer) as model,
        rig(model.endpoint()) as gate,
        claude(gate) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
    ):
        assert await stream.get_final_text() == "hi"


async def test_an_upstream_whose_content_type_lies_is_still_understood() -> None:
    body = b"".join(whole("Hel", "lo"))

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("200 OK", body))

    async with (
        hand_made(answer) as model,
        rig(model.endpoint()) as gate,
        claude(gate) as client,
        client.messages.stream(model="m", max_tokens=9, messages=HELLO) as stream,
    ):
        assert await stream.get_final_text() == "Hello"
        assert gate.recorded[0].trainable
