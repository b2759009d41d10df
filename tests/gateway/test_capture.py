"""From bytes to turns: the recorded streams of a real vLLM, the shapes of other engines, and everything odd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import support.steady  # noqa: F401
from rollcage.gateway.capture import AnswerEnd, ModelCall, TurnBuilder, turn_of
from rollcage.sse import EventReader
from rollcage.types import Alternative, FloatColumn, JsonColumn, Token, TokenColumns, Turn
from support.hand_made import ROLE, event, text_event, whole
from support.paths import GOLDEN

CALL = ModelCall(index=0, request={})
STREAMS = sorted(GOLDEN.glob("*.sse"))
UNTRAINABLE = {
    "text_as_token_ids": "the engine gave no prompt token ids",
    "text_ids_only": "the engine gave no logprobs",
    "text_logprobs_only": "the engine gave no token ids",
    "text_n2": "2 choices: only choice 0 is kept",
    "text_plain": "the engine gave neither token ids nor logprobs",
    "tool_required_plain": "the engine gave neither token ids nor logprobs",
}


def turn(*events: bytes, status: int = 200, error: str | None = None) -> Turn:
    return turn_of(CALL, b"".join(events), AnswerEnd(status, error))


def one(delta: dict[str, Any], **fields: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, **fields}])


def end(reason: str = "stop") -> bytes:
    return one({}, finish_reason=reason) + b"data: [DONE]\n\n"


def calls(*pieces: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The tool calls that come of these pieces, one per chunk."""
    found = turn(*(one({"tool_calls": [piece]}) for piece in pieces), end("tool_calls")).message["tool_calls"]
    return [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in found]


def piece(arguments: str | None = None, name: str | None = None, **fields: Any) -> dict[str, Any]:
    inner = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {"function": inner, **fields}


