"""The gateway between a raw client and hand-made models: the good days."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollcage.errors import ModelUnreachable
from rollcage.gateway import Gateway
from rollcage.types import Limits, Purpose, Turn
from support.hand_made import LOOPS, Asked, chat, chunked, hand_made, head, listener, plain, rig, says, stream, whole
from support.paths import GOLDEN


@pytest.fixture(scope="module", params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


async def test_a_stream_reaches_the_agent_byte_for_byte_and_becomes_a_trainable_turn() -> None:
    async with hand_made(says("Hel", "lo")) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask(extra="x-session-id: ses_1\r\n")
        assert (reply.status, reply.cut) == (200, False)
        assert reply.headers["content-type"] == "text/event-stream"
        assert reply.body == b"".join(whole("Hel", "lo"))
        (turn,) = gate.recorded
        assert turn.message == {"role": "assistant", "content": "Hello"}
        assert [(t.text, t.id, t.logprob) for t in turn.tokens] == [("Hel", 10, -0.5), ("lo", 11, -0.5)]
        assert (turn.trainable, turn.prompt_ids, turn.status, turn.error) == (True, (1, 2, 3), 200, None)
        assert (turn.index, turn.purpose, turn.session, turn.streamed) == (0, Purpose.AGENT, "ses_1", True)
        assert 0 < (turn.first_token_s or 0) <= turn.seconds
        assert (gate.lease.turns, gate.lease.generated_tokens, gate.lease.last_failure) == (1, 2, None)


async def test_an_answer_without_a_stream_is_captured_too() -> None:
    async with hand_made(says("a", "b")) as model, rig(model.endpoint()) as gate:
        reply = await gate.ask(chat(stream=False))
        assert reply.json["choices"][0]["message"]["content"] == "ab"
        assert reply.headers["content-length"] == str(len(reply.body))
        (turn,) = gate.recorded
        assert (turn.trainable, turn.streamed, [t.id for t in turn.tokens]) == (True, False, [0, 1])


async def test_the_model_gets_the_real_name_and_key_and_the_box_gets_neither() -> None:
    async with hand_made(says("x")) as model, rig(model.endpoint()) as gate:
        await gate.ask()
        (asked,) = model.asked
        assert asked.headers["authorization"] == "Bearer sk-real"
        assert asked.json == gate.recorded[0].request
        assert asked.json["model"] == "real-model"
        assert {"logprobs": True, "top_logprobs": 5, "return_token_ids": True}.items() <= asked.json.items()
        lent = gate.lease.endpoint
        assert lent.model == "model"
        assert lent.base_url == f"http://127.0.0.1:{gate.port}/v1"
        assert gate.key != "sk-real"
        assert "sk-real" not in repr(gate.recorded)


async def test_what_would_prompt_the_model_past_the_messages_does_not_leave_the_gateway() -> None:
    hidden: dict[str, Any] = {"kv_transfer_params": {"prompt_token_ids": [7] * 200_000}, "input_ids": [7]}
    async with hand_made(says("x")) as model, rig(model.endpoint()) as gate:
        await gate.ask(chat(**hidden))
        (asked,) = model.asked
        assert not asked.json.keys() & hidden.keys()
        assert asked.json == gate.recorded[0].request


async def test_a_piece_of_the_stream_is_passed_on_before_the_next_one_exists() -> None:
    first, *rest = whole("a", "b")
    seen = asyncio.Event()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + chunked(first))
        await seen.wait()
        writer.write(b"".join(chunked(each) for each in rest) + b"0\r\n\r\n")

    async with hand_made(answer) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()))
        assert (await client.head())[0] == 200
        assert await client.chunk() == first
        seen.set()
        assert await client.chunk()


async def test_the_turn_is_kept_before_the_last_byte_leaves() -> None:
    recording, may_end = asyncio.Event(), asyncio.Event()

    async def record(_: Turn) -> None:
        recording.set()
        await may_end.wait()

    async with hand_made(says("a")) as model, Gateway.open() as gateway:
        sock = listener()
        port = sock.getsockname()[1]
        async with gateway.lend(
            model.endpoint(), sock, limits=Limits(), mode="transparent_proxy", record=record
        ) as lease:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            key = lease.endpoint.key.get_secret_value()
            body = '{"messages":[],"stream":true,"stream_options":{"include_usage":true}}'
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
                f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            await recording.wait()
            # Everything but the end may be out: neither `[DONE]` nor the terminating chunk.
            so_far = await reader.readuntil(b"completion_tokens")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    while data := await reader.read(1024):
                        so_far += data
            assert b"[DONE]" not in so_far
            may_end.set()
            assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
            writer.close()
            await writer.wait_closed()


async def test_many_calls_share_connections_and_leave_nothing_behind() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        await gate.ask()
        before = asyncio.all_tasks()
        async with gate.connect() as client:
            for index in range(2000):
                reply = await client.ask(gate.request(chat(stream=index % 2 == 0)))
                assert reply.status == 200
        assert [turn.index for turn in gate.recorded] == list(range(2001))
        assert model.connections == 1
        assert gate.gateway.connections == 1
        assert asyncio.all_tasks() == before


async def test_two_leases_do_not_mix() -> None:
    async with hand_made(says("one")) as first, hand_made(says("two")) as second, Gateway.open() as gateway:
        async with rig(first.endpoint(), gateway=gateway) as a, rig(second.endpoint(), gateway=gateway) as b:
            replies = await asyncio.gather(*(gate.ask() for gate in (a, b) * 10))
            assert all((b"one" in r.body) == (i % 2 == 0) for i, r in enumerate(replies))
            assert {t.message["content"] for t in a.recorded} == {"one"}
            assert {t.message["content"] for t in b.recorded} == {"two"}
            assert len(a.recorded) == len(b.recorded) == 10
            assert (await a.ask(key=b.key)).status == 401
        assert len(first.asked) == 10


async def test_the_official_client_streams_and_does_not_notice_the_gateway() -> None:
    golden = (GOLDEN / "tool_required.sse").read_bytes()

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.json.get("stream"):
            await stream(writer, [golden[i : i + 700] for i in range(0, len(golden), 700)])
        else:
            writer.write(plain("200 OK", (GOLDEN / "tool_required.nonstream.json").read_bytes()))

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        lent = gate.lease.endpoint
        async with AsyncOpenAI(
            base_url=lent.base_url, api_key=lent.key.get_secret_value(), max_retries=0, timeout=120
        ) as client:
            assert [m.id async for m in client.models.list()] == ["model"]
            arguments = ""
            async for chunk in await client.chat.completions.create(
                model=lent.model, messages=[{"role": "user", "content": "ls"}], stream=True
            ):
                for choice in chunk.choices:
                    for call in choice.delta.tool_calls or ():
                        arguments += (call.function and call.function.arguments) or ""
            done = await client.chat.completions.create(model=lent.model, messages=[{"role": "user", "content": "ls"}])
        streamed, unary = gate.recorded
        assert streamed.message["tool_calls"][0]["function"]["arguments"] == arguments
        assert done.choices[0].message.tool_calls
        assert unary.trainable
        assert streamed.trainable
        assert [t.id for t in unary.tokens] == [t.id for t in streamed.tokens]


async def test_text_completions_are_relayed_with_a_count_of_alternatives() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        logprobs = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0], "top_logprobs": [{"a": -1.0}, None]}
        choice = {"index": 0, "text": "ab", "logprobs": logprobs, "finish_reason": "stop"}
        choice |= {"token_ids": [7, 8], "prompt_token_ids": [1]}
        writer.write(plain("200 OK", {"choices": [choice], "usage": {"completion_tokens": 2}}))

    async with hand_made(answer) as model, rig(model.endpoint(kind="vllm")) as gate:
        await gate.ask({"model": "model", "prompt": "x"}, path="/v1/completions")
        assert model.asked[0].path == "/v1/completions"
        assert model.asked[0].json["logprobs"] == 5
        (turn,) = gate.recorded
        assert (turn.trainable, turn.untrainable_reason) == (True, "")
        assert [(t.text, t.id, t.logprob) for t in turn.tokens] == [("a", 7, -1.0), ("b", 8, -2.0)]


async def test_black_box_relays_but_asks_for_nothing_and_records_nothing() -> None:
    async with hand_made(says("a", "b")) as model, rig(model.endpoint(), mode="black_box") as gate:
        reply = await gate.ask({"messages": [], "stream": True})
        assert reply.body == b"".join(whole("a", "b"))
        assert not {"logprobs", "top_logprobs", "return_token_ids", "stream_options"} & model.asked[0].json.keys()
        assert model.asked[0].json["max_tokens"] == 4096
        assert gate.recorded == []
        assert (gate.lease.turns, gate.lease.generated_tokens) == (1, 2)


async def test_the_turn_limit_is_answered_without_the_model_and_tells_nothing_that_invites_a_retry() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint(), limits=Limits(max_turns=2)) as gate:
        assert [(await gate.ask()).status for _ in range(4)] == [200, 200, 400, 400]
        assert (await gate.ask()).json["error"]["message"] == "turn limit reached"
        assert (len(model.asked), len(gate.recorded), gate.lease.turns) == (2, 2, 2)
        assert gate.lease.limit_reached == "turn limit reached"


async def test_calls_at_once_cannot_slip_under_the_turn_limit() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint(), limits=Limits(max_turns=3)) as gate:
        replies = await asyncio.gather(*(gate.ask() for _ in range(8)))
        assert sorted(r.status for r in replies) == [200] * 3 + [400] * 5
        assert len(model.asked) == 3


async def test_the_token_budget_caps_the_last_answer_and_then_ends_the_rollout() -> None:
    async with hand_made(says("a", "b", "c")) as model, rig(model.endpoint(), limits=Limits(token_budget=5)) as gate:
        assert [(await gate.ask()).status for _ in range(2)] == [200, 200]
        assert gate.lease.limit_reached == ""
        assert (await gate.ask()).status == 400
        assert gate.lease.limit_reached == "token budget used up"
        assert [asked.json["max_tokens"] for asked in model.asked] == [5, 2]


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()) + gate.request(chat(stream=False)) + gate.request(b"no json"))
        replies = [await client.reply() for _ in range(3)]
        assert [r.status for r in replies] == [200, 200, 400]
        assert replies[0].body == b"".join(whole("a"))


async def test_a_chunked_request_and_expect_continue_are_understood() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {gate.key}\r\n"
            "Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert (await client.head())[0] == 100
        client.writer.write(chunked(b'{"messages": [') + chunked(b'], "stream": true}') + b"0\r\n\r\n")
        reply = await client.reply()
        assert reply.status == 200
        assert model.asked[0].json["messages"] == []


async def test_an_old_client_gets_an_answer_that_ends_with_its_connection() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()).replace(b"HTTP/1.1", b"HTTP/1.0"))
        status, headers = await client.head()
        assert status == 200
        assert "transfer-encoding" not in headers
        assert await client.reader.read(-1) == b"".join(whole("a"))


async def test_a_lease_on_a_unix_socket_serves_just_the_same(tmp_path: Path) -> None:
    recorded: list[Turn] = []

    async def record(turn: Turn) -> None:
        recorded.append(turn)

    async with hand_made(says("a")) as model, Gateway.open() as gateway:
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(str(tmp_path / "gate"))
        sock.listen()
        async with gateway.lend(
            model.endpoint(), sock, limits=Limits(), mode="transparent_proxy", record=record
        ) as lease:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / "gate"))
            key = lease.endpoint.key.get_secret_value()
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
                'Content-Length: 15\r\n\r\n{"messages":[]}'.encode()
            )
            assert b"200 OK" in await reader.read(-1)
            writer.close()
            await writer.wait_closed()
    assert len(recorded) == 1


async def test_check_asks_once_for_many_and_believes_a_good_answer_for_a_while() -> None:
    async with hand_made(says("a")) as model, Gateway.open() as gateway:
        await asyncio.gather(*(gateway.check(model.endpoint()) for _ in range(20)))
        await gateway.check(model.endpoint())
        assert [asked.path for asked in model.asked] == ["/v1/models", "/version"]


async def test_check_names_a_server_that_is_not_there_and_notices_when_it_comes() -> None:
    async with Gateway.open() as gateway:
        async with hand_made(says("a")) as model:
            endpoint = model.endpoint()
        for _ in range(2):
            with pytest.raises(
                ModelUnreachable, match=r"cannot reach the model at http://127.0.0.1:\d+/v1: connection refused; "
            ):
                await gateway.check(endpoint)
        sock = socket.socket()
        sock.bind(("127.0.0.1", model.port))

        async def hello(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(hello, sock=sock):
            await gateway.check(endpoint)


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
async def test_check_says_when_the_key_is_refused_and_never_shows_it(status: str) -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain(status, {}))

    async with hand_made(answer) as model, Gateway.open() as gateway:
        with pytest.raises(ModelUnreachable, match="refuses the key") as caught:
            await gateway.check(model.endpoint())
        assert "sk-real" not in str(caught.value)


async def test_whoever_made_the_socket_may_close_it_too() -> None:
    async def record(_: Turn) -> None:
        pass

    async with Gateway.open() as gateway, hand_made(says("a")) as model:
        with listener() as sock:
            port = sock.getsockname()[1]
            async with gateway.lend(model.endpoint(), sock, limits=Limits(), mode="black_box", record=record):
                pass
            with pytest.raises(OSError):
                await asyncio.open_connection("127.0.0.1", port)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
            again.listen()
