"""The scripted model passing for other engines and versions: what each of them drops, renames or refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollcage.errors import UsageError
from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn, default_tokenizer
from rollcage.simulators.scripted.profiles import PROFILES
from rollcage.types import JsonObject
from support.scripted_client import BASH, EVERYTHING, HELLO, Answer, ask, request

CALL = ScriptedTurn(
    reasoning="A thought.",
    text="I will look.",
    tool_calls=(ScriptedCall(name="bash", arguments={"command": "ls -la /tmp"}),),
)
TEXT = ScriptedTurn(text="Nothing to do, really. é🎉")
TOOLS: JsonObject = {**HELLO, "tools": [BASH]}
USAGE: JsonObject = {"stream": True, "stream_options": {"include_usage": True}}
LOGPROBS: JsonObject = {"logprobs": True, "top_logprobs": 2}


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel() as model:
        yield model


async def sampled(model: ScriptedModel, turn: ScriptedTurn) -> list[int]:
    """The ids the newest vLLM gives for a turn: the truth the other profiles are held against."""
    answer = await ask(model.endpoint([turn]), {**TOOLS, "return_token_ids": True})
    ids: list[int] = answer.json["choices"][0]["token_ids"]
    return ids


def readable(answer: Answer) -> None:
    """Whatever the engine, the agent gets the same."""
    assert answer.status == 200 and answer.whole
    assert answer.text() == CALL.text
    assert answer.names() == ["bash"]
    assert answer.arguments() == '{"command": "ls -la /tmp"}'
    assert answer.finish == "tool_calls"
    assert answer.deltas[0]["role"] == "assistant"


@pytest.mark.parametrize("profile", PROFILES)
async def test_an_agent_can_work_with_every_engine(model: ScriptedModel, profile: str) -> None:
    answer = await ask(model.endpoint([CALL], profile=profile), {**TOOLS, **USAGE})
    readable(answer)
    assert answer.headers["x-rollcage-scripted"] == "1"
    usage = next(chunk["usage"] for chunk in answer.chunks if chunk.get("usage"))
    assert usage["completion_tokens"] in (len(await sampled(model, CALL)), len(await sampled(model, CALL)) - 1)
    whole = (await ask(model.endpoint([CALL], profile=profile), TOOLS)).json
    (choice,) = whole["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "bash"
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == CALL.text


async def test_old_vllm_loses_what_its_parser_swallowed(model: ScriptedModel) -> None:
    answer = await ask(model.endpoint([CALL], profile="vllm-0.12"), {**TOOLS, **EVERYTHING})
    readable(answer)
    assert 0 < len(answer.ids) < answer.usage["completion_tokens"]
    assert len(answer.entries) == len(answer.ids)
    assert all(delta for delta in answer.deltas[:-1])
    assert answer.text("reasoning") == answer.text("reasoning_content") == CALL.reasoning


async def test_old_vllm_keeps_every_token_where_no_parser_is_at_work(model: ScriptedModel) -> None:
    for profile in ("vllm-0.12", "vllm-0.20"):
        answer = await ask(model.endpoint([TEXT], profile=profile), {**HELLO, **EVERYTHING, "stop": ["never said"]})
        assert len(answer.ids) == len(answer.entries) == answer.usage["completion_tokens"]
        assert {"content": ""} in answer.deltas[1:]
        assert answer.text() == TEXT.text


async def test_middle_vllm_loses_logprobs_unless_ids_are_asked_for_too(model: ScriptedModel) -> None:
    endpoint = model.endpoint([CALL], profile="vllm-0.20")
    alone = await ask(endpoint, {**TOOLS, **USAGE, **LOGPROBS})
    assert len(alone.entries) < alone.usage["completion_tokens"]
    both = await ask(endpoint, {**TOOLS, **EVERYTHING})
    assert len(both.entries) == len(both.ids) == both.usage["completion_tokens"]
    assert "reasoning_content" not in str(both.deltas)
    assert "prompt_text" not in both.chunks[0]


@pytest.mark.parametrize("member", ["return_token_ids", "return_prompt_token_ids", "return_meta_info"])
async def test_sglang_refuses_ids_within_a_stream(model: ScriptedModel, member: str) -> None:
    answer = await ask(model.endpoint([CALL], profile="sglang"), {**TOOLS, "stream": True, member: True})
    assert answer.status == 400
    assert answer.json["object"] == "error" and member in answer.json["message"]


async def test_sglang_gives_ids_once_at_the_end_where_asked(model: ScriptedModel) -> None:
    endpoint, ids = model.endpoint([CALL], profile="sglang"), await sampled(model, CALL)
    asked = {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
    by_body = await ask(endpoint, {**TOOLS, **USAGE, **asked})
    readable(by_body)
    assert by_body.chunks[-1]["sglext"]["output_ids"] == [ids]
    assert by_body.chunks[-1]["choices"] == []
    assert len(by_body.chunks[-1]["sglext"]["input_ids"]) == by_body.chunks[-2]["usage"]["prompt_tokens"]
    headers = {"x_sglext_return_output_ids": "1", "x_sglext_ids_framed": "1"}
    by_header = await ask(endpoint, {**TOOLS, **USAGE}, **headers)
    assert by_header.events[-2].startswith("event: sglext_ids\ndata: {")
    assert by_header.chunks[-1]["sglext"] == {"output_ids": [ids]}
    assert "sglext" not in (await ask(endpoint, {**TOOLS, **USAGE})).chunks[-1]


async def test_sglang_gives_ids_by_choice_in_a_whole_answer(model: ScriptedModel) -> None:
    body = {**TOOLS, "return_token_ids": True, "return_prompt_token_ids": True, **LOGPROBS}
    answer = (await ask(model.endpoint([CALL], profile="sglang"), body)).json
    (choice,) = answer["choices"]
    assert choice["response_token_ids"] == await sampled(model, CALL)
    assert len(choice["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert choice["message"]["reasoning_content"] == CALL.reasoning
    assert choice["matched_stop"] == default_tokenizer().eos
    assert "token_ids" not in choice and "prompt_token_ids" not in answer


async def test_llamacpp_refuses_logprobs_beside_tools_in_a_stream(model: ScriptedModel) -> None:
    endpoint = model.endpoint([CALL], profile="llamacpp")
    answer = await ask(endpoint, {**TOOLS, **EVERYTHING})
    assert answer.status == 400
    message = "logprobs is not supported with tools + stream"
    assert answer.json == {"error": {"code": 400, "message": message, "type": "invalid_request_error"}}
    readable(await ask(endpoint, {**TOOLS, **USAGE}))


async def test_llamacpp_has_ids_in_its_entries_and_in_streams_none_for_the_end(model: ScriptedModel) -> None:
    answer = await ask(model.endpoint([TEXT], profile="llamacpp"), {**HELLO, **USAGE, **LOGPROBS})
    ids = [entry["id"] for entry in answer.entries]
    assert default_tokenizer().eos not in ids
    assert answer.choices[-1]["delta"] == {} and "logprobs" not in answer.choices[-1]
    assert "timings" in answer.chunks[-1]
    assert answer.text() == TEXT.text
    whole = (await ask(model.endpoint([TEXT], profile="llamacpp"), {**HELLO, **LOGPROBS})).json
    entries = whole["choices"][0]["logprobs"]["content"]
    assert default_tokenizer().decode(entry["id"] for entry in entries[:-1]) == TEXT.text
    assert (entries[-1]["id"], entries[-1]["token"]) == (default_tokenizer().eos, "")  # as the real one has it
    assert len(entries) == whole["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries[:-1]).decode() == TEXT.text


async def test_llamacpp_ends_a_cut_answer_with_a_chunk_of_its_own(model: ScriptedModel) -> None:
    answer = await ask(model.endpoint([TEXT], profile="llamacpp"), {**HELLO, **USAGE, "max_tokens": 3})
    assert answer.choices[-1] == {"finish_reason": "length", "index": 0, "delta": {}}
    assert TEXT.text.startswith(answer.text()) and answer.text()


async def test_openai_names_the_field_it_does_not_know(model: ScriptedModel) -> None:
    answer = await ask(model.endpoint([CALL], profile="openai"), {**TOOLS, **EVERYTHING})
    assert answer.status == 400
    assert answer.json["error"]["message"] == "Unrecognized request argument supplied: return_token_ids"
    assert answer.json["error"]["type"] == "invalid_request_error"


async def test_openai_gives_scores_for_text_and_none_for_calls(model: ScriptedModel) -> None:
    text = await ask(model.endpoint([TEXT], profile="openai"), {**HELLO, **USAGE, **LOGPROBS})
    assert len(text.entries) == text.usage["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in text.entries).decode() == TEXT.text
    assert "token_ids" not in str(text.chunks)
    called = await ask(model.endpoint([CALL], profile="openai"), {**TOOLS, **LOGPROBS})
    assert called.json["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("name", ["o3-mini", "gpt-5-mini"])
@pytest.mark.parametrize("member", ["max_tokens", "logprobs"])
async def test_openai_reasoning_models_refuse_logprobs_and_max_tokens(
    model: ScriptedModel, name: str, member: str
) -> None:
    endpoint = model.endpoint([TEXT], profile="openai", model=name)
    answer = await ask(endpoint, {**HELLO, "model": name, member: 5 if member == "max_tokens" else True})
    assert answer.status == 400
    assert answer.json["error"]["param"] == member and answer.json["error"]["code"] == "unsupported_parameter"
    assert (await ask(endpoint, {**HELLO, "model": name, "max_completion_tokens": 50})).status == 200


async def test_each_engine_tells_its_version(model: ScriptedModel) -> None:
    for profile, version in (("vllm-0.32", "0.32.0"), ("vllm-0.12", "0.12.0")):
        endpoint = model.endpoint(profile=profile)
        headers = {"authorization": f"Bearer {endpoint.key.get_secret_value()}"}
        url = endpoint.base_url.removesuffix("/v1") + "/version"
        assert (await request("GET", url, headers=headers)).json == {"version": version}


async def test_an_unknown_profile_is_refused_with_the_names_of_those_there_are(model: ScriptedModel) -> None:
    with pytest.raises(UsageError, match=r"profile 'vllm-9' is unknown: choose one of vllm-0\.32, .*openai"):
        model.endpoint([], profile="vllm-9")
