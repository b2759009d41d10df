"""What agents send, as the engine is asked it: each shape of both wires, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest

from rollcage.gateway.wires import BadRequest, token_count, wire_for
from rollcage.types import JsonObject
from support.wire_chunks import chunk

USER: JsonObject = {"role": "user", "content": "Say hi."}
PNG = {"type": "base64", "media_type": "image/png", "data": "aGk="}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}


def chat(path: str, body: JsonObject) -> tuple[JsonObject, tuple[str, ...]]:
    wire = wire_for(path, body, model="engine-model")
    assert wire is not None
    return wire.chat_request(), wire.notes


def messages(*said: JsonObject, **more: Any) -> list[JsonObject]:
    found: list[JsonObject] = chat("/v1/messages", {"messages": list(said), **more})[0]["messages"]
    return found


def inputs(*items: JsonObject, **more: Any) -> list[JsonObject]:
    found: list[JsonObject] = chat("/v1/responses", {"input": list(items), **more})[0]["messages"]
    return found


def test_only_the_two_wires_are_translated() -> None:
    assert wire_for("/v1/messages?beta=true", {}, model="m") is not None
    assert wire_for("/v1/responses", {}, model="m") is not None
    assert wire_for("/v1/chat/completions", {}, model="m") is None
    assert wire_for("/v1/messages/count_tokens", {}, model="m") is None


def test_a_messages_request_becomes_a_chat_request() -> None:
    body = {
        "model": "m1",
        "max_tokens": 64,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop_sequences": ["END"],
        "stream": True,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: v=1; who=cli;"},
            {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief."},
        ],
        "messages": [USER],
        "tools": [{"name": "bash", "description": "Run", "input_schema": {"type": "object"}, "cache_control": {}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
    }
    assert chat("/v1/messages?beta=true", body)[0] == {
        "model": "engine-model",
        "messages": [{"role": "system", "content": "Be kind.\n\nBe brief."}, USER],
        "max_tokens": 64,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "stop": ["END"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {"type": "function", "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "a"}, {"tool_choice": {"type": "function", "function": {"name": "a"}}}),
        (None, {}),
    ],
)
def test_each_tool_choice_of_messages_has_its_like(choice: object, expected: JsonObject) -> None:
    sent, _ = chat("/v1/messages", {"messages": [USER], "tools": [{"name": "a"}], "tool_choice": choice})
    assert {name: value for name, value in sent.items() if name in ("tool_choice", "parallel_tool_calls")} == expected


def test_a_provider_tool_beside_others_is_left_out_with_a_note() -> None:
    tools = [{"name": "a"}, {"type": "web_search_20250305", "name": "web_search"}]
    sent, notes = chat("/v1/messages", {"messages": [USER], "tools": tools})
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["a"]
    assert notes == ("tool left out: web_search_20250305",)


def test_results_come_before_what_the_user_says_and_failures_are_told() -> None:
    results = [
        {"type": "text", "text": "Go on."},
        {"type": "tool_result", "tool_use_id": "a", "content": "plain"},
        {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "gone"}], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c", "content": "Error: of its own", "is_error": True},
        {"type": "tool_result", "tool_use_id": "d"},
    ]
    assert messages({"role": "user", "content": results}) == [
        {"role": "tool", "tool_call_id": "a", "content": "plain"},
        {"role": "tool", "tool_call_id": "b", "content": "Error: gone"},
        {"role": "tool", "tool_call_id": "c", "content": "Error: of its own"},
        {"role": "tool", "tool_call_id": "d", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


def test_an_image_in_a_result_is_shown_by_the_user() -> None:
    content = [{"type": "text", "text": "red.png"}, {"type": "image", "source": PNG}]
    result = {"type": "tool_result", "tool_use_id": "a", "content": content}
    tool, user = messages({"role": "user", "content": [result]})
    assert tool == {"role": "tool", "tool_call_id": "a", "content": "red.png\n\n[image: shown in the next message]"}
    assert user == {"role": "user", "content": [PICTURE]}


def test_images_keep_their_place_among_the_words() -> None:
    address = {"type": "url", "url": "http://x/y.png"}
    blocks = [
        {"type": "image", "source": PNG},
        {"type": "text", "text": "and"},
        {"type": "image", "source": address},
    ]
    assert messages({"role": "user", "content": blocks})[0]["content"] == [
        PICTURE,
        {"type": "text", "text": "and"},
        {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
    ]


def test_what_a_model_cannot_be_shown_is_named_in_its_place() -> None:
    block = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aGk="}}
    sent, notes = chat("/v1/messages", {"messages": [{"role": "user", "content": [block]}]})
    assert sent["messages"][0]["content"] == "[document: cannot be shown to this model]"
    assert notes == ("left out of the conversation: document",)


def test_words_of_the_system_in_mid_conversation_are_the_users() -> None:
    late = {"role": "system", "content": "New tools."}
    expected = "Say hi.\n\n<system-reminder>\nNew tools.\n</system-reminder>"
    assert messages(USER, late) == [{"role": "user", "content": expected}]
    assert inputs(USER, {"role": "developer", "content": "New tools."}) == [{"role": "user", "content": expected}]


def test_neighbouring_messages_of_one_role_are_one() -> None:
    said = {"role": "assistant", "content": [{"type": "text", "text": "Hi "}]}
    more = {"role": "assistant", "content": "there."}
    assert messages(USER, USER, said, more) == [
        {"role": "user", "content": "Say hi.\n\nSay hi."},
        {"role": "assistant", "content": "Hi there."},
    ]


def test_thinking_goes_back_to_the_model_and_sealed_thinking_does_not() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "tool_use", "id": "a", "name": "bash", "input": {"b": 1, "a": "ü"}},
    ]
    sent, notes = chat("/v1/messages", {"messages": [USER, {"role": "assistant", "content": blocks}]})
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"b": 1, "a": "ü"}'}}
    assert sent["messages"][1] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [call],
    }
    assert notes == ("left out of what the model said: redacted_thinking",)


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [USER], "tools": [{"description": "x"}]}, "tools.0.name"),
        ({"messages": [USER], "tools": [{"name": "a"}], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    ],
)
def test_a_malformed_messages_request_is_refused_by_its_place(body: JsonObject, place: str) -> None:
    with pytest.raises(BadRequest) as raised:
        chat("/v1/messages", body)
    assert raised.value.param == place
    with pytest.raises(BadRequest):
        token_count(body)


def test_a_responses_request_becomes_a_chat_request() -> None:
    body = {
        "model": "m1",
        "instructions": "Be kind.",
        "input": "Say hi.",
        "max_output_tokens": 64,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "tools": [
            {"type": "function", "name": "bash", "description": "Run", "parameters": {"type": "object"}},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "client_metadata": {},
    }
    sent, notes = chat("/v1/responses", body)
    assert sent == {
        "model": "engine-model",
        "messages": [{"role": "system", "content": "Be kind."}, USER],
        "max_tokens": 64,
        "temperature": 0.5,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "parallel_tool_calls": False,
        "reasoning_effort": "low",
        "tools": [
            {"type": "function", "function": {"name": "bash", "description": "Run", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "auto",
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
        },
    }
    assert notes == ("tool left out: web_search",)


def test_items_of_one_turn_are_one_message_and_broken_arguments_are_mended() -> None:
    assert inputs(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Say hi."}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]},
        {"type": "function_call", "call_id": "a", "name": "bash", "arguments": '{"x":1}'},
        {"type": "function_call", "call_id": "b", "name": "bash", "arguments": '{"x"'},
        {"type": "function_call", "call_id": "c", "name": "bash", "arguments": ""},
        {"type": "function_call_output", "call_id": "a", "output": "one"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "two"}]},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:x"}]},
        {"type": "web_search_call", "id": "w"},
    ) == [
        USER,
        {
            "role": "assistant",
            "content": "Hi.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "bash", "arguments": '{"x":1}'}},
                {
                    "id": "b",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"malformed_arguments": "{\\"x\\""}'},
                },
                {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "tool", "tool_call_id": "c", "content": "[image: shown in the next message]"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]},
    ]


def test_tools_that_are_offered_in_the_conversation_are_offered_to_the_model() -> None:
    inner = [{"type": "custom", "name": "exec"}, {"type": "function", "name": "wait"}]
    offer = {"type": "additional_tools", "tools": [{"type": "namespace", "name": "functions", "tools": inner}]}
    sent, notes = chat("/v1/responses", {"input": [offer, USER]})
    assert [tool["function"]["name"] for tool in sent["tools"]] == ["exec", "wait"]
    assert (sent["messages"], notes) == ([USER], ())


def test_what_agents_write_to_each_other_is_read() -> None:
    content = [{"type": "input_text", "text": "NEW_TASK"}, {"type": "encrypted_content", "encrypted_content": "dig"}]
    said = inputs({"type": "agent_message", "author": "/root", "recipient": "/root/sub", "content": content})
    assert said == [{"role": "user", "content": "NEW_TASK\n\ndig"}]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("required", ["a", "b", "required"]),
        ({"type": "function", "name": "b"}, ["a", "b", {"type": "function", "function": {"name": "b"}}]),
        ({"type": "custom", "name": "b"}, ["a", "b", {"type": "function", "function": {"name": "b"}}]),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"name": "b"}]}, ["b", "required"]),
    ],
)
def test_each_tool_choice_of_responses_has_its_like(choice: object, expected: list[object]) -> None:
    tools = [{"type": "function", "name": "a"}, {"type": "custom", "name": "b"}]
    sent, _ = chat("/v1/responses", {"input": "x", "tools": tools, "tool_choice": choice})
    assert [*(tool["function"]["name"] for tool in sent["tools"]), sent["tool_choice"]] == expected


def test_sealed_reasoning_that_was_altered_is_refused() -> None:
    with pytest.raises(BadRequest, match="altered"):
        inputs({"type": "reasoning", "summary": [], "encrypted_content": "rollcage-!!"})


@pytest.mark.parametrize(
    "body",
    [
        b'{"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}',
        b'{"object":"error","message":"too long","type":"BadRequestError","code":400}',
        b'{"detail":"too long"}',
        b'{"error":"too long"}',
        b"too long",
    ],
)
def test_error_bodies_of_all_engines_are_read(body: bytes) -> None:
    for path in ("/v1/messages", "/v1/responses"):
        wire = wire_for(path, {}, model="m")
        assert wire is not None
        assert b'"message":"too long"' in wire.error(400, body)


def test_a_ping_before_the_first_chunk_does_not_spoil_the_stream() -> None:
    nameless = wire_for("/v1/responses", {}, model="m")
    named = wire_for("/v1/responses", {}, model="m", id="x")
    assert nameless is not None and named is not None
    assert nameless.ping() == b": ping\n\n"
    assert b"response.created" in nameless.event(chunk(content="hi"))
    assert b"response.created" in named.ping()
    assert b"response.created" not in named.event(chunk(content="hi"))
