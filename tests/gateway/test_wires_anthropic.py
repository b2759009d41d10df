"""Anthropic's own client library speaks to a chat engine through the wire, and finds nothing amiss."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic

from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn
from rollcage.types import JsonObject
from support.wire_chunks import call_piece, chunk, completion, finish, usage
from support.wire_server import Engine, Reply, WireServer, canned, scripted, wire_server

BASH: Any = {"name": "bash", "description": "Run it", "input_schema": {"type": "object"}}
HELLO: Any = {"role": "user", "content": "Say hi."}


@asynccontextmanager
async def client_of(engine: Engine) -> AsyncIterator[tuple[AsyncAnthropic, WireServer]]:
    async with (
        wire_server(engine) as server,
        AsyncAnthropic(base_url=server.url, api_key="key", max_retries=0, timeout=120) as client,
    ):
        yield client, server


@asynccontextmanager
async def scripted_client(*turns: ScriptedTurn) -> AsyncIterator[tuple[AsyncAnthropic, WireServer]]:
    async with ScriptedModel() as model, client_of(scripted(model.endpoint(turns))) as both:
        yield both


async def streamed(client: AsyncAnthropic, **request: Any) -> Any:
    """The message as the library's own stream helper puts it together."""
    given = {"model": "m1", "max_tokens": 1000, "messages": [HELLO], **request}
    async with client.messages.stream(**given) as stream:
        return await stream.get_final_message()


async def created(client: AsyncAnthropic, **request: Any) -> Any:
    given = {"model": "m1", "max_tokens": 1000, "messages": [HELLO], **request}
    return await client.messages.create(**given)


async def reply_to(chunks: list[JsonObject], **request: Any) -> Any:
    """The message that comes of these chunks."""
    async with client_of(canned(Reply(chunks))) as (client, _):
        return await streamed(client, **request)


def blocks(message: Any) -> list[JsonObject]:
    return [block.model_dump(exclude_none=True) for block in message.content]


TURN = ScriptedTurn(
    reasoning="A file list is needed.",
    text="I will look. Ünïcode too: 🦊",
    tool_calls=(
        ScriptedCall(name="bash", arguments={"command": "ls -l"}),
        ScriptedCall(name="bash", arguments={"command": "pwd"}),
    ),
)


async def test_a_streamed_answer_has_thinking_text_and_every_call() -> None:
    async with scripted_client(TURN) as (client, server):
        message = await streamed(client, tools=[BASH])
    thinking, text, first, second = blocks(message)
    assert thinking["thinking"] == TURN.reasoning and thinking["signature"]
    assert text == {"type": "text", "text": TURN.text}
    assert (first["name"], first["input"]) == ("bash", {"command": "ls -l"})
    assert (second["name"], second["input"]) == ("bash", {"command": "pwd"})
    assert message.stop_reason == "tool_use"
    assert message.model == "m1"
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0
    assert server.chats[0]["stream_options"] == {"include_usage": True}


async def test_a_whole_answer_says_the_same_as_a_streamed_one() -> None:
    async with scripted_client(TURN) as (client, server):
        whole, stream = await created(client, tools=[BASH]), await streamed(client, tools=[BASH])
    assert "stream" not in server.chats[0]
    # The scripted model's ids depend on the request.
    nameless = [[{**block, "id": ""} for block in blocks(message)] for message in (whole, stream)]
    assert nameless[0] == nameless[1]
    assert (whole.stop_reason, whole.usage.output_tokens) == (stream.stop_reason, stream.usage.output_tokens)


async def test_text_arrives_as_it_is_generated() -> None:
    said = [chunk(content=word) for word in ("one ", "two ", "three")]
    async with (
        client_of(canned(Reply([*said, finish("stop")]))) as (client, _),
        client.messages.stream(model="m1", max_tokens=100, messages=[HELLO]) as stream,
    ):
        pieces = [piece async for piece in stream.text_stream]
    assert pieces == ["one ", "two ", "three"]


@pytest.mark.parametrize(
    ("reason", "extra", "expected"),
    [
        ("stop", {}, ("end_turn", None)),
        ("stop", {"stop_reason": "END"}, ("stop_sequence", "END")),
        ("stop", {"matched_stop": "END"}, ("stop_sequence", "END")),
        ("stop", {"stop_reason": 151645}, ("end_turn", None)),
        ("length", {}, ("max_tokens", None)),
        ("content_filter", {}, ("refusal", None)),
        ("abort", {}, ("end_turn", None)),
    ],
)
async def test_each_finish_reason_has_its_stop_reason(reason: str, extra: JsonObject, expected: object) -> None:
    chunks = [chunk(content="hi"), finish(reason, **extra)]
    message = await reply_to(chunks)
    assert (message.stop_reason, message.stop_sequence) == expected