def test_calls_of_a_whole_answer_stay_apart_even_where_they_share_an_id() -> None:
    both = [piece('{"a": 1}', "bash", id="c"), piece("", "bash", id="c")]
    body = json.dumps({"choices": [{"message": {"tool_calls": both}, "finish_reason": "tool_calls"}]}).encode()
    found = turn(body).message["tool_calls"]
    assert [call["function"]["arguments"] for call in found] == ['{"a": 1}', ""]


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_every_recorded_stream_becomes_the_turn_it_is(path: Path) -> None:
    body = path.read_bytes()
    found = turn_of(CALL, body, AnswerEnd(200))
    events = [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {")]
    first = [choice for chunk in events for choice in chunk["choices"] if choice["index"] == 0]
    ids = [id_ for choice in first for id_ in choice.get("token_ids") or ()]
    entries = [entry for choice in first for entry in (choice["logprobs"] or {}).get("content") or ()]
    assert found.error is None
    assert found.usage == next(chunk["usage"] for chunk in reversed(events) if chunk.get("usage"))
    assert list(found.prompt_ids) == (events[0].get("prompt_token_ids") or [])
    if ids:
        assert [token.id for token in found.tokens] == ids
    if entries:
        assert [token.logprob for token in found.tokens] == [entry["logprob"] for entry in entries]
    assert found.untrainable_reason == UNTRAINABLE.get(path.stem, "")
    assert found.trainable == (path.stem not in UNTRAINABLE)
    if found.trainable:
        assert len(found.tokens) == found.usage["completion_tokens"]
        assert len(found.prompt_ids) == found.usage["prompt_tokens"]
    assert found == Turn.model_validate(found.model_dump())


@pytest.mark.parametrize("name", ["text_eos", "tool_named", "tool_required"])
def test_the_same_answer_as_a_stream_and_as_a_whole_is_the_same_turn(name: str) -> None:
    streamed = turn_of(CALL, (GOLDEN / f"{name}.sse").read_bytes(), AnswerEnd(200))
    unary = turn_of(CALL, (GOLDEN / f"{name}.nonstream.json").read_bytes(), AnswerEnd(200))
    assert [t.id for t in unary.tokens] == [t.id for t in streamed.tokens]
    assert [t.text for t in unary.tokens] == [t.text for t in streamed.tokens]
    assert unary.prompt_ids == streamed.prompt_ids
    assert unary.finish_reason == streamed.finish_reason
    assert unary.trainable
    assert streamed.trainable


def test_tool_calls_reasoning_and_alternatives_of_the_recorded_streams() -> None:
    tool = turn_of(CALL, (GOLDEN / "qwen_tool_required.sse").read_bytes(), AnswerEnd(200))
    assert tool.message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command": "ls /tmp"}'}
    assert "".join(t.text for t in tool.tokens).startswith("<tool_call>")
    thought = turn_of(CALL, (GOLDEN / "reasoning.sse").read_bytes(), AnswerEnd(200))
    assert thought.message["reasoning_content"] == "Hello there"
    named = turn_of(CALL, (GOLDEN / "tool_named.sse").read_bytes(), AnswerEnd(200))
    assert Alternative("<|endoftext|>", None, -9999.0) in named.tokens[0].top
    spelled = turn_of(CALL, (GOLDEN / "text_as_token_ids.sse").read_bytes(), AnswerEnd(200))
    assert spelled.tokens[0] == Token(
        "I", 57, -1.7479089498519897, (Alternative("token_id:57", 57, -1.7479089498519897),)
    )


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(STREAMS), st.data())
def test_any_split_of_a_stream_gives_the_same_turn(path: Path, data: st.DataObject) -> None:
    body = path.read_bytes()
    if data.draw(st.booleans()):
        body = body.replace(b"\n", data.draw(st.sampled_from([b"\r\n", b"\r"])))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=30)))
    answer = TurnBuilder()
    for start, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        answer.feed(body[start:stop])
    assert answer.turn(CALL, AnswerEnd(200)) == turn_of(CALL, path.read_bytes(), AnswerEnd(200))


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(STREAMS), st.floats(0, 1))
def test_any_prefix_of_a_stream_is_a_valid_partial_turn(path: Path, share: float) -> None:
    body = path.read_bytes()
    whole_turn = turn_of(CALL, body, AnswerEnd(200))
    part = turn_of(CALL, body[: int(len(body) * share)], AnswerEnd(200, "agent hung up"))
    assert part.tokens == whole_turn.tokens[: len(part.tokens)]
    assert whole_turn.message["content"].startswith(part.message.get("content", ""))
    assert part.error in (None, "agent hung up")
    if part.error is None:
        assert part.tokens == whole_turn.tokens
    else:
        assert not part.trainable
    assert part == Turn.model_validate(part.model_dump())


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=300) | st.binary(max_size=80).map(lambda noise: ROLE + b"data: " + noise + b"\n\n" + end()))
def test_no_bytes_whatever_break_the_parser(noise: bytes) -> None:
    found = turn_of(CALL, noise, AnswerEnd(200))
    assert found == Turn.model_validate(found.model_dump())
    assert not found.trainable


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["index", "delta", "logprobs", "finish_reason", "token_ids", "prompt_token_ids", "text", "message"]
)
INNER = st.sampled_from(["content", "reasoning", "tool_calls", "refusal", "tokens", "token_logprobs", "top_logprobs"])


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(FIELDS, JSON | st.dictionaries(INNER, JSON), max_size=4), JSON, JSON)
def test_no_shape_whatever_breaks_the_parser(choice: dict[str, Any], usage: object, sglext: object) -> None:
    found = turn(event(choices=[choice], usage=usage, sglext=sglext), end())
    assert found == Turn.model_validate(found.model_dump())


