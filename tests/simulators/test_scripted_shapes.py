"""The scripted model beside a real vLLM 0.32.0: its schemas, and streams that were recorded from it."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from typing import Any

import jsonschema
import pytest

from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn, default_tokenizer
from rollcage.types import JsonObject
from support.paths import GOLDEN
from support.scripted_client import BASH, EVERYTHING, HELLO, Answer, ask

SAID = "I'm glad you're here. I'm here to help with any creative endeavors. What can I do for you today?"
LONG = {"command": "bash -c 'ls -la /tmp | sort | uniq -c'", "description": "This is a bash command {with} braces"}
TEXT = ScriptedTurn(text=SAID)
CALL = ScriptedTurn(tool_calls=(ScriptedCall(name="bash", arguments=LONG),))
THOUGHT = ScriptedTurn(reasoning="Hello there", text=SAID)
ALL = ScriptedTurn(
    reasoning="Let me see: é🎉.",
    text="Two calls.\n",
    tool_calls=(ScriptedCall(name="bash", arguments=LONG), ScriptedCall(name="read", arguments={"filePath": "ü"})),
)


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel() as model:
        yield model


def validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads((GOLDEN / f"vllm_0.32.0_{name}.schema.json").read_text()))


CHUNK, RESPONSE = validator("ChatCompletionStreamResponse"), validator("ChatCompletionResponse")


def requests(*flags: Iterable[JsonObject]) -> Iterable[JsonObject]:
    for combination in itertools.product(*flags):
        body: JsonObject = {**HELLO, "tools": [BASH]}
        for part in combination:
            body |= part
        yield body


LOGPROBS: list[JsonObject] = [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}]
IDS: list[JsonObject] = [{}, {"return_token_ids": True}]
CUTS: list[JsonObject] = [{}, {"max_tokens": 30}, {"stop": ["calls", "ash"]}, {"n": 2, "tool_choice": "required"}]
USAGE: list[JsonObject] = [
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
]
ODD: list[JsonObject] = [
    {},
    {"return_tokens_as_token_ids": True},
    {"include_reasoning": False},
    {"return_prompt_text": True},
]


@pytest.mark.parametrize("turn", [TEXT, CALL, THOUGHT, ALL], ids=["text", "call", "thought", "all"])
async def test_every_chunk_under_every_flag_is_one_that_vllm_could_send(
    model: ScriptedModel, turn: ScriptedTurn
) -> None:
    endpoint = model.endpoint([turn])
    for body in itertools.chain(requests(USAGE, LOGPROBS, IDS, CUTS), requests(USAGE[1:2], LOGPROBS, IDS, ODD)):
        answer = await ask(endpoint, body)
        assert answer.status == 200 and answer.whole and answer.events[-1] == "data: [DONE]", body
        for chunk in answer.chunks:
            CHUNK.validate(chunk)
        assert ("usage" in answer.chunks[-1]) == ("stream_options" in body)
        if "stream_options" in body and body.get("include_reasoning", True):
            agree(answer, body)


@pytest.mark.parametrize("turn", [TEXT, CALL, THOUGHT, ALL], ids=["text", "call", "thought", "all"])
async def test_every_whole_answer_under_every_flag_is_one_that_vllm_could_send(
    model: ScriptedModel, turn: ScriptedTurn
) -> None:
    endpoint = model.endpoint([turn])
    for body in itertools.chain(requests(LOGPROBS, IDS, CUTS), requests(LOGPROBS, IDS, ODD)):
        answer = (await ask(endpoint, body)).json
        RESPONSE.validate(answer)
        for choice in answer["choices"]:
            assert (choice["token_ids"] is None) == ("return_token_ids" not in body or "include_reasoning" in body)
            assert (choice["logprobs"] is None) == ("logprobs" not in body or "include_reasoning" in body)
        assert (answer["prompt_token_ids"] is None) == ("return_token_ids" not in body)


def agree(answer: Answer, body: JsonObject) -> None:
    """Ids, logprobs and the engine's own count say the same, whichever were asked for."""
    count = answer.usage["completion_tokens"]
    assert answer.usage["total_tokens"] == count + answer.usage["prompt_tokens"]
    if body.get("return_token_ids"):
        assert len(answer.ids) == count
    if body.get("logprobs"):
        assert len(answer.entries) == count
        assert {len(entry["top_logprobs"]) for entry in answer.entries} == {body.get("top_logprobs", 0)}