async def test_a_stop_word_that_ended_the_answer_is_told() -> None:
    async with scripted_client(ScriptedTurn(text="one two STOP three")) as (client, server):
        message = await streamed(client, stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "one two "
    assert server.chats[0]["stop"] == ["STOP"]


async def test_calls_that_the_engine_ends_with_stop_are_still_calls() -> None:
    message = await reply_to([chunk(tool_calls=[call_piece(0, id="c1", name="bash", arguments="{}")]), finish("stop")])
    assert message.stop_reason == "tool_use"


async def test_cached_tokens_are_told_apart() -> None:
    message = await reply_to([chunk(content="hi"), finish("stop"), usage(100, 7, cached=60)])
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (40, 60)
    assert message.usage.output_tokens == 7


async def test_calls_whose_pieces_are_mixed_come_out_whole() -> None:
    message = await reply_to(
        [
            chunk(content="", reasoning=None),
            chunk(tool_calls=[call_piece(0, id="a", name="bash"), call_piece(1, id="b", name="read")]),
            chunk(tool_calls=[call_piece(0, arguments='{"x":'), call_piece(1, arguments='{"y": ')]),
            chunk(
                content="late", tool_calls=[call_piece(1, name="read", arguments="2}"), call_piece(0, arguments="1}")]
            ),
            chunk(tool_calls=[call_piece(2, id="c", name="none")]),
            finish("tool_calls", token_ids=[1, 2]),
            usage(3, 4),
        ]
    )
    assert blocks(message) == [
        {"type": "tool_use", "id": "a", "name": "bash", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "read", "input": {"y": 2}},
        {"type": "tool_use", "id": "c", "name": "none", "input": {}},
        {"type": "text", "text": "late"},
    ]


async def test_arguments_that_are_no_json_reach_the_agent_as_an_object() -> None:
    broken = ScriptedTurn(tool_calls=(ScriptedCall(name="bash", raw_arguments='{"command": "ls'),))
    async with scripted_client(broken) as (client, _):
        stream, whole = await streamed(client, tools=[BASH]), await created(client, tools=[BASH])
    assert stream.content[0].input == whole.content[0].input == {"malformed_arguments": '{"command": "ls'}


async def test_calls_without_ids_get_ids_of_their_own() -> None:
    pieces = [{"function": {"name": "bash", "arguments": "{}"}}, {"function": {"name": "bash", "arguments": "{}"}}]
    message = await reply_to([chunk(tool_calls=[pieces[0]]), chunk(tool_calls=[pieces[1]]), finish("tool_calls")])
    first, second = message.content
    assert first.id and second.id and first.id != second.id


async def test_an_answer_of_nothing_is_an_empty_message() -> None:
    message = await reply_to([chunk(), finish("stop")])
    assert (message.content, message.stop_reason) == ([], "end_turn")


async def test_a_stream_that_breaks_is_an_error_and_not_an_answer() -> None:
    cut = ScriptedTurn(text="this will not be finished at all", cut_after=3)
    async with scripted_client(cut) as (client, _):
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            await streamed(client)


async def test_an_error_in_mid_stream_carries_its_message() -> None:
    async with scripted_client(ScriptedTurn(text="the engine died of this", error_after=2)) as (client, _):
        with pytest.raises(anthropic.APIStatusError, match="the engine died of this"):
            await streamed(client)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, anthropic.BadRequestError),
        (401, anthropic.AuthenticationError),
        (404, anthropic.NotFoundError),
        (429, anthropic.RateLimitError),
        (500, anthropic.InternalServerError),
    ],
)
async def test_an_engines_refusal_keeps_its_status_and_its_words(status: int, kind: type[Exception]) -> None:
    async with scripted_client(ScriptedTurn(text="because of this", status=status)) as (client, _):
        with pytest.raises(kind) as raised:
            await streamed(client)
    body: Any = raised.value.__dict__["body"]
    assert body["type"] == "error"
    assert body["error"]["message"] == "because of this"


async def test_what_cannot_be_translated_is_refused_with_the_place() -> None:
    async with client_of(canned()) as (client, server):
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0\.role"):
            await created(client, messages=[{"role": "robot", "content": "x"}])
        with pytest.raises(anthropic.BadRequestError, match="web_search_20250305"):
            await created(client, tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert server.chats == []


async def test_tokens_are_counted_without_asking_the_model() -> None:
    async with client_of(canned()) as (client, server):
        short = await client.messages.count_tokens(model="m1", messages=[HELLO])
        long = await client.messages.count_tokens(model="m1", messages=[{"role": "user", "content": "word " * 1000}])
    assert 0 < short.input_tokens < 40
    assert 1000 < long.input_tokens < 1500
    assert server.chats == []


async def test_a_conversation_of_three_turns_comes_back_as_it_was() -> None:
    turns = (TURN, ScriptedTurn(reasoning="Once more.", tool_calls=(TURN.tool_calls[0],)), ScriptedTurn(text="Done."))
    messages: list[Any] = [HELLO]
    async with scripted_client(*turns) as (client, server):
        for _ in turns:
            message = await streamed(client, messages=messages, tools=[BASH])
            messages.append({"role": "assistant", "content": message.content})
            calls = [block for block in message.content if block.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"of {call.id}"} for call in calls]
            messages += [{"role": "user", "content": results}] if results else []
    first, second, third = (chat["messages"] for chat in server.chats)
    assert second[: len(first)] == first and third[: len(second)] == second
    answer, one, two = second[len(first) :]
    assert answer["content"] == TURN.text and answer["reasoning_content"] == TURN.reasoning
    assert [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]] == [
        {"command": "ls -l"},
        {"command": "pwd"},
    ]
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["bash", "bash"]
    ids = [call["id"] for call in answer["tool_calls"]]
    assert [one, two] == [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ids]
    assert third[len(second)]["reasoning_content"] == "Once more."


async def test_the_calls_of_a_whole_completion_keep_the_engines_ids() -> None:
    answer = completion({"content": None, "tool_calls": [call_piece(None, id="call-x.1", name="bash", arguments="")]})
    async with client_of(canned(Reply(body=json.dumps(answer).encode()))) as (client, _):
        message = await created(client)
    assert blocks(message) == [{"type": "tool_use", "id": "call-x.1", "name": "bash", "input": {}}]
