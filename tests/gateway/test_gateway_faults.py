"""The gateway on bad days: models that are not there, break, lie, or refuse."""

from __future__ import annotations

import asyncio
import gzip
import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from rollcage.gateway import Gateway
from rollcage.types import Limits
from support.hand_made import (
    LOOPS,
    ROLE,
    Asked,
    chat,
    chunked,
    event,
    hand_made,
    hang,
    head,
    plain,
    rig,
    says,
    stream,
    text_event,
    whole,
)


@pytest.fixture(scope="module", params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


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


@pytest.mark.parametrize("packed", [False, True])
async def test_a_key_that_the_model_repeats_in_its_refusal_reaches_neither_the_box_nor_the_log(packed: bool) -> None:
    key = "sk-very-secret-0123456789"
    said = json.dumps({"error": {"message": f"Incorrect API key provided: {key}", "type": "auth"}}).encode()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        more = {"Content_Encoding": "gzip"} if packed else {}
        writer.write(plain("401 Unauthorized", gzip.compress(said) if packed else said, **more))

    async with hand_made(answer) as model:
        endpoint = model.endpoint().model_copy(update={"key": SecretStr(key)})
        async with rig(endpoint) as gate:
            reply = await gate.ask()
            assert (reply.status, reply.json["error"]["message"]) == (401, "Incorrect API key provided: [key]")
            assert key not in gate.recorded[0].model_dump_json()


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


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_body_that_was_packed_unasked_is_captured_and_reaches_the_agent(path: str) -> None:
    unary = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    packed = gzip.compress(json.dumps(unary).encode())

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("200 OK", packed, Content_Encoding="gzip"))

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask({"messages": chat()["messages"], "max_tokens": 9}, path=path)
        if path == "/v1/messages":
            assert reply.json["content"] == [{"type": "text", "text": "hi"}]
            assert "content-encoding" not in reply.headers
        else:
            assert (reply.body, reply.headers["content-encoding"]) == (packed, "gzip")
        assert (gate.recorded[0].message["content"], gate.recorded[0].error) == ("hi", None)


async def test_an_engine_that_minds_the_stream_and_not_the_field_is_asked_for_no_stream_from_then_on() -> None:
    good = says("a")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.json["stream"] and "return_token_ids" in asked.json:
            error = {"object": "error", "message": "return_token_ids is not supported with stream=true"}
            writer.write(plain("400 Bad Request", error))
        else:
            await good(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        for _ in range(2):
            reply = await gate.ask()
            assert reply.body.endswith(b"data: [DONE]\n\n")
        assert [asked.json["stream"] for asked in model.asked] == [True, False, False]
        assert [turn.trainable for turn in gate.recorded] == [True, True]


async def test_an_engine_that_minds_a_field_with_or_without_a_stream_goes_on_streaming() -> None:
    good = says("a")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if "return_token_ids" in asked.json:
            writer.write(plain("400 Bad Request", {"error": {"message": f"no return_token_ids: {asked.json}"}}))
        else:
            await good(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert [(await gate.ask()).status for _ in range(2)] == [200, 200]
        assert [asked.json["stream"] for asked in model.asked] == [True, False, True, True]
        assert "return_token_ids" not in model.asked[-1].json


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


async def test_a_model_that_dies_at_work_is_not_asked_again_behind_the_agents_back() -> None:
    good = says("a")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(model.asked) == 2:
            await asyncio.sleep(1.1)  # longer than any stale connection takes to show
            writer.close()
        else:
            await good(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        assert [(await gate.ask()).status for _ in range(2)] == [200, 502]
        assert (len(model.asked), gate.recorded[1].status) == (2, 0)
        assert gate.recorded[1].error == "no answer from the model: the upstream broke off"


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
