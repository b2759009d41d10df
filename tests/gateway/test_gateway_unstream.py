"""Agents that stream, before engines that are better asked for a whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI

import support.steady  # noqa: F401
from rollcage.gateway.capture import AnswerEnd, ModelCall, turn_of
from rollcage.gateway.wires.chat import DONE, PING, ChatWire
from rollcage.gateway.wires.unstream import chunks_of
from support.hand_made import Asked, chat, hand_made, plain, rig

TEXT = st.text(max_size=8)
MESSAGES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | TEXT},
    optional={
        "reasoning_content": TEXT,
        "refusal": st.none() | TEXT,
        "tool_calls": st.lists(
            st.builds(
                lambda n, name, arguments: {
                    "id": f"call-{n}",
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                },
                st.integers(0, 10**6),
                st.text("abc_", min_size=1, max_size=5),
                TEXT,
            ),
            max_size=3,
            unique_by=lambda call: str(call["id"]),
        ),
    },
)


@given(MESSAGES, st.sampled_from(["stop", "length", "tool_calls"]), st.booleans())
def test_a_synthesised_stream_amounts_to_the_answer_it_was_made_from(
    message: dict[str, Any], finish: str, usage: bool
) -> None:
    choice = {"index": 0, "message": message, "finish_reason": finish}
    answer = {"id": "a", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    answer["usage"] = {"prompt_tokens": 2, "completion_tokens": 3}
    wire = ChatWire({"stream_options": {"include_usage": usage}})
    stream = b"".join(wire.event(chunk) for chunk in chunks_of(answer, usage=True)) + wire.finish()
    one = turn_of(ModelCall(0, {}), stream, AnswerEnd(200))
    other = turn_of(ModelCall(0, {}), json.dumps(answer).encode(), AnswerEnd(200))
    assert (one.message, one.finish_reason, one.error) == (other.message, other.finish_reason, None)
    assert one.usage == (other.usage if usage else {})
    assert stream.endswith(DONE)


def answers(body: dict[str, Any], status: str = "200 OK", **more: str) -> Any:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/v1/chat/completions":
            assert asked.json["stream"] is False
            writer.write(plain(status, body, **more))
        else:
            writer.write(plain("404 Not Found", {}))

    return answer


def said(text: str) -> dict[str, Any]:
    entries = [{"token": text, "logprob": -0.5}]
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    choice |= {"logprobs": {"content": entries}, "response_token_ids": [7], "prompt_token_ids": [1, 2]}
    usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


async def test_the_official_client_reads_a_synthesised_stream_as_any_other() -> None:
    async with hand_made(answers(said("hi"))) as model, rig(model.endpoint(kind="sglang")) as gate:
        lent = gate.lease.endpoint
        async with AsyncOpenAI(
            base_url=lent.base_url, api_key=lent.key.get_secret_value(), max_retries=0, timeout=120
        ) as client:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="model",
                    messages=[{"role": "user", "content": "x"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ]
        assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices] == ["", "hi", None]
        assert chunks[-1].usage is not None
        assert chunks[-2].choices[0].finish_reason == "stop"
        (turn,) = gate.recorded
        assert (turn.trainable, turn.streamed, turn.request["stream"]) == (True, True, False)


async def test_what_the_agent_did_not_ask_for_is_not_in_a_synthesised_stream() -> None:
    async with hand_made(answers(said("hi"))) as model, rig(model.endpoint(kind="sglang")) as gate:
        plainly = await gate.ask({"messages": [], "stream": True})
        curious = await gate.ask(chat(logprobs=True))
        for word in (b"logprobs", b"token_ids", b"usage"):
            assert word not in plainly.body
        assert b'"logprob":-0.5' in curious.body
        assert b"token_ids" not in curious.body
        assert b'"usage"' in curious.body


async def test_an_idle_stream_is_kept_alive_until_the_answer_is_there() -> None:
    may_answer = asyncio.Event()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        writer.write(plain("200 OK", said("late")))

    async with hand_made(answer) as model, rig(model.endpoint(kind="sglang")) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()))
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        assert await client.chunk() == PING
        may_answer.set()
        rest = await client.chunk()
        assert rest.endswith(DONE)
        assert b"late" in rest
        assert gate.recorded[0].trainable


@pytest.mark.parametrize("how", ["refuses", "breaks"])
async def test_an_upstream_that_fails_once_the_stream_has_begun_is_an_error_event(how: str) -> None:
    may_answer = asyncio.Event()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        await may_answer.wait()
        if how == "refuses":
            writer.write(plain("503 Service Unavailable", {"error": {"message": "overloaded", "type": "busy"}}))
        else:
            writer.close()

    async with hand_made(answer) as model, rig(model.endpoint(kind="sglang")) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()))
        await client.head()
        assert await client.chunk() == PING
        may_answer.set()
        event, done = (await client.chunk()).split(b"\n\n", 1)
        assert done == DONE
        error = json.loads(event.removeprefix(b"data: "))["error"]
        if how == "refuses":
            assert error == {"message": "overloaded", "type": "busy", "code": 503}
            assert gate.recorded[0].error == "upstream answered 503: overloaded"
        else:
            assert error["message"] == "the model cannot be reached"
            assert gate.recorded[0].error == "no answer from the model: the upstream broke off"
        assert gate.lease.last_failure is not None


async def test_an_upstream_that_refuses_at_once_does_so_with_its_own_status() -> None:
    refused = answers({"error": {"message": "slow down"}}, "429 Too Many Requests", Retry_After="7")
    async with hand_made(refused) as model, rig(model.endpoint(kind="sglang")) as gate:
        reply = await gate.ask()
        assert (reply.status, reply.headers["retry-after"], reply.json["error"]["message"]) == (429, "7", "slow down")


async def test_an_answer_that_is_none_is_an_error_and_not_an_empty_stream() -> None:
    async with hand_made(answers({"object": "nothing"})) as model, rig(model.endpoint(kind="sglang")) as gate:
        reply = await gate.ask()
        assert (reply.status, reply.json["error"]["message"]) == (502, "the model's answer broke off")
        assert gate.recorded[0].error == "the answer holds no choices"


async def test_an_agent_that_leaves_while_it_waits_cancels_the_model() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with hand_made(answer) as model, rig(model.endpoint(kind="sglang")) as gate:
        async with gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await model.arrived.wait()
        await model.hung_up.wait()


async def test_a_template_that_counts_otherwise_than_the_engine_gives_no_prompt_ids() -> None:
    entry = {"id": 7, "token": "hi", "logprob": -0.5}
    choice = {"index": 0, "message": {"content": "hi"}, "finish_reason": "stop", "logprobs": {"content": [entry]}}
    counts = iter([2, 3])

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.path == "/apply-template":
            writer.write(plain("200 OK", {"prompt": "<user>hi"}))
        elif asked.path == "/tokenize":
            assert asked.json == {"content": "<user>hi", "add_special": True, "parse_special": True}
            writer.write(plain("200 OK", {"tokens": [1, 2]}))
        else:
            usage = {"prompt_tokens": next(counts), "completion_tokens": 1}
            writer.write(plain("200 OK", {"choices": [choice], "usage": usage}))

    async with hand_made(answer) as model, rig(model.endpoint(kind="llamacpp")) as gate:
        await gate.ask()
        await gate.ask()
        good, bad = gate.recorded
        assert (good.trainable, good.prompt_ids) == (True, (1, 2))
        assert (bad.untrainable_reason, bad.prompt_ids) == ("the engine gave no prompt token ids", ())
