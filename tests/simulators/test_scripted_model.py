"""What the scripted model says: which turn answers, and ids, scores, counts and text that agree."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.errors import UsageError
from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn, default_tokenizer
from rollcage.simulators.scripted.template import prompt_ids
from rollcage.types import JsonObject
from support.scripted_client import BASH, EVERYTHING, HELLO, ask, content, conversation

TOKENIZER = default_tokenizer()
DONE = ScriptedTurn(text="Done.")
LOOK = ScriptedTurn(text="I look.", tool_calls=(ScriptedCall(name="bash", arguments={"command": "ls /tmp"}),))
STREAM: JsonObject = {**HELLO, "stream": True}


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel(context_length=50_000) as model:
        yield model


# Scripts


async def test_the_number_of_answers_in_the_conversation_chooses_the_turn(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="one"), ScriptedTurn(text="two")])
    said = [await content(endpoint, conversation(n)) for n in (0, 1, 0, 1, 2, 7)]
    assert said == ["one", "two", "one", "two", "The script is over.", "The script is over."]


async def test_a_passing_fault_gives_way_to_the_turn_after_it_and_shifts_nothing(model: ScriptedModel) -> None:
    busy = ScriptedTurn(status=503, text="busy", times=2)
    slow = ScriptedTurn(status=429, text="slow down", times=1)
    endpoint = model.endpoint([busy, slow, ScriptedTurn(text="one"), ScriptedTurn(text="two")])
    assert await content(endpoint, conversation(1)) == "two"
    answers = [await ask(endpoint, conversation(0)) for _ in range(5)]
    assert [answer.status for answer in answers] == [503, 503, 429, 200, 200]
    assert await content(endpoint, conversation(1)) == "two"


async def test_a_passing_fault_strikes_at_its_own_place(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="one"), ScriptedTurn(status=503, times=1), ScriptedTurn(text="two")])
    assert await content(endpoint, conversation(0)) == "one"
    assert (await ask(endpoint, conversation(1))).status == 503
    assert await content(endpoint, conversation(1)) == "two"


async def test_a_lasting_fault_never_gives_way(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="one"), ScriptedTurn(status=500, text="broken"), DONE])
    assert await content(endpoint, conversation(0)) == "one"
    assert {(await ask(endpoint, conversation(1))).status for _ in range(4)} == {500}


@pytest.mark.parametrize("system", ["You are a title generator. Short!", "You are a context summarization agent."])
async def test_a_call_for_the_agents_own_use_is_no_turn(model: ScriptedModel, system: str) -> None:
    endpoint = model.endpoint([ScriptedTurn(status=500, times=1), ScriptedTurn(text="one")])
    body = {**HELLO, "messages": [{"role": "system", "content": system}, *HELLO["messages"]]}
    said = await content(endpoint, body)
    assert said and said not in ("one", "The script is over.")
    assert (await ask(endpoint, HELLO)).status == 500


async def test_scripts_do_not_see_each_other(model: ScriptedModel) -> None:
    first, second = model.endpoint([ScriptedTurn(text="a")]), model.endpoint([ScriptedTurn(text="b")])
    assert first.kind == "scripted" and first.model == "scripted" and first.key != second.key
    assert (await content(first, HELLO), await content(second, HELLO)) == ("a", "b")
    assert [seen.body for seen in model.requests(first)] == [HELLO]
    assert model.requests(first)[0].headers["content-type"] == "application/json"
    model.forget(first)
    assert (await ask(first, HELLO)).status == 401
    with pytest.raises(UsageError):
        model.requests(first)


async def test_sampling_goes_into_the_endpoint(model: ScriptedModel) -> None:
    assert model.endpoint([], temperature=0.5, top_logprobs=3).sampling.temperature == 0.5


async def test_a_status_no_server_could_send_is_refused(model: ScriptedModel) -> None:
    with pytest.raises(UsageError, match="turn 1"):
        model.endpoint([DONE, ScriptedTurn(status=42)])


# Counts, ids and text

WORDS = st.text(st.characters(codec="utf-8"), max_size=60)
ARGUMENTS = st.dictionaries(WORDS, WORDS | st.integers() | st.lists(st.booleans(), max_size=2), max_size=3)
CALLS = st.lists(
    st.builds(ScriptedCall, name=st.text(st.characters(codec="utf-8"), min_size=1), arguments=ARGUMENTS), max_size=3
)
TURNS = st.builds(ScriptedTurn, text=WORDS, reasoning=WORDS, tool_calls=CALLS.map(tuple))
unfazed = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
relaxed = settings(deadline=None, max_examples=60, suppress_health_check=unfazed)


@relaxed
@given(turn=TURNS, interval=st.none() | st.integers(1, 9))
async def test_ids_and_scores_and_counts_agree_and_decode_to_exactly_what_was_said(
    model: ScriptedModel, turn: ScriptedTurn, interval: int | None
) -> None:
    endpoint = model.endpoint([turn])
    body = {**HELLO, **EVERYTHING, "tools": [BASH], **({"stream_interval": interval} if interval else {})}
    answer = await ask(endpoint, body)
    assert len(answer.ids) == len(answer.entries) == answer.usage["completion_tokens"]
    assert answer.chunks[0]["prompt_token_ids"] == prompt_ids(HELLO["messages"], [BASH])
    assert answer.usage["prompt_tokens"] == len(answer.chunks[0]["prompt_token_ids"])
    assert (answer.text("reasoning"), answer.text()) == (turn.reasoning, turn.text)
    assert answer.names() == [call.name for call in turn.tool_calls]
    for n, call in enumerate(turn.tool_calls):
        assert json.loads(answer.arguments(n)) == call.arguments
    for delta in answer.deltas[1:]:
        kinds = [kind for kind in ("reasoning", "content", "tool_calls") if delta.get(kind)]
        assert len(kinds) <= 1 and len(delta.get("tool_calls") or ()) <= 1
    thought = f"<think>{turn.reasoning}</think>" if turn.reasoning else ""
    decoded = TOKENIZER.decode(answer.ids)
    assert decoded.startswith(thought + turn.text) and decoded.endswith("<|im_end|>")
    assert answer.ids[-1] == TOKENIZER.eos and answer.choices[-1]["token_ids"][-1] == TOKENIZER.eos
    if not turn.tool_calls:
        assert decoded == f"{thought}{turn.text}<|im_end|>"
    whole = (await ask(endpoint, {**body, "stream": False, "stream_options": None})).json["choices"][0]
    assert whole["token_ids"] == answer.ids
    assert whole["logprobs"]["content"] == answer.entries
    assert whole["message"]["content"] == turn.text and whole["finish_reason"] == answer.finish


@relaxed
@given(turn=TURNS, limit=st.integers(1, 40), stop=st.lists(st.text(min_size=1, max_size=4), max_size=2))
async def test_a_cut_answer_is_a_prefix_with_counts_that_still_agree(
    model: ScriptedModel, turn: ScriptedTurn, limit: int, stop: list[str]
) -> None:
    endpoint = model.endpoint([turn])
    whole = await ask(endpoint, {**HELLO, **EVERYTHING})
    answer = await ask(endpoint, {**HELLO, **EVERYTHING, "max_tokens": limit, "stop": stop})
    assert len(answer.ids) == len(answer.entries) == answer.usage["completion_tokens"] <= limit
    assert answer.ids == whole.ids[: len(answer.ids)]
    assert turn.text.startswith(answer.text()) and turn.reasoning.startswith(answer.text("reasoning"))
    for n in range(len(turn.tool_calls)):
        assert whole.arguments(n).startswith(answer.arguments(n))
    last = answer.choices[-1]
    assert last["finish_reason"] and not any(choice["finish_reason"] for choice in answer.choices[:-1])
    if last["stop_reason"] is not None:
        assert last["stop_reason"] in stop and last["stop_reason"] not in answer.text()
    elif len(answer.ids) < len(whole.ids):
        assert last["finish_reason"] == "length" and len(answer.ids) == limit


async def test_portions_are_of_one_to_seven_tokens_and_the_same_for_the_same_request(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="word " * 300)])
    first, again = [await ask(endpoint, {**HELLO, **EVERYTHING}) for _ in range(2)]
    sizes = [len(choice["token_ids"]) for choice in first.choices[1:]]
    assert sizes == [len(choice["token_ids"]) for choice in again.choices[1:]]
    assert set(sizes) == {1, 2, 3, 4, 5, 6, 7}
    assert first.entries == again.entries


async def test_text_is_withheld_while_it_could_be_the_start_of_a_stop_word(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="here is the function that stops here")])
    answer = await ask(endpoint, {**HELLO, **EVERYTHING, "stop": "that stop", "stream_interval": 1})
    said = ""
    for choice in answer.choices[1:-1]:
        said += choice["delta"].get("content") or ""
        assert not said.endswith("that")
    assert answer.deltas[1] == {} and answer.choices[1]["token_ids"]
    assert answer.text() == "here is the function "
    assert answer.finish == "stop" and answer.choices[-1]["stop_reason"] == "that stop"
    kept = await ask(endpoint, {**HELLO, **EVERYTHING, "stop": "that stop", "include_stop_str_in_output": True})
    assert kept.text() == "here is the function that stop"


async def test_a_stop_token_ends_the_answer_and_is_told(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="read the file")])
    (stop,) = TOKENIZER.encode(" the")
    answer = await ask(endpoint, {**HELLO, **EVERYTHING, "stop_token_ids": [stop]})
    assert answer.text() == "read" and answer.ids[-1] == stop
    assert answer.choices[-1]["stop_reason"] == stop


async def test_one_token_ends_the_arguments_and_closes_the_call(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(tool_calls=(ScriptedCall(name="f", arguments={"a": {"b": 1}}),))])
    answer = await ask(endpoint, {**HELLO, **EVERYTHING, "stream_interval": 1})
    last = [choice for choice in answer.choices if (choice["delta"].get("tool_calls"))][-1]
    assert last["delta"]["tool_calls"][0]["function"]["arguments"] == "}"
    assert last["logprobs"]["content"][0]["token"] == "}}\n"


async def test_blanks_at_the_end_of_arguments_wait_for_what_follows_them(model: ScriptedModel) -> None:
    raw = '{\n    "command": "ls",\n    "timeout": 5\n}'
    endpoint = model.endpoint([ScriptedTurn(tool_calls=(ScriptedCall(name="bash", raw_arguments=raw),))])
    answer = await ask(endpoint, {**HELLO, **EVERYTHING, "stream_interval": 1})
    calls = [delta["tool_calls"][0]["function"] for delta in answer.deltas if delta.get("tool_calls")]
    parts = [call["arguments"] for call in calls if "arguments" in call]
    assert "".join(parts) == raw and len(parts) > 5
    assert all(part == part.rstrip() for part in parts)


async def test_a_character_appears_with_the_token_that_completes_it(model: ScriptedModel) -> None:
    text = "é 中 🎉 ü👩‍🚀"
    answer = await ask(model.endpoint([ScriptedTurn(text=text)]), {**HELLO, **EVERYTHING, "stream_interval": 1})
    ids: list[int] = []
    said = ""
    for choice in answer.choices[1:-1]:
        ids += choice["token_ids"]
        said += choice["delta"].get("content", "")
        assert said == b"".join(map(TOKENIZER.token_bytes, ids)).decode("utf-8", "ignore")
    assert said == text


async def test_malformed_arguments_arrive_as_written(model: ScriptedModel) -> None:
    raw = '{"command": "ls", \n  '
    endpoint = model.endpoint([ScriptedTurn(tool_calls=(ScriptedCall(name="nope", raw_arguments=raw),))])
    answer = await ask(endpoint, {**HELLO, **EVERYTHING, "tools": [BASH]})
    assert answer.arguments() == raw and answer.names() == ["nope"] and answer.finish == "tool_calls"
    whole = (await ask(endpoint, {**HELLO, "tools": [BASH]})).json
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == raw


async def test_scores_are_plausible(model: ScriptedModel) -> None:
    body = {**HELLO, **EVERYTHING, "top_logprobs": 20, "tools": [BASH]}
    endpoint = model.endpoint([LOOK])
    free = await ask(endpoint, body)
    for entry in free.entries:
        top = entry["top_logprobs"]
        assert top[0]["token"] == entry["token"] and top[0]["logprob"] == entry["logprob"] < 0
        others = [one["logprob"] for one in top[1:]]
        assert others == sorted(others, reverse=True)
        assert len({one["token"] for one in top}) == 20
    forced = await ask(endpoint, {**body, "tool_choice": "required"})
    first = forced.entries[0]
    assert first["logprob"] == 0.0 and {one["logprob"] for one in first["top_logprobs"][1:]} == {-9999.0}


async def test_a_named_tool_ends_with_stop_and_no_tools_at_all_leave_the_raw_text(model: ScriptedModel) -> None:
    endpoint = model.endpoint([LOOK])
    named = {"type": "function", "function": {"name": "bash"}}
    answer = await ask(endpoint, {**HELLO, "tools": [BASH], "tool_choice": named})
    assert answer.json["choices"][0]["finish_reason"] == "stop"
    none = await ask(endpoint, {**HELLO, "tools": [BASH], "tool_choice": "none"})
    message = none.json["choices"][0]["message"]
    assert "tool_calls" not in message and message["content"].startswith("I look.<tool_call>\n{")


async def test_thinking_can_be_turned_off(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="yes", reasoning="hm")])
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = (await ask(endpoint, {**HELLO, **off, "return_token_ids": True})).json["choices"][0]
    assert answer["message"]["reasoning"] is None and TOKENIZER.decode(answer["token_ids"]) == "yes<|im_end|>"


async def test_a_forced_finish_reason_is_sent(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="yes", finish_reason="content_filter")])
    assert (await ask(endpoint, STREAM)).finish == "content_filter"


async def test_the_older_route_streams_the_raw_text_of_the_right_turn(model: ScriptedModel) -> None:
    endpoint = model.endpoint([LOOK, DONE])
    prompt = prompt_ids(conversation(0)["messages"])
    body = {"model": "scripted", "prompt": prompt, "logprobs": 2, "return_token_ids": True}
    whole = (await ask(endpoint, body, path="/completions")).json["choices"][0]
    assert whole["prompt_token_ids"] == prompt and whole["text"].startswith("I look.<tool_call>\n{")
    assert len(whole["token_ids"]) == len(whole["logprobs"]["token_logprobs"])
    streamed = await ask(
        endpoint, {**body, "stream": True, "stream_options": {"include_usage": True}}, path="/completions"
    )
    assert "".join(choice["text"] for choice in streamed.choices) == whole["text"]
    assert streamed.ids == whole["token_ids"] and streamed.usage["completion_tokens"] == len(streamed.ids)
    assert streamed.finish == whole["finish_reason"] == "stop"
    assert [choice["prompt_token_ids"] for choice in streamed.choices][:2] == [prompt, None]
    text = TOKENIZER.decode(prompt_ids(conversation(1)["messages"]))
    second = (await ask(endpoint, {"model": "scripted", "prompt": text}, path="/completions")).json
    assert second["choices"][0]["text"] == "Done." and second["choices"][0]["logprobs"] is None
