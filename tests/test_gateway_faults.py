"""The gateway on bad days: models that break, agents that leave, disks that are full."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from hand_made import (
    ROLE,
    Asked,
    Rig,
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
    whole,
)
from rollcage.gateway import Gateway
from rollcage.types import Limits, Turn


@pytest.fixture(
    scope="module",
    params=[("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})],
    ids=["asyncio", "uvloop"],
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def until(true: Callable[[], object]) -> None:
    with anyio.fail_after(10):
        while not true():
            await asyncio.sleep(0.001)


async def hang(_: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def half_a_stream(_: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a", "b", "c")[:3])))
    await asyncio.Event().wait()


async def test_a_model_that_is_not_there_is_a_502_and_a_turn() -> None:
    async with hand_made(hang) as model:
        endpoint = model.endpoint()
    async with rig(endpoint) as gate:
        reply = await gate.ask()
        assert (reply.status, reply.json["error"]["message"]) == (502, "the model cannot be reached")
        (turn,) = gate.recorded
        assert (turn.status, turn.error) == (0, "no answer from the model: connection refused")
        assert (turn.request["model"], turn.trainable) == ("real-model", False)
        assert gate.lease.last_failure == turn


async def test_a_rate_limit_reaches_the_agent_as_it_is() -> None:
    said = {"error": {"message": "slow down", "type": "rate_limit_error"}}

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("429 Too Many Requests", said, Retry_After="7"))

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask()
        assert (reply.status, reply.json, reply.headers["retry-after"]) == (429, said, "7")
        assert (gate.recorded[0].status, gate.recorded[0].error) == (429, "upstream answered 429: slow down")
        assert gate.lease.last_failure == gate.recorded[0]


async def test_a_good_turn_makes_up_for_a_failure_before_it() -> None:
    answers = iter([plain("500 Internal Server Error", b"<html>oops</html>")])
    good = says("fine")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        failure = next(answers, None)
        if failure is None:
            await good(asked, writer)
        else:
            writer.write(failure)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask()
        assert (reply.status, reply.body) == (500, b"<html>oops</html>")
        assert gate.lease.last_failure is not None
        assert (await gate.ask()).status == 200
        assert gate.lease.last_failure is None
        assert [turn.error for turn in gate.recorded] == ["upstream answered 500", None]


async def test_a_failed_call_does_not_use_up_the_turn_limit() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("503 Service Unavailable", {}))

    async with hand_made(answer) as model, rig(model.endpoint(), limits=Limits(max_turns=1)) as gate:
        assert [(await gate.ask()).status for _ in range(3)] == [503, 503, 503]


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (b"", "the upstream broke off"),
        (b'data: {"choices":[{"index":0,"del', "the upstream broke off"),
        (b"zz\r\n", "the upstream does not speak HTTP"),
    ],
    ids=["cut", "half a line", "garbage"],
)
async def test_a_stream_that_breaks_is_cut_for_the_agent_too_and_its_tokens_are_kept(last: bytes, error: str) -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a", "b", "c")[:3])))
        writer.write(chunked(last) if last.startswith(b"data") else last)
        await writer.drain()
        writer.close()

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask()
        assert reply.cut
        assert b"".join(whole("a", "b", "c")[:3]) in reply.body
        (turn,) = gate.recorded
        assert (turn.error or "").startswith(error)
        assert ([t.text for t in turn.tokens], turn.message["content"]) == (["a", "b"], "ab")
        assert (turn.status, turn.finish_reason, turn.trainable) == (200, None, False)
        assert gate.lease.generated_tokens == 2


async def test_a_whole_answer_that_breaks_off_is_a_502_the_agent_can_retry() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", "application/json", Content_Length="1000") + b'{"choices": [')
        writer.close()

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask(chat(stream=False))
        assert (reply.status, reply.json["error"]["message"]) == (502, "the model's answer broke off")
        assert gate.recorded[0].error == "the upstream broke off"


async def test_an_error_in_mid_stream_is_passed_on_and_makes_the_turn_a_failure() -> None:
    broken = [
        ROLE,
        text_event("a", ids=[10]),
        event(error={"message": "engine died", "code": 500}),
        b"data: [DONE]\n\n",
    ]

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        await stream(writer, broken)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask()).body == b"".join(broken)
        assert gate.recorded[0].error == "the engine reported an error: engine died"
        assert gate.lease.last_failure is not None


async def test_json_where_a_stream_was_asked_for_is_captured_as_what_it_is() -> None:
    unary = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("200 OK", unary))

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask()).json == unary
        assert (gate.recorded[0].message["content"], gate.recorded[0].error) == ("hi", None)


@pytest.mark.parametrize("kind", ["application/octet-stream", "text/html", "application/x-ndjson"])
async def test_a_wrong_content_type_does_not_cost_the_turn(kind: str) -> None:
    body = b"".join(whole("a"))

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head("200 OK", kind) + body)  # no length: it ends with the connection
        writer.close()

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask()
        assert (reply.body, reply.headers["content-type"]) == (body, kind)
        assert gate.recorded[0].trainable


async def test_a_redirect_is_no_turn_to_train_on() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head("307 Temporary Redirect", "text/plain", Location="/elsewhere", Content_Length="0"))

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask()).status == 307
        assert gate.recorded[0].error == "upstream answered 307"


async def test_a_megabyte_in_one_line_passes() -> None:
    big = "x" * (3 << 20)

    async with hand_made(says(big, "y")) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask()).body == b"".join(whole(big, "y"))
        assert gate.recorded[0].message["content"] == big + "y"
        assert gate.recorded[0].trainable


async def test_a_model_that_forgets_to_end_after_done_does_not_hold_up_the_agent() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a"))))
        await asyncio.Event().wait()

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask()
        assert (reply.cut, reply.body) == (False, b"".join(whole("a")))
        assert gate.recorded[0].trainable


async def test_a_kept_connection_that_the_model_closed_is_replaced_without_the_agent_noticing() -> None:
    good = says("a")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(model.asked) == 2:
            writer.close()  # as a server does whose keep-alive time is over just as a request comes in
        else:
            await good(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert [(await gate.ask()).status for _ in range(2)] == [200, 200]
        assert (len(model.asked), model.connections, len(gate.recorded)) == (3, 2, 2)


@pytest.mark.parametrize("silent", [hang, half_a_stream], ids=["before the first byte", "in mid-stream"])
async def test_an_agent_that_hangs_up_cancels_the_model_at_once(silent: Any) -> None:
    async with hand_made(silent) as model, rig(model.endpoint()) as gate:
        async with gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await model.arrived.wait()
            if silent is half_a_stream:
                await client.head()
                await client.reader.readuntil(text_event("b", ids=[11])[-20:])
        with anyio.fail_after(5):
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


async def test_an_engine_that_refuses_a_field_we_added_is_asked_without_it_from_then_on() -> None:
    good = says("a")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        for name in ("return_token_ids", "logprobs"):
            if name in asked.json:
                error = {"error": {"message": f"Unrecognized request argument supplied: {name}", "code": 400}}
                writer.write(plain("400 Bad Request", error))
                return
        await good(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask()).status == 200
        assert len(model.asked) == 3
        assert (await gate.ask()).status == 200
        assert len(model.asked) == 4
        assert not {"return_token_ids", "logprobs", "top_logprobs"} & model.asked[-1].json.keys()
        assert [turn.status for turn in gate.recorded] == [200, 200]
        assert gate.recorded[0].request == model.asked[2].json


async def test_a_400_that_merely_mentions_our_fields_is_passed_on_and_teaches_nothing() -> None:
    good = says("a")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.json["messages"] == []:
            writer.write(plain("400 Bad Request", {"error": {"message": f"no messages in {json.dumps(asked.json)}"}}))
        else:
            await good(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask({"messages": [], "stream": True})).status == 400
        assert (await gate.ask()).status == 200
        assert {"return_token_ids", "logprobs", "top_logprobs"} <= model.asked[-1].json.keys()
        assert [turn.status for turn in gate.recorded] == [400, 200]


async def test_a_model_behind_tls_is_reached_and_a_wrong_certificate_is_refused(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(key), "-out", str(cert), "-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(cert, key)
    async with hand_made(says("a", "b"), tls=served) as model:
        async with (
            Gateway.open(tls=ssl.create_default_context(cafile=str(cert))) as gateway,
            rig(model.endpoint(), gateway=gateway) as gate,
        ):
            assert [(await gate.ask()).status for _ in range(2)] == [200, 200]
            assert (gate.recorded[0].trainable, model.connections) == (True, 1)
        async with rig(model.endpoint()) as gate:
            assert (await gate.ask()).status == 502
            assert "certificate not accepted" in (gate.recorded[0].error or "")
