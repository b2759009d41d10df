"""However an engine cuts its answer into chunks, the agent gets the answer it would have got in one piece."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import support.steady  # noqa: F401
from rollcage.gateway.wires import Wire, wire_for
from rollcage.sse import EventReader
from rollcage.types import JsonObject
from support.paths import GOLDEN
from support.wire_chunks import HEAD, call_piece, chunk, completion, counted, finish, usage
from support.wire_server import streamed

ANTHROPIC: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSES: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOLS = [{"type": "function", "name": "bash"}, {"type": "custom", "name": "free"}]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
arguments = st.one_of(
    st.dictionaries(st.text(max_size=5), json_values, max_size=3).map(json.dumps),
    st.fixed_dictionaries({"input": st.text(max_size=20)}).map(json.dumps),
    st.sampled_from(["", "{", '{"command": "ls', "no json", "[1]", "NaN", '"text"']),
)


def whole_wire(path: str) -> Wire:
    wire = wire_for(path, {"model": "m1", "tools": TOOLS}, model="m", id="x", created=7)
    assert wire is not None
    return wire


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces, some of them empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@st.composite
def calls(draw: st.DrawFn) -> list[tuple[str, str, str]]:
    given = draw(st.lists(st.tuples(st.sampled_from(["bash", "free", "other"]), arguments), max_size=3))
    return [(f"call-{n}", name, text) for n, (name, text) in enumerate(given)]


@st.composite
def call_deltas(draw: st.DrawFn, n: int, call: tuple[str, str, str]) -> list[JsonObject]:
    """One call as engines stream it: with an index or without, its name once or with every piece."""
    id, name, text = call
    index = draw(st.sampled_from([n, None]))
    again = index is not None and draw(st.booleans())
    rest = draw(pieces(text))
    first = call_piece(index, id=id, name=name, arguments=rest.pop(0) if draw(st.booleans()) else None)
    return [first, *(call_piece(index, name=name if again else None, arguments=piece) for piece in rest)]


class Said:
    """An answer, and one of the ways in which it may be streamed."""

    def __init__(self, draw: st.DrawFn, *, orderly: bool) -> None:
        self.reasoning, self.text = draw(st.text(max_size=20)), draw(st.text(max_size=20))
        self.calls = draw(calls())
        self.reason = draw(st.sampled_from(["stop", "tool_calls", "length"]))
        self.usage = counted(draw(st.integers(0, 99)), draw(st.integers(0, 99)), cached=draw(st.integers(0, 9)))
        name = draw(st.sampled_from(["reasoning", "reasoning_content"]))
        thoughts: list[JsonObject] = [{name: piece} for piece in draw(pieces(self.reasoning))]
        words: list[JsonObject] = [{"content": piece} for piece in draw(pieces(self.text))]
        lanes = [draw(call_deltas(n, call)) for n, call in enumerate(self.calls)]
        if not orderly:
            # Lanes run side by side; a piece must then say whose it is.
            lanes = [[{**piece, "index": n} for piece in lane] for n, lane in enumerate(lanes)]
        said = [thoughts, words, *([{"tool_calls": [piece]} for piece in lane] for lane in lanes)]
        deltas = [delta for lane in said for delta in lane] if orderly else _mixed(draw, said)
        self.chunks = [chunk(role="assistant", content=""), *_grouped(draw, deltas)]
        for _ in range(draw(st.integers(0, 2))):
            odd = draw(st.sampled_from([chunk(), {**HEAD, "choices": []}, chunk(content=None, tool_calls=None), {}]))
            self.chunks.insert(draw(st.integers(0, len(self.chunks))), odd)
        ending = finish(self.reason)
        self.chunks += (
            [ending, usage(0, 0) | {"usage": self.usage}] if draw(st.booleans()) else [ending | {"usage": self.usage}]
        )

    def whole(self) -> JsonObject:
        """The same without streaming."""
        whole_calls = [call_piece(None, id=id, name=name, arguments=text) for id, name, text in self.calls]
        message = {"content": self.text or None, "reasoning": self.reasoning or None, "tool_calls": whole_calls}
        return completion(message, self.reason, usage=self.usage)


def _mixed(draw: st.DrawFn, lanes: list[list[JsonObject]]) -> list[JsonObject]:
    """The lanes in one, each in its own order. Calls begin in theirs, as indices do."""
    lanes = [list(lane) for lane in lanes]
    begun = [lane.pop(0) for lane in lanes[2:]]
    order = draw(st.permutations([n for n, lane in enumerate(lanes) for _ in lane]))
    return begun + [lanes[n].pop(0) for n in order]


def _grouped(draw: st.DrawFn, deltas: list[JsonObject]) -> list[JsonObject]:
    """Deltas in chunks, now and then two of them in one."""
    chunks: list[JsonObject] = []
    for delta in deltas:
        last = chunks[-1]["choices"][0]["delta"] if chunks else None
        if last is not None and draw(st.booleans()) and (not set(last) & set(delta) or "tool_calls" in last):
            joined = last.get("tool_calls", []) + delta.get("tool_calls", [])
            if "tool_calls" not in last or set(delta) == {"tool_calls"}:
                last |= delta | ({"tool_calls": joined} if joined else {})
                continue
        chunks.append(chunk(**delta))
    return chunks


orderly = st.composite(lambda draw: Said(draw, orderly=True))()
mixed = st.composite(lambda draw: Said(draw, orderly=False))()


def events(data: bytes) -> list[JsonObject]:
    reader = EventReader()
    found = [*reader.feed(data), *reader.end()]
    values: list[JsonObject] = [json.loads(event.data) for event in found]
    assert [value["type"] for value in values] == [event.name for event in found]
    return values


def message_of(data: bytes) -> JsonObject:
    """Put a stream of Messages together, minding that blocks never overlap."""
    message: JsonObject = {}
    open_block: JsonObject | None = None
    arguments = ""
    for event in events(data):
        ANTHROPIC.validate_python(event)
        kind = event["type"]
        if kind == "message_start":
            message = event["message"]
        elif kind == "content_block_start":
            assert open_block is None and event["index"] == len(message["content"])
            open_block, arguments = event["content_block"], ""
            message["content"].append(open_block)
        elif kind == "content_block_delta":
            assert open_block is not None
            for name, value in event["delta"].items():
                if name == "partial_json":
                    arguments += value
                elif name != "type":
                    open_block[name] += value
        elif kind == "content_block_stop":
            assert open_block is not None
            if open_block["type"] == "tool_use":
                open_block["input"] = json.loads(arguments)
            open_block = None
        elif kind == "message_delta":
            assert open_block is None
            message |= event["delta"] | {"usage": event["usage"]}
    return message


def response_of(data: bytes) -> JsonObject:
    """The response that a stream ends with, after a look at whether its items are those it was told of."""
    told = events(data)
    for event in told:
        RESPONSES.validate_python(event)
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    done = {event["output_index"]: event["item"] for event in told if event["type"] == "response.output_item.done"}
    response: JsonObject = told[-1]["response"]
    assert [done[n] for n in range(len(done))] == response["output"]
    for n, item in done.items():
        deltas = [e["delta"] for e in told if e.get("output_index") == n and e["type"].endswith(".delta")]
        final = item.get("arguments", item.get("input"))
        assert "".join(deltas) == (item["content"][0]["text"] if final is None else final)
    return response


def joined(blocks: list[JsonObject], kind: str, name: str) -> str:
    return "".join(block[name] for block in blocks if block["type"] == kind)


@given(orderly)
@settings(deadline=None)
def test_messages_streamed_are_messages_whole(said: Said) -> None:
    stream = message_of(streamed(whole_wire("/v1/messages"), said.chunks))
    whole = json.loads(whole_wire("/v1/messages").whole(said.whole()))
    Message.model_validate(whole)
    assert stream == whole


@given(mixed)
@settings(deadline=None)
def test_messages_streamed_in_disorder_say_the_same_as_messages_whole(said: Said) -> None:
    stream = message_of(streamed(whole_wire("/v1/messages"), said.chunks))
    whole = json.loads(whole_wire("/v1/messages").whole(said.whole()))
    content, expected = stream.pop("content"), whole.pop("content")
    assert stream == whole
    for kind, name in (("text", "text"), ("thinking", "thinking")):
        assert joined(content, kind, name) == joined(expected, kind, name)
    assert [b for b in content if b["type"] == "tool_use"] == [b for b in expected if b["type"] == "tool_use"]


@given(orderly)
@settings(deadline=None)
def test_responses_streamed_are_responses_whole(said: Said) -> None:
    stream = response_of(streamed(whole_wire("/v1/responses"), said.chunks))
    whole = json.loads(whole_wire("/v1/responses").whole(said.whole()))
    Response.model_validate(whole)
    assert stream == whole


@given(mixed)
@settings(deadline=None)
def test_responses_streamed_in_disorder_say_the_same_as_responses_whole(said: Said) -> None:
    stream = response_of(streamed(whole_wire("/v1/responses"), said.chunks))
    whole = json.loads(whole_wire("/v1/responses").whole(said.whole()))
    output, expected = stream.pop("output"), whole.pop("output")
    assert stream == whole
    for kind in ("reasoning", "message"):
        texts = [
            "".join(item["content"][0]["text"] for item in items if item["type"] == kind)
            for items in (output, expected)
        ]
        assert texts[0] == texts[1]
    called = [
        [(i["call_id"], i["name"], i.get("arguments", i.get("input"))) for i in items if "call_id" in i]
        for items in (output, expected)
    ]
    assert called[0] == called[1]


@given(mixed, st.integers(0, 30))
@settings(deadline=None)
def test_no_call_can_be_acted_on_before_the_end(said: Said, cut: int) -> None:
    for path in ("/v1/messages", "/v1/responses"):
        wire = whole_wire(path)
        told = events(b"".join(wire.event(each) for each in said.chunks[:cut]) + wire.cut("broken"))
        started = {e["index"] for e in told if e.get("content_block", {}).get("type") == "tool_use"}
        assert not [e for e in told if e["type"] == "content_block_stop" and e["index"] in started]
        assert not [e for e in told if e["type"] == "response.output_item.done" and "call_id" in e["item"]]
        assert wire.event(chunk(content="more")) == wire.finish() == wire.ping() == wire.cut("again") == b""


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda i: (
            st.lists(i, max_size=2)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "delta",
                        "content",
                        "tool_calls",
                        "function",
                        "arguments",
                        "usage",
                        "index",
                        "name",
                        "prompt_tokens_details",
                        "finish_reason",
                    ]
                ),
                i,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
@settings(deadline=None, max_examples=300)
def test_nothing_an_engine_sends_makes_a_wire_fall_over(junk: Any) -> None:
    sent = junk if isinstance(junk, dict) else {"choices": [junk] if not isinstance(junk, list) else junk}
    message_of(streamed(whole_wire("/v1/messages"), [sent, sent]))
    response_of(streamed(whole_wire("/v1/responses"), [sent, sent]))
    assert json.loads(whole_wire("/v1/messages").whole(sent))
    assert json.loads(whole_wire("/v1/responses").whole(sent))


def test_half_a_surrogate_pair_does_not_break_the_stream() -> None:
    chunks = [chunk(reasoning="\ud83d"), chunk(content="\ud83d"), finish("stop")]
    assert message_of(streamed(whole_wire("/v1/messages"), chunks))["content"][1]["text"] == "\ud83d"
    assert response_of(streamed(whole_wire("/v1/responses"), chunks))["output"][1]["content"][0]["text"] == "\ud83d"


@pytest.mark.parametrize("recorded", sorted(GOLDEN.glob("*.sse")), ids=lambda path: path.stem)
def test_what_a_real_engine_streamed_reaches_the_agent_whole(recorded: Path) -> None:
    reader = EventReader()
    data = [event.data for event in (*reader.feed(recorded.read_bytes()), *reader.end())]
    chunks = [json.loads(each) for each in data if each != b"[DONE]"]
    deltas = [choice["delta"] for each in chunks for choice in each.get("choices", ()) if choice["index"] == 0]
    text = "".join(delta.get("content") or "" for delta in deltas)
    called = [piece for delta in deltas for piece in delta.get("tool_calls") or ()]
    told = events(streamed(whole_wire("/v1/messages"), chunks))
    answer = events(streamed(whole_wire("/v1/responses"), chunks))
    if any("error" in each for each in chunks):
        assert (told[-1]["type"], answer[-1]["type"]) == ("error", "response.failed")
        return
    message, response = message_of(streamed(whole_wire("/v1/messages"), chunks)), answer[-1]["response"]
    assert joined(message["content"], "text", "text") == text
    assert "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "message") == text
    ids = [piece["id"] for piece in called if piece.get("id")]
    assert [block["id"] for block in message["content"] if block["type"] == "tool_use"] == ids
    assert [item["call_id"] for item in response["output"] if "call_id" in item] == ids
