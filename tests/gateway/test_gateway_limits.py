"""What a model's server can do to us: answers without end, packed ones that unfold, keys that come back."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import zlib
from typing import Any

import pytest
from pydantic import SecretStr

from rollcage.gateway import Gateway
from support.hand_made import LOOPS, ROLE, Asked, chat, chunked, hand_made, head, plain, rig, text_event, whole

LIMIT = 1 << 20
CUT_OFF = "the answer was cut off: it is longer than 1 MB"
KEY = "sk-very-secret-0123456789"


@pytest.fixture(scope="module", params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


class Endless:
    """Answers for as long as anybody listens."""

    def __init__(self, kind: str, piece: bytes, status: str = "200 OK") -> None:
        self.sent = 0
        self.left = asyncio.Event()
        self._head, self._piece = head(status, kind, Transfer_Encoding="chunked"), chunked(piece)

    async def __call__(self, _: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(self._head)
        try:
            while True:
                writer.write(self._piece)
                await writer.drain()
                self.sent += len(self._piece)
        except ConnectionError:
            self.left.set()


@pytest.mark.parametrize("wanted", ["stream", "whole", "translated"])
async def test_an_answer_without_end_is_cut_off_and_its_turn_says_so(wanted: str) -> None:
    piece = text_event("word " * 2000) if wanted != "whole" else b'{"choices": [{"text": "' + b"x" * 10_000
    endless = Endless("application/json" if wanted == "whole" else "text/event-stream", piece)
    async with (
        hand_made(endless) as model,
        Gateway.open(answer_limit=LIMIT) as gateway,
        rig(model.endpoint(), gateway=gateway) as gate,
    ):
        if wanted == "translated":
            body = {"max_tokens": 9, "messages": chat()["messages"], "stream": True}
            reply = await gate.ask(body, path="/v1/messages")
        else:
            reply = await gate.ask(chat(stream=wanted == "stream"))
        assert len(reply.body) < 2 * LIMIT
        await asyncio.wait_for(endless.left.wait(), 60)
        (turn,) = gate.recorded
        assert (turn.error, turn.trainable) == (CUT_OFF, False)
        assert len(turn.model_dump_json()) < 2 * LIMIT
        if wanted == "whole":
            assert reply.status == 502


async def test_a_refusal_without_end_is_cut_off() -> None:
    endless = Endless("text/plain", b"no " * 1000, "500 Internal Server Error")
    async with (
        hand_made(endless) as model,
        Gateway.open(answer_limit=LIMIT) as gateway,
        rig(model.endpoint(), gateway=gateway) as gate,
    ):
        assert (await gate.ask()).status == 502
        await asyncio.wait_for(endless.left.wait(), 60)
        assert gate.recorded[0].status == 500


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_packed_answer_is_unpacked_no_further_than_an_answer_may_be_long(streamed: bool) -> None:
    packer = zlib.compressobj(9, wbits=31)
    begun = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": ""}}]})[:-4].encode()
    packed = packer.compress(begun) + b"".join(packer.compress(b"x" * LIMIT) for _ in range(256))
    packed += packer.compress(b'"}}]}') + packer.flush()
    assert len(packed) < LIMIT

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("200 OK", packed, Content_Encoding="gzip"))

    async with (
        hand_made(answer) as model,
        Gateway.open(answer_limit=LIMIT) as gateway,
        rig(model.endpoint(), gateway=gateway) as gate,
    ):
        body = {"max_tokens": 9, "messages": chat()["messages"], "stream": streamed}
        tracemalloc.start()
        try:
            assert (await gate.ask(body, path="/v1/messages")).status == 502
            assert tracemalloc.get_traced_memory()[1] < 64 * LIMIT, "it is never there as a whole"
        finally:
            tracemalloc.stop()
        assert len(gate.recorded[0].model_dump_json()) < 2 * LIMIT
        assert (gate.recorded[0].error, gate.recorded[0].trainable) == (CUT_OFF, False)


async def test_a_packed_answer_of_a_fair_length_is_read() -> None:
    said = json.dumps({"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": "x" * 5000}}]}).encode()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("200 OK", zlib.compress(said, wbits=31), Content_Encoding="gzip"))

    async with (
        hand_made(answer) as model,
        Gateway.open(answer_limit=LIMIT) as gateway,
        rig(model.endpoint(), gateway=gateway) as gate,
    ):
        await gate.ask(chat(stream=False))
        assert (gate.recorded[0].error, gate.recorded[0].message["content"]) == (None, "x" * 5000)


@pytest.mark.parametrize("how", ["whole", "packed", "stream", "cut", "bytes", "translated"])
async def test_a_key_that_comes_back_in_a_good_answer_reaches_neither_the_box_nor_the_log(how: str) -> None:
    said = {"choices": [{"index": 0, "finish_reason": "stop", "message": {"content": f"it is {KEY}, yes"}}]}
    events = b"".join([ROLE, text_event(f"it is {KEY}, yes"), text_event("", "stop"), b"data: [DONE]\n\n"])
    middle = events.index(KEY.encode()) + 5
    pieces = {"cut": [events[:middle], events[middle:]], "bytes": [events[n : n + 1] for n in range(len(events))]}

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(said).encode()
        if how == "packed":
            writer.write(plain("200 OK", zlib.compress(body, wbits=31), Content_Encoding="gzip"))
        elif how == "whole":
            writer.write(plain("200 OK", body))
        else:
            writer.write(head(Transfer_Encoding="chunked"))
            for piece in pieces.get(how, [events]):
                writer.write(chunked(piece))
                await writer.drain()
                await asyncio.sleep(0.001)
            writer.write(b"0\r\n\r\n")

    async with hand_made(answer) as model:
        endpoint = model.endpoint().model_copy(update={"key": SecretStr(KEY)})
        async with rig(endpoint) as gate:
            if how == "translated":
                body = {"max_tokens": 9, "messages": chat()["messages"], "stream": True}
                reply = await gate.ask(body, path="/v1/messages")
            else:
                reply = await gate.ask(chat(stream=how not in ("whole", "packed")))
            assert (reply.status, KEY.encode() in reply.body, b"it is [key], yes" in reply.body) == (200, False, True)
            (turn,) = gate.recorded
            assert (turn.message["content"], turn.error) == ("it is [key], yes", None)
            assert (turn.trainable, turn.untrainable_reason) == (False, "the answer repeats a key, which is not kept")
            assert KEY not in turn.model_dump_json()


async def test_an_answer_that_only_begins_like_the_key_arrives_as_it_was() -> None:
    events = [ROLE, text_event("s"), text_event(f"ask {KEY[:-1]}"), *whole("sk")]
    raw = b"".join(events)

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked"))
        for start in range(0, len(raw), 7):
            writer.write(chunked(raw[start : start + 7]))
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.write(b"0\r\n\r\n")

    async with hand_made(answer) as model:
        endpoint = model.endpoint().model_copy(update={"key": SecretStr(KEY)})
        async with rig(endpoint) as gate:
            reply = await gate.ask(chat(stream_options={"include_usage": True}, logprobs=True))
            assert KEY[:-1].encode() in reply.body
            assert "repeats" not in gate.recorded[0].untrainable_reason
            assert gate.recorded[0].message["content"].startswith(f"sask {KEY[:-1]}")