def skeleton(value: Any) -> Any:
    """Which members, in which order, of which type; lists by their first element."""
    match value:
        case dict():
            return tuple((key, skeleton(item)) for key, item in value.items())
        case list():
            return ("list", *(skeleton(item) for item in value[:1]))
        case None:
            return "null"
        case bool() | str():
            return type(value).__name__
        case _:
            return "number"


def kind(chunk: JsonObject) -> str:
    """What a chunk is for."""
    if not chunk["choices"]:
        return "usage"
    (choice,) = chunk["choices"]
    delta = choice["delta"]
    name = "swallowed"
    if "role" in delta:
        name = "role"
    elif delta.get("tool_calls"):
        name = "header" if "id" in delta["tool_calls"][0] else "arguments"
    elif delta:
        name = "reasoning" if "reasoning" in delta else "text"
    return f"finishing {name}" if choice["finish_reason"] else name


def kinds(chunks: Iterable[JsonObject]) -> dict[str, set[Any]]:
    found: defaultdict[str, set[Any]] = defaultdict(set)
    for chunk in chunks:
        found[kind(chunk)].add(skeleton(chunk))
    return dict(found)


def recorded(name: str) -> list[JsonObject]:
    lines = (GOLDEN / f"{name}.sse").read_text().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


RECORDED = {
    "text_plain": TEXT,
    "text_ids_only": TEXT,
    "text_logprobs_only": TEXT,
    "text_logprobs_ids": TEXT,
    "text_as_token_ids": TEXT,
    "text_continuous_usage": TEXT,
    "text_interval4": TEXT,
    "text_n2": TEXT,
    "text_stop_string": TEXT,
    "text_eos": TEXT,
    "tool_required": CALL,
    "tool_required_plain": CALL,
    "tool_named": CALL,
    "tool_truncated": CALL,
}


@pytest.mark.parametrize("name", RECORDED)
async def test_a_stream_has_the_same_kinds_of_chunks_in_the_same_shapes_as_the_recorded_one(
    model: ScriptedModel, name: str
) -> None:
    body = {"stream_interval": 1, **json.loads((GOLDEN / f"{name}.req.json").read_text())}
    if name in ("tool_required", "tool_named", "tool_required_plain", "text_eos"):
        del body["max_tokens"]
    if name == "text_stop_string":
        body["stop"] = ["with"]  # one token here, as "help" is for the recorded model
    ours = await ask(model.endpoint([RECORDED[name]], model="smol"), body)
    assert kinds(ours.chunks) == kinds(recorded(name))
    theirs = [choice["finish_reason"] for chunk in recorded(name) for choice in chunk["choices"]]
    assert {choice["finish_reason"] for choice in ours.choices} == set(theirs)


async def test_a_stream_that_thinks_has_the_shapes_of_the_recorded_one(model: ScriptedModel) -> None:
    body = {**HELLO, **EVERYTHING, "top_logprobs": 0, "max_tokens": 12, "stream_interval": 1}
    ours = await ask(model.endpoint([THOUGHT]), body)
    assert kinds(ours.chunks) == kinds(recorded("reasoning"))
    assert ours.text("reasoning") == "Hello there"
    assert ours.usage["completion_tokens_details"]["reasoning_tokens"] == len(default_tokenizer().encode("Hello there"))


async def test_a_stream_of_another_model_has_the_same_shapes(model: ScriptedModel) -> None:
    body = {**HELLO, **EVERYTHING, "top_logprobs": 1, "tools": [BASH], "stream_interval": 1}
    for name, turn in (("qwen_tool_required", CALL), ("qwen_auto_fenced", TEXT)):
        ours = await ask(model.endpoint([turn]), body)
        assert kinds(ours.chunks) == kinds(recorded(name))


@pytest.mark.parametrize("name", ["text_eos", "tool_required", "tool_named"])
async def test_a_whole_answer_has_the_shape_of_the_recorded_one(model: ScriptedModel, name: str) -> None:
    body = json.loads((GOLDEN / f"{name}.req.json").read_text())
    for member in ("stream", "stream_options", "max_tokens"):
        del body[member]
    ours = (await ask(model.endpoint([RECORDED[name]], model="smol"), body)).json
    theirs = json.loads((GOLDEN / f"{name}.nonstream.json").read_text())
    assert skeleton(ours) == skeleton(theirs)
    assert ours["choices"][0]["finish_reason"] == theirs["choices"][0]["finish_reason"]


def test_the_recorded_streams_themselves_pass_these_checks() -> None:
    for path in GOLDEN.glob("*.sse"):
        for chunk in recorded(path.stem):
            CHUNK.validate(chunk)
