"""No agent can act on a turn before it is in the log: the end is kept back from the piece on that lets it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.gateway import Gateway
from rollcage.gateway.engines import Engine
from rollcage.gateway.hold import HeldEnd
from rollcage.gateway.policy import outgoing
from rollcage.types import Endpoint, Limits, Turn
from support.hand_made import (
    ROLE,
    Asked,
    Client,
    chat,
    chunked,
    event,
    hand_made,
    head,
    listener,
    plain,
    rig,
    says,
    stream,
    text_event,
    until,
    whole,
)

DONE = b"data: [DONE]\n\n"


def call(arguments: str, *, index: int = 0, finish: str | None = None, ids: list[int] | None = None) -> bytes:
    function = {"name": "bash", "arguments": arguments}
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice["delta"] = {"tool_calls": [{"index": index, "id": f"c{index}", "function": function}]}
    if ids is not None:
        choice |= {"token_ids": ids, "logprobs": {"content": [{"token": "x", "logprob": -0.5} for _ in ids]}}
    return event(choices=[choice])


USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 3})
CALLS = [ROLE, call('{"command"', ids=[1]), call(': "ls"', ids=[2]), call("}", ids=[3]), text_event("", "tool_calls")]


@pytest.mark.parametrize("strip", [False, True])
async def test_the_piece_that_completes_a_tool_call_waits_until_the_turn_is_kept(strip: bool) -> None:
    recording, may_end = asyncio.Event(), asyncio.Event()

    async def record(_: Turn) -> None:
        recording.set()
        await may_end.wait()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        await stream(writer, [*CALLS, USAGE, DONE])

    async with hand_made(answer) as model, Gateway.open(strip=strip) as gateway:
        sock = listener()
        port = sock.getsockname()[1]
        lent = gateway.lend(model.endpoint(), sock, limits=Limits(), mode="transparent_proxy", record=record)
        async with lent as lease:
            body = json.dumps(chat()).encode()
            key = lease.endpoint.key.get_secret_value()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n".encode()
                + body
            )
            await recording.wait()
            client = Client(reader, writer)
            assert (await client.head())[0] == 200
            out = b""
            while b'ls\\"' not in out:
                out += await client.chunk()
            assert b'"}"' not in out
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.chunk()
            may_end.set()
            rest = b""
            while b"[DONE]" not in rest:
                rest += await client.chunk()
            assert b'"}"' in rest and rest.index(b'"}"') < rest.index(b"tool_calls", rest.index(b'"}"'))
            writer.close()
            await writer.wait_closed()


@given(st.lists(st.integers(1, 700), max_size=8), st.sampled_from([b"\n", b"\r\n"]))
def test_whatever_the_portions_nothing_is_lost_and_the_same_is_kept_back(cuts: list[int], line: bytes) -> None:
    data = b"".join([*CALLS, USAGE, DONE]).replace(b"\n", line)
    held, out, at = HeldEnd(), b"", 0
    for cut in [*sorted(cuts), len(data)]:
        out += held.feed(data[at:cut])
        at = max(at, cut)
    assert out == b"".join(CALLS[:3]).replace(b"\n", line) and held.done
    assert out + held.end() == data


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["", '{"a": "}', '"}'], 2),
        (['{"a": {"b": 1}', "}"], 1),
        (['{"a": 1}'], 0),
        (["12"], 0),
        ([" ", '{"a":', "1 }\n"], 2),
    ],
)
def test_a_call_is_complete_when_its_arguments_are(arguments: list[str], passed: int) -> None:
    held = HeldEnd()
    out = [held.feed(call(piece)) for piece in arguments]
    assert [bool(piece) for piece in out] == [True] * passed + [False] * (len(arguments) - passed)


def test_a_second_call_ends_the_first() -> None:
    held = HeldEnd()
    assert held.feed(call("{not json")) and not held.feed(call("{", index=1))


def test_words_about_the_end_are_not_the_end() -> None:
    held = HeldEnd()
    said = text_event("data: [DONE] and tool_calls")
    assert held.feed(said) == said and not held.done


@pytest.mark.parametrize(
    "pieces",
    [[b"data: [DO", b"NE]\n\n"], [b"data: [DONE]\n\n: bye\n\n"], [b"data: [DONE]"], [b"data:[DONE]\r\n\r\n"]],
    ids=["in two reads", "with bytes behind it", "without a blank line", "in another spelling"],
)
async def test_done_is_recognised_however_it_comes(pieces: list[bytes]) -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a")[:-1])))
        for piece in pieces:
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(chunked(piece))
        await asyncio.Event().wait()  # and never ends its answer

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask()
        assert (reply.cut, reply.body) == (False, b"".join([*whole("a")[:-1], *pieces]))
        assert gate.recorded[0].trainable


@pytest.mark.parametrize("size", [1, 7, 100, 1000])
async def test_chunks_arrive_and_are_kept_the_same_wherever_the_network_cuts_them(size: int) -> None:
    events = whole(*"abcdefghij", "sk-real-key", "k")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        sent = b"".join((head(Transfer_Encoding="chunked"), *map(chunked, events), b"0\r\n\r\n"))
        for at in range(0, len(sent), size):
            writer.write(sent[at : at + size])
            await asyncio.sleep(0)

    async with hand_made(answer) as model, rig(model.endpoint(key="sk-real-key")) as gate:
        reply = await gate.ask(chat(stream_options={"include_usage": True}))
        assert reply.body == b"".join(events).replace(b"sk-real-key", b"[key]") and not reply.cut
        assert [token.text for token in gate.recorded[0].tokens] == [*"abcdefghij", "[key]", "k"]


async def test_chunks_of_events_leave_as_they_came_one_by_one() -> None:
    may_go = asyncio.Event()
    events = whole(*"abc")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked"))
        for each in events[:-2]:
            await may_go.wait()
            may_go.clear()
            writer.write(b"%04X\r\n%b\r\n" % (len(each), each))  # spelled as only this engine does
        await may_go.wait()
        writer.write(b"".join(map(chunked, events[-2:])) + b"0\r\n\r\n")

    async with hand_made(answer) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()))
        for number, each in enumerate(events[:-2]):
            may_go.set()
            if not number:
                await client.head()
            size = await client.reader.readuntil(b"\r\n")
            assert await client.reader.readexactly(len(each) + 2) == each + b"\r\n"
            assert number == 0 or size == b"%04X\r\n" % len(each)
        may_go.set()
        while b"[DONE]" not in await client.chunk():
            pass
        assert gate.recorded[0].trainable and [token.text for token in gate.recorded[0].tokens] == [*"abc"]


async def test_an_answer_that_broke_after_its_end_is_whole_for_the_log_and_for_the_agent() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a"))) + b"zz\r\n")
        writer.close()

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask()
        assert (reply.cut, reply.body, gate.recorded[0].trainable) == (False, b"".join(whole("a")), True)


async def test_an_attempt_whose_agent_left_before_the_end_is_broken_even_after_done() -> None:
    told = asyncio.Event()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(model.asked) > 1:
            await stream(writer, whole("b"))
            return
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a"))))
        await writer.drain()
        told.set()
        await asyncio.Event().wait()

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        async with gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await told.wait()
            assert (await client.head())[0] == 200
            await client.chunk()
        await until(lambda: gate.recorded)
        (left,) = gate.recorded
        assert (left.error, left.trainable, left.finish_reason) == ("agent hung up", False, "stop")
        await gate.ask()
        assert (gate.recorded[1].replaces, gate.recorded[1].trainable) == (0, True)


async def test_an_attempt_whose_agent_left_while_it_was_recorded_is_repeated_by_the_next() -> None:
    recording, may_end = asyncio.Event(), asyncio.Event()
    recorded: list[Turn] = []

    async def record(turn: Turn) -> None:
        recording.set()
        await may_end.wait()
        recorded.append(turn)

    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        gate.lease._record = record
        async with gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await recording.wait()
        await until(lambda: not gate.lease._connections)
        may_end.set()
        await gate.ask()
        assert [(turn.index, turn.replaces) for turn in recorded] == [(0, None), (1, 0)]


@pytest.mark.parametrize("streams", [True, False])
async def test_an_agent_that_wants_no_reasoning_gets_none_and_the_ids_are_kept(streams: bool) -> None:
    thought = {"index": 0, "delta": {"reasoning_content": "hm"}, "token_ids": [9]}
    thought["logprobs"] = {"content": [{"token": "hm", "logprob": -0.5}]}

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        assert "include_reasoning" not in asked.json
        if streams:
            counted = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})
            await stream(writer, [ROLE, event(choices=[thought]), text_event("a", "stop", [10]), counted, DONE])
            return
        entries = {"content": [{"token": "hm", "logprob": -0.5}, {"token": "a", "logprob": -0.5}]}
        message = {"role": "assistant", "content": "a", "reasoning_content": "hm", "reasoning": "hm"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [9, 10], "logprobs": entries}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        writer.write(plain("200 OK", {"choices": [choice], "prompt_token_ids": [1, 2, 3], "usage": usage}))

    async with hand_made(answer) as model, rig(model.endpoint(kind="vllm")) as gate:
        reply = await gate.ask(chat(stream=streams, include_reasoning=False))
        assert b"hm" not in reply.body and b'"a"' in reply.body
        (turn,) = gate.recorded
        assert (turn.trainable, turn.message["reasoning_content"]) == (True, "hm")


def test_ids_are_not_asked_for_beside_an_echo() -> None:
    endpoint = Endpoint(base_url="http://x/v1", model="m")
    body: dict[str, Any] = {"prompt": "x", "echo": True}
    for engine in (Engine("vllm", (0, 32, 0)), Engine()):
        assert "return_token_ids" not in outgoing(body, endpoint=endpoint, limits=Limits(), engine=engine)
        del body["echo"]
        assert "return_token_ids" in outgoing(body, endpoint=endpoint, limits=Limits(), engine=engine)
        body["echo"] = True


async def test_the_policy_version_is_stamped_when_a_call_begins() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        for version in ("1", "2"):
            gate.lease.policy_version = version
            await gate.ask()
        assert [turn.policy_version for turn in gate.recorded] == ["1", "2"]