def test_the_rules_of_event_streams_are_kept() -> None:
    body = (
        "\ufeff: a comment\r\nevent: message\r\nid: 7\r\nretry: 10\r\n"
        'data: {"choices": [{"index": 0,\r\ndata:  "delta": {"content": "a\u2028b\u0085c"}}]}\r\n\r\n'
        ":\r\n\r\n"
        'data:{"choices": [{"delta": {}, "finish_reason": "stop"}]}\r\n\r\ndata:[DONE]'
    ).encode()
    found = turn(body)
    assert (found.message["content"], found.finish_reason, found.error) == ("a\u2028b\u0085c", "stop", None)


def test_a_line_of_many_megabytes_in_small_portions_is_read_in_good_time() -> None:
    events, data = EventReader(), b"data: " + b"x" * (16 << 20) + b"\n\n"
    found = [each for start in range(0, len(data), 1000) for each in events.feed(data[start : start + 1000])]
    assert [len(each.data) for each in found] == [16 << 20]


def test_ids_and_logprobs_that_disagree_in_number_never_become_rows_that_lie() -> None:
    entries = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    found = turn(ROLE, one({"content": "ab"}, logprobs={"content": entries}, token_ids=[1, 2, 3]), end())
    assert found.tokens == (Token("", 1, None), Token("", 2, None), Token("", 3, None))
    assert found.untrainable_reason == "a chunk has 3 token ids but 2 logprobs"


def test_a_count_that_is_not_the_engines_own_is_not_trainable() -> None:
    tokens = [text_event("a", None, [1]), text_event("b", "stop", [2])]
    found = turn(ROLE, *tokens, event(choices=[], usage={"completion_tokens": 3}), b"data: [DONE]\n\n")
    assert found.untrainable_reason == "2 tokens captured, but the engine counted 3"
    found = turn(ROLE, *tokens, b"data: [DONE]\n\n")
    assert found.untrainable_reason == "the engine gave no usage to check the count of tokens against"


def test_llama_cpp_has_its_ids_inside_the_entries() -> None:
    top = [{"id": 3725, "token": "```", "bytes": [96], "logprob": -0.3}]
    entry = {"id": 4590, "token": "Here", "bytes": [72], "logprob": -2.0, "top_logprobs": top}
    found = turn(one({"content": "Here"}, logprobs={"content": [entry]}), end())
    assert found.tokens == (Token("Here", 4590, -2.0, (Alternative("```", 3725, -0.3),)),)
    assert found.untrainable_reason == "the engine gave no prompt token ids"


@pytest.mark.parametrize("named", [False, True])
def test_sglang_tells_the_ids_of_a_stream_at_its_end(named: bool) -> None:
    entries = [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]
    ids = {"input_ids": [5, 6], "output_ids": [[1, 2]]}
    last = b"event: sglext_ids\n" + event(**ids) if named else event(choices=[], sglext=ids)
    usage = event(choices=[], usage={"completion_tokens": 2})
    found = turn(*(one({"content": e["token"]}, logprobs={"content": [e]}) for e in entries), usage, last, end())
    assert ([t.id for t in found.tokens], found.prompt_ids, found.trainable) == ([1, 2], (5, 6), True)
    short = event(choices=[], sglext={"output_ids": [[1]]})
    found = turn(*(one({}, logprobs={"content": [e]}) for e in entries), short, end())
    assert found.untrainable_reason == "the engine gave 1 token ids but 2 logprobs"


def test_sglang_without_a_stream_calls_its_ids_by_another_name() -> None:
    choice = {
        "index": 0,
        "message": {"content": "a", "reasoning_content": "hm"},
        "finish_reason": "stop",
        "logprobs": {"content": [{"token": "a", "logprob": -1.0}]},
        "response_token_ids": [9],
        "prompt_token_ids": [1, 2],
    }
    found = turn(json.dumps({"choices": [choice], "usage": {"completion_tokens": 1}}).encode())
    assert (found.trainable, found.tokens[0].id, found.prompt_ids) == (True, 9, (1, 2))
    assert found.message["reasoning_content"] == "hm"


