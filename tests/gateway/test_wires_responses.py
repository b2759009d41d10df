"""OpenAI's own client library speaks Responses to a chat engine through the wire, and finds nothing amiss."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn
from rollcage.types import JsonObject
from support.wire_chunks import call_piece, chunk, completion, counted, finish, usage
from support.wire_server import Engine, Reply, WireServer, canned, scripted, wire_server

BASH: Any = {"type": "function", "name": "bash", "parameters": {"type": "object"}, "strict": False}
PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
TEAM: Any = {"type": "namespace", "name": "team", "tools": [{**BASH, "name": "hire"}, BASH]}


@asynccontextmanager
async def client_of(engine: Engine) -> AsyncIterator[tuple[AsyncOpenAI, WireServer]]:
    async with (
        wire_server(engine) as server,
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, timeout=120) as client,
    ):
        yield client, server


@asynccontextmanager
async def scripted_client(*turns: ScriptedTurn) -> AsyncIterator[tuple[AsyncOpenAI, WireServer]]:
    async with ScriptedModel() as model, client_of(scripted(model.endpoint(turns))) as both:
        yield both


async def streamed(client: AsyncOpenAI, **request: Any) -> tuple[Any, list[Any]]:
    """The response as the library's own stream helper puts it together, and the events it saw."""
    given = {"model": "m1", "input": "Say hi.", **request}
    async with client.responses.stream(**given) as stream:
        events = [event async for event in stream]
        return await stream.get_final_response(), events


async def created(client: AsyncOpenAI, **request: Any) -> Any:
    given = {"model": "m1", "input": "Say hi.", **request}
    return await client.responses.create(**given)


async def reply_to(chunks: list[JsonObject], **request: Any) -> tuple[Any, list[Any]]:
    """The response that comes of these chunks."""
    async with client_of(canned(Reply(chunks))) as (client, _):
        return await streamed(client, **request)


def items(response: Any) -> list[JsonObject]:
    """The output without what only one side of a comparison can know."""
    dumped = [item.model_dump(exclude_none=True) for item in response.output]
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in dumped]


TURN = ScriptedTurn(
    reasoning="A file list is needed.",
    text="I will look. Ünïcode too: 🦊",
    tool_calls=(
        ScriptedCall(name="bash", arguments={"command": "ls -l"}),
        ScriptedCall(name="bash", arguments={"command": "pwd"}),
    ),
)


async def test_a_streamed_answer_has_reasoning_a_message_and_every_call() -> None:
    async with scripted_client(TURN) as (client, _):
        response, _ = await streamed(client, tools=[BASH])
    reasoning, message, first, second = response.output
    assert reasoning.content[0].text == TURN.reasoning
    assert message.content[0].text == response.output_text == TURN.text
    assert [json.loads(call.arguments) for call in (first, second)] == [{"command": "ls -l"}, {"command": "pwd"}]
    assert first.call_id != second.call_id
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


