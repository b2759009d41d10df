"""What agents see of what the gateway asked for: whole answers show none of it, streams only what does no harm."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.gateway import Gateway
from rollcage.gateway.wires.chat import ChatWire, UsageFilter
from rollcage.simulators import ScriptedModel, ScriptedTurn
from support.hand_made import ROLE, Asked, chat, chunked, event, hand_made, head, rig, says, text_event, whole

CAPTURED = (b"logprob", b"token_ids", b"prompt_text")


async def test_a_whole_answer_shows_nothing_that_the_agent_did_not_ask_for() -> None:
    async with hand_made(says("a", "b")) as model, rig(model.endpoint()) as gate:
        lean = await gate.ask(chat(stream=False))
        assert not any(word in lean.body for word in CAPTURED)
        assert lean.json["choices"][0]["message"]["content"] == "ab"
        assert lean.json["usage"]["completion_tokens"] == 2
        curious = await gate.ask(chat(stream=False, logprobs=True, return_token_ids=True))
        assert len(curious.json["choices"][0]["logprobs"]["content"]) == 2
        assert curious.json["choices"][0]["token_ids"] == [0, 1]
        assert all(turn.trainable for turn in gate.recorded)


async def test_a_stream_has_no_chunk_without_choices_unless_the_agent_asked_for_the_count() -> None:
    body = {"messages": [], "stream": True}
    async with hand_made(says("a", "b")) as model, rig(model.endpoint()) as gate:
        events = whole("a", "b")
        assert (await gate.ask(body)).body == b"".join([*events[:-2], events[-1]])
        asked = await gate.ask({**body, "stream_options": {"include_usage": True}})
        assert asked.body == b"".join(events)
        assert [turn.usage["completion_tokens"] for turn in gate.recorded] == [2, 2]


async def test_a_stream_that_breaks_while_it_is_sifted_loses_nothing_on_the_way() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + chunked(ROLE + text_event("a", ids=[10])))
        writer.close()

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask({"messages": [], "stream": True})
        assert (reply.body, reply.cut) == (ROLE + text_event("a", ids=[10]), True)


async def test_a_gateway_that_strips_shows_streams_without_what_was_captured() -> None:
    script = [ScriptedTurn(text="one two three"), ScriptedTurn(text="x y z", error_after=2)]
    async with (
        ScriptedModel() as model,
        Gateway.open(strip=True) as gateway,
        rig(model.endpoint(script), gateway=gateway) as gate,
    ):
        reply = await gate.ask(chat())
        assert not any(word in reply.body for word in CAPTURED)
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"usage"' in reply.body
        said = [json.loads(line[6:]) for line in reply.body.split(b"\n\n")[:-2]]
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in said if c["choices"]) == script[0].text
        assert gate.recorded[0].trainable
        messages = [*chat()["messages"], {"role": "assistant", "content": "one two three"}]
        broken = await gate.ask({**chat(), "messages": messages})
        assert b'"error"' in broken.body
        assert gate.recorded[1].error == "the engine reported an error: x y z"


async def test_a_gateway_that_strips_cuts_what_breaks() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + chunked(ROLE + text_event("a", ids=[10])))
        writer.close()

    async with (
        hand_made(answer) as model,
        Gateway.open(strip=True) as gateway,
        rig(model.endpoint(), gateway=gateway) as gate,
    ):
        reply = await gate.ask()
        assert reply.cut
        assert b'"content":"a"' in reply.body


@pytest.mark.parametrize("gap", [b"\n", b"\r\n"])
@given(st.lists(st.integers(0, 2000), max_size=12))
def test_any_split_of_a_stream_is_sifted_alike(gap: bytes, cuts: list[int]) -> None:
    counted = event(choices=[], usage={"completion_tokens": 2})
    events = [ROLE, text_event('tricky "choices":[] text', ids=[1]), counted, b": comment\n\n", b"data: [DONE]\n\n"]
    stream = b"".join(events).replace(b"\n", gap)
    cuts = sorted(min(cut, len(stream)) for cut in cuts)
    sift = UsageFilter()
    out = b"".join(sift.feed(stream[a:b]) for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)) + sift.end()
    assert out == stream.replace(counted.replace(b"\n", gap), b"")


@pytest.mark.parametrize(
    "answer", [b"", b"<html>", b"[1]", b'{"choices": 5}', b'{"choices": [5]}', b'{"a": 1}', b'{"choices": [{"x": 1}]}']
)
def test_what_cannot_be_trimmed_is_left_as_it_is(answer: bytes) -> None:
    assert ChatWire({}).trimmed(answer) == answer


@given(st.dictionaries(st.sampled_from(["logprobs", "return_token_ids", "return_prompt_token_ids"]), st.booleans()))
def test_an_answer_keeps_exactly_what_was_asked_for(asked: dict[str, Any]) -> None:
    choice = {"index": 0, "logprobs": {"content": []}, "token_ids": [1], "message": {"content": "é 😀"}}
    answer = {"id": "x", "choices": [choice], "prompt_token_ids": [2]}
    out = json.loads(ChatWire(asked).trimmed(json.dumps(answer).encode()))
    assert ("logprobs" in out["choices"][0]) == bool(asked.get("logprobs"))
    assert ("token_ids" in out["choices"][0]) == bool(asked.get("return_token_ids"))
    prompt = asked.get("return_token_ids") or asked.get("return_prompt_token_ids")
    assert ("prompt_token_ids" in out) == bool(prompt)
    assert out["choices"][0]["message"] == choice["message"]