def test_both_names_of_reasoning_at_once_are_one_text() -> None:
    found = turn(one({"reasoning": "a", "reasoning_content": "a"}), one({"reasoning_content": "b"}), end())
    assert found.message["reasoning_content"] == "ab"


def test_a_name_told_again_in_every_piece_is_one_name() -> None:
    assert calls(
        piece('{"a"', "bash", index=0, id="c1"), piece(":1", "bash", index=0, id="c1"), piece("}", index=0)
    ) == [("c1", "bash", '{"a":1}')]


def test_a_name_in_fragments_is_put_together() -> None:
    assert calls(piece("", "todo", index=0, id="c1"), piece("{}", "write", index=0)) == [("c1", "todowrite", "{}")]


def test_calls_without_an_index_are_told_apart_by_their_ids() -> None:
    assert calls(
        piece("{}", "bash", id="c1", index=None),
        piece('{"p":', "read", id="c2"),
        piece("1}", id="c2"),
        piece("", id="c1"),
    ) == [("c1", "bash", "{}"), ("c2", "read", '{"p":1}')]


def test_calls_without_index_and_id_are_told_apart_by_what_is_complete() -> None:
    assert calls(piece('{"a"', "bash"), piece(":1}"), piece('{"a":2}', "bash"), piece("{}", "read")) == [
        ("", "bash", '{"a":1}'),
        ("", "bash", '{"a":2}'),
        ("", "read", "{}"),
    ]


def test_calls_that_are_all_number_zero_do_not_merge() -> None:
    assert calls(piece("{}", "bash", index=0, id="c1"), piece("{}", "bash", index=0, id="c2")) == [
        ("c1", "bash", "{}"),
        ("c2", "bash", "{}"),
    ]


def test_an_id_that_changes_with_every_piece_is_still_one_call() -> None:
    assert calls(piece("", "bash", index=0, id="c1"), piece("{", index=0, id="c2"), piece("}", index=0, id="c3")) == [
        ("c1", "bash", "{}")
    ]


def test_odd_deltas_are_read_and_cost_nothing_else() -> None:
    found = turn(
        event(choices=None, usage=None),
        event(choices=[{"index": None, "delta": {"content": [{"type": "text", "text": "a"}]}}]),
        event(choices=[{"index": 0, "delta": None}]),
        event(choices=[{"delta": {"content": 5, "tool_calls": {"index": 0}}}]),
        one({"tool_calls": [{"index": "0", "function": {"name": "bash", "arguments": {"a": 1}}}]}),
        one({"content": "b"}),
        end(),
    )
    assert (found.message["content"], found.error) == ("ab", None)
    assert found.message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"a":1}'}


def test_numbers_no_json_has_are_no_logprobs() -> None:
    body = one({"content": "a"}, token_ids=[1], logprobs={"content": [{"token": "a", "logprob": float("-inf")}]})
    assert b"-Infinity" in body
    found = turn(ROLE, body, end())
    assert found.tokens == (Token("a", 1, None),)
    assert found.untrainable_reason == "the engine gave no logprobs"


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b'{"error":{"message":"no\\nsuch model","code":404}}', 404, "upstream answered 404: no such model"),
        (b'{"detail":"Not Found"}', 404, "upstream answered 404: Not Found"),
        (b"<html></html>", 500, "upstream answered 500"),
        (b"", 503, "upstream answered 503"),
        (b"<html></html>", 200, "the answer holds no choices"),
        (b"", 200, "the answer holds no choices"),
        (b'{"choices":[{"index":0,"message":{"content":"a"', 200, "the answer is no whole JSON object"),
        (b'{"error":"overloaded"}', 200, "the engine reported an error: overloaded"),
        (b'event: error\ndata: {"message":"died"}\n\n', 200, "the engine reported an error: died"),
        (ROLE, 200, "the answer ended without a finish reason"),
        (ROLE + b'data: {"choices":[{"in\n\n' + end(), 200, "an event of the stream is no JSON object"),
    ],
)
def test_what_is_no_whole_answer_says_why(body: bytes, status: int, error: str) -> None:
    found = turn(body, status=status)
    assert (found.error, found.trainable) == (error, False)
    assert found.untrainable_reason == f"not whole: {error}"