async def test_events_come_in_the_order_of_the_protocol() -> None:
    pieces = [call_piece(0, id="a", name="bash", arguments='{"x":'), call_piece(0, arguments=" 1}")]
    _, events = await reply_to(
        [
            chunk(role="assistant", content=""),
            chunk(reasoning="hm"),
            chunk(content="hi"),
            chunk(content="!", tool_calls=[pieces[0]]),
            chunk(tool_calls=[pieces[1]]),
            finish("tool_calls"),
            usage(3, 4),
        ],
        tools=[BASH],
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    # The server pings after every chunk.
    told = [event.type.removeprefix("response.") for event in events if event.type != "response.in_progress"]
    assert told == [
        "created",
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    assert events[1].type == "response.in_progress"


async def test_a_whole_answer_says_the_same_as_a_streamed_one() -> None:
    async with scripted_client(TURN) as (client, server):
        whole = await created(client, tools=[BASH])
        stream, _ = await streamed(client, tools=[BASH])
    assert "stream" not in server.chats[0]
    parsed = [{k: v for k, v in item.items() if k != "parsed_arguments"} for item in items(stream)]
    assert items(whole) == parsed
    assert whole.usage.output_tokens == stream.usage.output_tokens


async def test_a_free_form_tool_gets_text_and_not_json() -> None:
    patch = '*** Begin Patch\n+ü "quoted"\n*** End Patch\n'
    turn = ScriptedTurn(tool_calls=(ScriptedCall(name="apply_patch", arguments={"input": patch}),))
    async with scripted_client(turn) as (client, server):
        stream, events = await streamed(client, tools=[PATCH])
        whole = await created(client, tools=[PATCH])
    for response in (stream, whole):
        assert (response.output[0].type, response.output[0].name) == ("custom_tool_call", "apply_patch")
        assert response.output[0].input == patch
    assert [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"] == [patch]
    function = server.chats[0]["tools"][0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert "Edit files." in function["description"] and 'start: "x"' in function["description"]


async def test_a_model_that_forgets_the_json_of_a_free_form_tool_is_understood() -> None:
    pieces = [call_piece(0, id="a", name="apply_patch", arguments="*** Begin Patch")]
    response, _ = await reply_to([chunk(tool_calls=pieces), finish("tool_calls")], tools=[PATCH])
    assert response.output[0].input == "*** Begin Patch"


async def test_tools_in_a_namespace_are_called_by_their_own_names() -> None:
    calls = (ScriptedCall(name="hire"), ScriptedCall(name="team__bash"), ScriptedCall(name="bash"))
    async with scripted_client(ScriptedTurn(tool_calls=calls)) as (client, server):
        response = await created(client, tools=[BASH, TEAM])
        again = [item.model_dump(exclude_none=True) for item in response.output]
        await created(client, tools=[BASH, TEAM], input=again)
    assert [tool["function"]["name"] for tool in server.chats[0]["tools"]] == ["bash", "hire", "team__bash"]
    told = [(item.name, item.namespace) for item in response.output]
    assert told == [("hire", "team"), ("bash", "team"), ("bash", None)]
    sent_back = server.chats[1]["messages"][0]["tool_calls"]
    assert [call["function"]["name"] for call in sent_back] == ["hire", "team__bash", "bash"]


@pytest.mark.parametrize(("reason", "told"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
async def test_an_answer_that_was_cut_short_is_incomplete(reason: str, told: str) -> None:
    chunks = [chunk(reasoning="hm"), chunk(content="half an"), finish(reason), usage(3, 4)]
    async with client_of(canned(Reply(chunks))) as (client, _):
        stream = await created(client, stream=True)
        last = [event async for event in stream][-1]
    answer = completion({"reasoning": "hm", "content": "half an"}, reason, usage=counted(3, 4))
    async with client_of(canned(Reply(body=json.dumps(answer).encode()))) as (client, _):
        whole = await created(client)
    assert last.type == "response.incomplete"
    for response in (last.response, whole):
        assert (response.status, response.incomplete_details.reason) == ("incomplete", told)
        assert [item.status for item in response.output] == ["completed", "incomplete"]
        assert response.usage.output_tokens == 4


async def test_calls_whose_pieces_are_mixed_come_out_whole() -> None:
    response, _ = await reply_to(
        [
            chunk(tool_calls=[call_piece(0, id="a", name="bash"), call_piece(1, id="b", name="read")]),
            chunk(tool_calls=[call_piece(0, arguments='{"x":'), call_piece(1, arguments='{"y": ')]),
            chunk(
                content="late", tool_calls=[call_piece(1, name="read", arguments="2}"), call_piece(0, arguments="1}")]
            ),
            chunk(tool_calls=[call_piece(2, id="c", name="none")]),
            finish("tool_calls", token_ids=[1, 2]),
        ]
    )
    calls = {item.call_id: (item.name, item.arguments) for item in response.output if item.type == "function_call"}
    assert calls == {"a": ("bash", '{"x":1}'), "b": ("read", '{"y": 2}'), "c": ("none", "")}
    assert response.output_text == "late"
    assert response.usage is None


async def test_calls_with_one_id_between_them_are_told_apart() -> None:
    pieces = [call_piece(0, id="a", name="bash", arguments="{}"), call_piece(1, id="a", name="bash", arguments="{}")]
    response, _ = await reply_to([chunk(tool_calls=pieces), finish("tool_calls")])
    assert [item.call_id for item in response.output] == ["a", "a_1"]


async def test_an_answer_of_nothing_is_an_empty_response() -> None:
    response, _ = await reply_to([chunk(), finish("stop")])
    assert (response.output, response.status) == ([], "completed")


async def test_a_stream_that_breaks_fails_and_does_not_complete() -> None:
    async with scripted_client(ScriptedTurn(text="this will not be finished at all", cut_after=3)) as (client, _):
        events = [event async for event in await created(client, stream=True)]
    assert events[-1].type == "response.failed"
    assert "broke off" in events[-1].response.error.message
    assert not [event for event in events if event.type == "response.completed"]


async def test_an_error_in_mid_stream_carries_its_message() -> None:
    async with scripted_client(ScriptedTurn(text="the engine died of this", error_after=2)) as (client, _):
        events = [event async for event in await created(client, stream=True)]
    assert events[-1].response.error.message == "the engine died of this"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, openai.BadRequestError), (429, openai.RateLimitError), (500, openai.InternalServerError)],
)
async def test_an_engines_refusal_keeps_its_status_and_its_words(status: int, kind: type[Exception]) -> None:
    async with scripted_client(ScriptedTurn(text="because of this", status=status)) as (client, _):
        with pytest.raises(kind, match="because of this"):
            await streamed(client)


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\.0"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, r"input\.0\.role"),
        ({"tools": [BASH], "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ],
)
async def test_what_cannot_be_translated_is_refused_with_the_place(request_: JsonObject, place: str) -> None:
    async with client_of(canned()) as (client, server):
        with pytest.raises(openai.BadRequestError, match=place):
            await created(client, **request_)
    assert server.chats == []


async def test_a_conversation_of_three_turns_comes_back_as_it_was() -> None:
    patch = ScriptedCall(name="apply_patch", arguments={"input": "*** Begin Patch"})
    turns = (TURN, ScriptedTurn(reasoning="Once more.", tool_calls=(patch,)), ScriptedTurn(text="Done."))
    history: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]
    async with scripted_client(*turns) as (client, server):
        for _ in turns:
            response = await created(client, input=history, tools=[BASH, PATCH], instructions="Be kind.")
            for item in response.output:
                history.append(item.model_dump(exclude_none=True))
            for item in response.output:
                if item.type in ("function_call", "custom_tool_call"):
                    kind = f"{item.type}_output"
                    history.append({"type": kind, "call_id": item.call_id, "output": f"of {item.call_id}"})
    first, second, third = (chat["messages"] for chat in server.chats)
    assert first[0] == {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert second[: len(first)] == first and third[: len(second)] == second
    answer, one, two = second[len(first) :]
    assert answer["content"] == TURN.text and answer["reasoning_content"] == TURN.reasoning
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [
        '{"command": "ls -l"}',
        '{"command": "pwd"}',
    ]
    ids = [call["id"] for call in answer["tool_calls"]]
    assert [one, two] == [{"role": "tool", "tool_call_id": id, "content": f"of {id}"} for id in ids]
    assert third[len(second)]["reasoning_content"] == "Once more."
    assert third[len(second)]["tool_calls"][0]["function"]["name"] == "apply_patch"
    assert json.loads(third[len(second)]["tool_calls"][0]["function"]["arguments"]) == patch.arguments


async def test_a_client_that_keeps_nothing_in_the_open_sends_sealed_reasoning_back() -> None:
    async with scripted_client(TURN, ScriptedTurn(text="Done.")) as (client, server):
        response = await created(client, include=["reasoning.encrypted_content"])
        kept = response.output[0].model_dump(exclude_none=True)
        del kept["content"]
        await created(client, input=[{"role": "user", "content": "Say hi."}, kept])
    assert server.chats[1]["messages"][-1]["reasoning_content"] == TURN.reasoning
