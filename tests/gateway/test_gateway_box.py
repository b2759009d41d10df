"""The gateway and those who call it: agents that leave, boxes that attack, a log that cannot be written."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from contextlib import suppress
from typing import Any

import anyio
import pytest

from rollcage.gateway import Gateway
from rollcage.gateway.bodies import read
from rollcage.types import Limits, Turn
from support.hand_made import (
    LOOPS,
    Asked,
    Rig,
    chat,
    chunked,
    half_a_stream,
    hand_made,
    hang,
    head,
    listener,
    rig,
    says,
    text_event,
    until,
)


@pytest.fixture(scope="module", params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.mark.parametrize("silent", [hang, half_a_stream], ids=["before the first byte", "in mid-stream"])
async def test_an_agent_that_hangs_up_cancels_the_model_at_once(silent: Any) -> None:
    async with hand_made(silent) as model, rig(model.endpoint()) as gate:
        async with gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await model.arrived.wait()
            if silent is half_a_stream:
                await client.head()
                await client.reader.readuntil(text_event("b", ids=[11])[-20:])
        with anyio.fail_after(120):
            await model.hung_up.wait()
        await until(lambda: gate.recorded)
        (turn,) = gate.recorded
        assert turn.error == "agent hung up"
        assert [t.text for t in turn.tokens] == (["a", "b"] if silent is half_a_stream else [])
        assert gate.lease.last_failure is None
        assert gate.gateway.connections == 0


async def test_an_agent_that_leaves_after_done_leaves_a_whole_turn() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        for _ in range(50):
            async with gate.connect() as client:
                client.writer.write(gate.request(chat()))
                await client.reader.readuntil(b"[DONE]")
        await until(lambda: len(gate.recorded) == 50)
        assert all(turn.trainable for turn in gate.recorded)


@pytest.mark.parametrize("silent", [hang, half_a_stream], ids=["before the first byte", "in mid-stream"])
async def test_the_end_of_the_lease_cuts_calls_in_flight_and_nothing_is_recorded_after(silent: Any) -> None:
    async with hand_made(silent) as model, Gateway.open() as gateway:
        async with rig(model.endpoint(), gateway=gateway) as gate:
            clients = [await asyncio.open_connection("127.0.0.1", gate.port) for _ in range(5)]
            for _, writer in clients:
                writer.write(gate.request(chat()))
            await until(lambda: len(model.asked) == 5)
            if silent is half_a_stream:
                for reader, _ in clients:
                    await reader.readuntil(text_event("b", ids=[11])[-20:])
        assert sorted(turn.index for turn in gate.recorded) == [0, 1, 2, 3, 4]
        assert {turn.error for turn in gate.recorded} == {"cut off: the agent's time with the model was over"}
        assert {len(turn.tokens) for turn in gate.recorded} == {2 if silent is half_a_stream else 0}
        await until(lambda: gateway.connections == 0)
        for reader, writer in clients:
            with suppress(ConnectionError):
                await reader.read(-1)
            writer.close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", gate.port)
        assert len(gate.recorded) == 5


async def test_a_cancelled_rollout_still_records_what_it_had() -> None:
    async with hand_made(half_a_stream) as model, Gateway.open() as gateway:
        with anyio.CancelScope() as scope:
            async with rig(model.endpoint(), gateway=gateway) as gate, gate.connect() as client:
                client.writer.write(gate.request(chat()))
                await client.reader.readuntil(text_event("b", ids=[11])[-20:])
                scope.cancel()
                await anyio.sleep_forever()
        assert [len(turn.tokens) for turn in gate.recorded] == [2]


async def test_a_full_disk_ends_the_agents_call_and_leaves_the_block() -> None:
    async def full(_: Turn) -> None:
        raise OSError(28, "No space left on device")

    async with hand_made(says("a")) as model, Gateway.open() as gateway:
        with pytest.raises(OSError, match="No space left"):
            sock = listener()
            port = sock.getsockname()[1]
            async with gateway.lend(
                model.endpoint(), sock, limits=Limits(), mode="transparent_proxy", record=full
            ) as lease:
                gate = Rig(gateway, lease, [], port)
                reply = await gate.ask()
                assert reply.cut
                assert b"[DONE]" not in reply.body
                assert (await gate.ask()).status == 400
                assert len(model.asked) == 1


async def test_a_slow_agent_slows_the_model_down() -> None:
    block, sent = text_event("x" * 65536), 0

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(head(Transfer_Encoding="chunked"))
        for _i in range(1000):
            writer.write(chunked(block))
            await writer.drain()
            sent += 1
        writer.write(b"0\r\n\r\n")

    async with hand_made(answer) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.writer.write(gate.request(chat()))
        await until(lambda: sent > 3)
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.1)
        assert sent < 700  # what the sockets hold between them
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        reply = await client.reply()
        assert reply.body == block * 1000


async def test_strangers_and_strange_requests_are_answered_in_the_shape_agents_know() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask(key="sk-wrong")).status == 401
        unknown = await gate.ask(path="/v1/embeddings")
        assert (unknown.status, unknown.json["error"]["type"]) == (404, "invalid_request_error")
        assert [(await gate.ask(body)).status for body in (b"{", b"[1]", b"\xff\xfe", b"[" * 100_000)] == [400] * 4
        key = f"Authorization: Bearer {gate.key}\r\n\r\n".encode()
        async with gate.connect() as client:
            assert (await client.ask(b"GET /v1/chat/completions HTTP/1.1\r\n" + key)).status == 405
            assert (await client.ask(b"OPTIONS /v1/models HTTP/1.1\r\n" + key)).status == 200
            assert (await client.ask(b"GET /v1/models?x=1 HTTP/1.1\r\n" + key)).json["data"][0]["id"] == "model"
            client.writer.write(b"HEAD /v1/models HTTP/1.1\r\n" + key)
            assert (await client.head())[0] == 200
            assert (await client.ask(b"GET /v1/models/model HTTP/1.1\r\n" + key)).json["id"] == "model"
        assert (model.asked, gate.recorded) == ([], [])


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"hello\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 100_000, 431),
        (b"GET /v1/models HTTP/1.1\r\n" + b"X: y\r\n" * 300 + b"\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 67108865\r\n\r\n", 413),
        (b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
)
async def test_garbage_is_answered_and_the_connection_closed(sent: bytes, status: int) -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        async with gate.connect() as client:
            reply = await client.ask(sent)
            assert (reply.status, await client.reader.read(-1)) == (status, b"")
        assert (await gate.ask()).status == 200


async def test_a_body_of_fifty_megabytes_goes_through_and_one_beyond_the_limit_does_not() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        big = "x" * (50 << 20)
        assert (await gate.ask({"messages": [{"role": "user", "content": big}], "stream": True})).status == 200
        assert model.asked[0].json["messages"][0]["content"] == big
        async with gate.connect() as client:
            client.writer.write(
                b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
                b"Authorization: Bearer " + gate.key.encode() + b"\r\n\r\n"
            )
            piece = chunked(b"x" * (1 << 20))
            for _ in range(66):
                client.writer.write(piece)
                await client.writer.drain()
            assert (await client.reply()).status == 413


async def test_a_large_body_is_read_in_parts_and_arrives_as_it_was_sent() -> None:
    said = [{"role": "user", "content": f'{n} "quoted" é' * 200} for n in range(4000)]
    body = {"messages": said, "stream": True, "tools": [], "x": {"y": [1.5, None, True]}}
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.perf_counter())
            await asyncio.sleep(0)

    data = json.dumps(body).encode()
    assert len(data) > 10 << 20
    ticking = asyncio.ensure_future(tick())
    read_body = await read(data)
    ticking.cancel()
    gaps = [b - a for a, b in itertools.pairwise(ticks)]
    assert read_body is not None
    assert read_body.value == body
    # Nobody waits for all of it: others ran hundreds of times in between.
    assert len(ticks) > 50
    assert max(gaps) < sum(gaps)
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask(data)).status == 200
        assert model.asked[0].json["messages"] == said
        assert gate.recorded[0].request == model.asked[0].json


async def test_a_stream_goes_on_while_another_agent_sends_fifty_megabytes() -> None:
    stop = asyncio.Event()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(asked.body) > 1 << 20:
            await says("big")(asked, writer)
            return
        writer.write(head(Transfer_Encoding="chunked"))
        while not stop.is_set():
            writer.write(chunked(text_event("x", ids=[1])))
            await asyncio.sleep(0.005)
        writer.write(chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with hand_made(answer) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()))
        await client.head()
        arrived = 0

        async def listen() -> None:
            nonlocal arrived
            while b"[DONE]" not in await client.chunk():
                arrived += 1

        listening = asyncio.ensure_future(listen())
        said = [{"role": "user", "content": "x" * (1 << 20)} for _ in range(50)]
        body = json.dumps({"messages": said, "stream": True}).encode()
        before = arrived
        assert (await gate.ask(body)).status == 200
        meanwhile = arrived - before
        stop.set()
        await listening
        # Client, gateway and model share this loop, so copies of the whole are felt; but others get their turns.
        assert meanwhile > 5


async def test_a_box_cannot_make_the_gateway_hold_more_than_its_share() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        opening = (
            f"POST /v1/completions HTTP/1.1\r\nAuthorization: Bearer {gate.key}\r\nContent-Length: {60 << 20}\r\n\r\n"
        )
        many = [await asyncio.open_connection("127.0.0.1", gate.port) for _ in range(6)]

        async def fill(writer: asyncio.StreamWriter) -> None:
            writer.write(opening.encode())
            for _ in range(59):
                writer.write(bytes(1 << 20))
                await writer.drain()

        answers = [asyncio.ensure_future(reader.readuntil(b"\r\n")) for reader, _ in many]
        filling = [asyncio.ensure_future(fill(writer)) for _, writer in many]
        await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result() for task in answers if task.done()} == {b"HTTP/1.1 413 Request Entity Too Large\r\n"}
        for task in (*answers, *filling):
            task.cancel()
        await asyncio.gather(*answers, *filling, return_exceptions=True)
        for _, writer in many:
            writer.transport.abort()
        assert (await gate.ask()).status == 200


async def test_a_box_cannot_use_up_the_connections_of_everybody() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        many = [await asyncio.open_connection("127.0.0.1", gate.port) for _ in range(270)]
        refused = await many[-1][0].read(-1)
        assert b"503" in refused
        for _, writer in many:
            writer.close()
        for _, writer in many:
            with suppress(ConnectionError):
                await writer.wait_closed()
        assert (await gate.ask()).status == 200


async def test_a_lone_surrogate_from_a_javascript_agent_is_no_reason_to_fail() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask(b'{"messages": [{"role": "user", "content": "half an emoji: \\ud83d"}], "stream": true}')
        assert reply.status == 200
        assert gate.recorded[0].request["messages"][0]["content"] == "half an emoji: �"
        assert gate.recorded[0].request == model.asked[0].json