def test_a_stream_that_was_complete_is_whole_whatever_happened_to_the_connection_then() -> None:
    assert turn(*whole("a"), error="agent hung up").trainable
    assert turn(*whole("a")[:-1], error="agent hung up").error == "agent hung up"
    assert turn(*whole("a")[:-1]).trainable  # no [DONE], but the body ended as announced


def test_an_error_event_outlives_everything_that_follows() -> None:
    found = turn(*whole("a")[:2], event(error={"message": "out of memory"}), *whole("a")[2:], error="agent hung up")
    assert found.error == "the engine reported an error: out of memory"


def usual(count: int) -> list[bytes]:
    """The events of a stream as vLLM sends it."""
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "prompt_token_ids": [1, 2]}
    rows = [
        {
            "index": 0,
            "delta": {"reasoning": f"r{n}"} if n % 5 == 0 else {"content": f"w{n}"},
            "logprobs": {
                "content": [
                    {
                        "token": f"w{n}",
                        "logprob": -n / 8,
                        "top_logprobs": [
                            {"token": f"o{k}", "logprob": None if k == 7 else -k / 4} for k in range(n % 9)
                        ],
                    }
                ]
            },
            "finish_reason": None,
            "token_ids": [100 + n],
        }
        for n in range(count)
    ]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    counted = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": count}}
    chunks = [first, *({"choices": [row]} for row in rows), last, counted]
    return [*(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks), b"data: [DONE]\n\n"]


@pytest.mark.parametrize("odd", [b"", b": ping\n\n", b"event: x\ndata: {}\n\n", b"data: {}\ndata: {}\n\n", b"\r\n"])
def test_events_that_come_together_say_what_they_say_one_by_one(odd: bytes) -> None:
    events = usual(40)
    events.insert(20, odd)
    call, end = ModelCall(index=0, request={}), AnswerEnd(200)
    together = TurnBuilder()
    together.feed(b"".join(events[:11]))
    together.feed(b"".join(events[11:]))
    single = TurnBuilder()
    for at in b"".join(events):
        single.feed(bytes([at]))
    one, other = together.turn(call, end), single.turn(call, end)
    assert one == other and len(one.tokens) == 40
    assert one.trainable == (odd != b"data: {}\ndata: {}\n\n"), one.untrainable_reason


def test_tokens_are_a_view_of_columns_that_reads_as_rows() -> None:
    builder = TurnBuilder()
    builder.feed(b"".join(usual(20)))
    turn = builder.turn(ModelCall(index=0, request={}), AnswerEnd(200))
    rows = tuple(turn.tokens)
    assert isinstance(turn.tokens, TokenColumns)
    assert (
        rows[3] == Token("w3", 103, -0.375, (Alternative("o0", None, 0.0), *rows[3].top[1:])) and len(rows[3].top) == 3
    )
    assert len(rows[8].top) == 7, "an alternative without a logprob is none"
    assert turn.tokens == rows and rows == turn.tokens and turn.tokens[-1] == rows[-1] and turn.tokens[2:5] == rows[2:5]
    assert Turn.model_validate_json(turn.model_dump_json()) == turn
    assert Turn.model_json_schema()["properties"]["tokens"]["type"] == "array"
    with pytest.raises(ValueError, match="differ in length"):
        TokenColumns(
            JsonColumn(["a"]),
            JsonColumn(),
            FloatColumn([None]),
            JsonColumn([0]),
            JsonColumn(),
            JsonColumn(),
            FloatColumn(),
        )
