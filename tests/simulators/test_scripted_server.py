"""The scripted model as a server: errors, broken connections, its life cycle, and the real OpenAI client beside it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator

import openai
import pytest

from rollcage.errors import SetupError, UsageError
from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn, default_tokenizer
from rollcage.simulators.scripted.template import prompt_ids
from rollcage.types import Endpoint, JsonObject
from support.scripted_client import BASH, EVERYTHING, HELLO, ask, content, conversation, request

DONE = ScriptedTurn(text="Done.")
LOOK = ScriptedTurn(text="I look.", tool_calls=(ScriptedCall(name="bash", arguments={"command": "ls /tmp"}),))
STREAM: JsonObject = {**HELLO, "stream": True}


@pytest.fixture(scope="module")
async def model() -> AsyncIterator[ScriptedModel]:
    async with ScriptedModel(context_length=50_000) as model:
        yield model


def client(endpoint: Endpoint, *, retries: int = 0) -> openai.AsyncOpenAI:
    key = endpoint.key.get_secret_value()
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=retries, timeout=120)


# Errors


async def test_an_unknown_key_is_refused_and_not_repeated(model: ScriptedModel) -> None:
    answer = await request(
        "POST", f"{model.base_url}/chat/completions", body=HELLO, headers={"authorization": "Bearer sk-9"}
    )
    assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key" and b"sk-9" not in answer.body
    assert (await request("GET", f"{model.base_url}/models")).status == 401


async def test_an_unknown_model_is_refused_in_vllms_words(model: ScriptedModel) -> None:
    answer = await ask(model.endpoint([DONE]), {**HELLO, "model": "nope"})
    message = "The model `nope` does not exist. Valid aliases: scripted."
    error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
    assert (answer.status, answer.json) == (404, {"error": error})


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": [""]}, "stop"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 49_999}, "input_tokens"),
    ],
)
async def test_a_bad_request_is_refused_with_the_name_of_what_is_wrong(
    model: ScriptedModel, change: JsonObject, param: str
) -> None:
    answer = await ask(model.endpoint([DONE]), {**HELLO, **change})
    assert answer.status == 400
    assert answer.json["error"] | {"message": ""} == {
        "message": "", "type": "BadRequestError", "param": param, "code": 400
    }  # fmt: skip


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe"])
async def test_a_body_that_is_no_object_is_refused(model: ScriptedModel, body: bytes) -> None:
    headers = {"authorization": f"Bearer {model.endpoint([DONE]).key.get_secret_value()}"}
    answer = await request("POST", f"{model.base_url}/chat/completions", body=body, headers=headers)
    assert answer.status == 400 and answer.json["error"]["type"] == "BadRequestError"


async def test_half_a_character_in_a_request_is_survived(model: ScriptedModel) -> None:
    body = {**HELLO, "messages": [{"role": "user", "content": "broken \ud83d here"}]}
    assert await content(model.endpoint([DONE]), body) == "Done."


async def test_a_scripted_status_carries_its_message_and_when_to_come_back(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(status=429, text="slow down", times=1), ScriptedTurn(status=418)])
    busy, odd = await ask(endpoint, STREAM), await ask(endpoint, STREAM)
    error = {"message": "slow down", "type": "RateLimitError", "param": None, "code": 429}
    assert (busy.status, busy.json, busy.headers["retry-after"]) == (429, {"error": error}, "1")
    assert (odd.status, odd.json["error"]["message"]) == (418, "scripted failure")


async def test_an_error_in_mid_stream_is_an_event_and_then_the_end(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="never whole " * 9, error_after=3)])
    answer = await ask(endpoint, STREAM)
    assert answer.status == 200 and answer.whole and answer.events[-1] == "data: [DONE]"
    assert len(answer.chunks) == 4
    assert answer.chunks[3]["error"]["code"] == 500 and answer.finish is None
    assert (await ask(endpoint, HELLO)).status == 500


@pytest.mark.parametrize("after", [0, 1, 3])
async def test_a_cut_stream_breaks_off_after_so_many_chunks(
    model: ScriptedModel, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="never whole " * 9, cut_after=after)])
    answer = await ask(endpoint, STREAM)
    assert answer.status == 200 and not answer.whole
    assert len(answer.chunks) == after == len(answer.events)
    assert (await ask(endpoint, HELLO)).status == 0
    assert not caplog.records


async def test_other_requests_on_other_connections_survive_a_cut(model: ScriptedModel) -> None:
    slow = model.endpoint([ScriptedTurn(text="a b c d e f g h", token_delay_s=0.01)])
    cut = model.endpoint([ScriptedTurn(text="never", cut_after=1)])
    answers = await asyncio.gather(ask(slow, STREAM), *(ask(cut, STREAM) for _ in range(5)))
    assert answers[0].whole and answers[0].text() == "a b c d e f g h"
    assert not any(answer.whole for answer in answers[1:])


async def test_delays_are_kept(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(text="a", delay_s=0.2), ScriptedTurn(text="a b c", token_delay_s=0.1)])
    started = time.monotonic()
    await ask(endpoint, STREAM)
    assert time.monotonic() - started >= 0.2
    started = time.monotonic()
    answer = await ask(endpoint, {**conversation(1), "stream": True, "stream_interval": 1})
    assert time.monotonic() - started >= 0.1 * (len(answer.chunks) - 1)


# The routes besides


async def test_it_says_that_it_is_scripted(model: ScriptedModel) -> None:
    endpoint = model.endpoint([DONE])
    answer = await ask(endpoint, {**HELLO, **EVERYTHING})
    assert answer.headers["x-rollcage-scripted"] == "1"
    assert answer.chunks[-1]["system_fingerprint"].startswith("rollcage-scripted-")
    async with client(endpoint) as openai_client:
        (one,) = (await openai_client.models.list()).data
    assert (one.id, one.owned_by, one.model_dump()["scripted"]) == ("scripted", "vllm", True)


async def test_the_open_routes_answer(model: ScriptedModel) -> None:
    root = model.base_url.removesuffix("/v1")
    assert (await request("GET", f"{root}/health")).status == 200
    assert (await request("GET", f"{root}/version")).json == {"version": "0.32.0"}
    assert (await request("GET", f"{root}/nowhere")).status == 404
    assert (await request("DELETE", f"{root}/health")).status == 405
    plain = (
        await request("POST", f"{root}/tokenize", body={"prompt": "hi <|im_end|>", "return_token_strs": True})
    ).json
    assert plain["token_strs"][-1] == "<|im_end|>" and plain["count"] == len(plain["tokens"])
    chat = (await request("POST", f"{root}/tokenize", body={"messages": HELLO["messages"]})).json
    assert chat["tokens"] == prompt_ids(HELLO["messages"])
    assert (await request("POST", f"{root}/tokenize", body={})).status == 400


# The real client


async def test_the_real_client_runs_a_conversation_with_tools(model: ScriptedModel) -> None:
    endpoint = model.endpoint([LOOK, DONE])
    messages = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": "List the files."}]
    prompts: list[list[int]] = []
    async with client(endpoint) as real:
        for _ in range(2):
            answer = await real.chat.completions.create(
                model="scripted",
                messages=messages,  # type: ignore[arg-type]
                tools=[BASH],  # type: ignore[list-item]
                logprobs=True,
                extra_body={"return_token_ids": True},
            )
            (choice,) = answer.choices
            assert answer.usage and choice.logprobs and choice.logprobs.content
            ids = choice.model_extra["token_ids"] if choice.model_extra else []
            assert len(ids) == len(choice.logprobs.content) == answer.usage.completion_tokens
            prompts.append((answer.model_extra or {})["prompt_token_ids"])
            prompts.append(prompts[-1] + ids)
            messages.append(choice.message.model_dump(exclude_none=True))
            for call in choice.message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "a.txt"})
    assert choice.message.content == "Done." and choice.finish_reason == "stop"
    for shorter, longer in itertools.pairwise(prompts):
        assert longer[: len(shorter)] == shorter


async def test_the_real_client_reads_a_stream_with_tools(model: ScriptedModel) -> None:
    endpoint = model.endpoint([LOOK])
    async with (
        client(endpoint) as real,
        real.chat.completions.stream(
            model="scripted",
            messages=[{"role": "user", "content": "hi"}],
            tools=[BASH],  # type: ignore[list-item]
            stream_options={"include_usage": True},
            logprobs=True,
        ) as stream,
    ):
        answer = await stream.get_final_completion()
    (choice,) = answer.choices
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("bash", '{"command": "ls /tmp"}')
    assert answer.usage and choice.logprobs and choice.logprobs.content
    assert len(choice.logprobs.content) == answer.usage.completion_tokens


async def test_the_real_client_raises_what_it_raises_for_real_engines(model: ScriptedModel) -> None:
    kinds = {
        400: openai.BadRequestError,
        404: openai.NotFoundError,
        429: openai.RateLimitError,
        500: openai.InternalServerError,
    }
    for status, kind in kinds.items():
        async with client(model.endpoint([ScriptedTurn(status=status, text="it broke")])) as real:
            with pytest.raises(kind, match="it broke"):
                await real.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    stranger = Endpoint(base_url=model.base_url, model="scripted")
    async with openai.AsyncOpenAI(base_url=stranger.base_url, api_key="wrong", max_retries=0, timeout=120) as real:
        with pytest.raises(openai.AuthenticationError):
            await real.models.list()


async def test_the_real_client_notices_a_cut_and_an_error_in_a_stream(model: ScriptedModel) -> None:
    broken: dict[str, ScriptedTurn] = {
        "cut": ScriptedTurn(text="never whole " * 9, cut_after=2),
        "error": ScriptedTurn(text="it broke", error_after=2),
    }
    for turn in broken.values():
        async with client(model.endpoint([turn])) as real:
            stream = await real.chat.completions.create(
                model="scripted", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            # The client hands on a broken connection as its HTTP library raised it.
            with pytest.raises(Exception, match=r"it broke|incomplete|closed|Connection"):
                async for _ in stream:
                    pass


async def test_the_real_client_retries_past_a_passing_fault(model: ScriptedModel) -> None:
    endpoint = model.endpoint([ScriptedTurn(status=500, times=2), DONE])
    async with client(endpoint, retries=3) as real:
        answer = await real.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hi"}])
    assert answer.choices[0].message.content == "Done."
    assert len(model.requests(endpoint)) == 3


# Its life


async def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"127\.0\.0\.1:{port} \(Address already in use\).*another port"):
            async with ScriptedModel(port=port):
                pass


async def test_a_port_can_be_chosen_and_is_free_again_at_once() -> None:
    async with ScriptedModel() as first:
        port = int(first.base_url.removesuffix("/v1").rpartition(":")[2])
    for _ in range(2):
        async with ScriptedModel(port=port) as model:
            assert model.base_url == f"http://127.0.0.1:{port}/v1"
            assert await content(model.endpoint([DONE]), HELLO) == "Done."


async def test_without_its_block_it_has_no_address() -> None:
    model = ScriptedModel()
    with pytest.raises(UsageError, match="not running"):
        model.endpoint([DONE])
    async with model:
        pass
    with pytest.raises(UsageError, match="not running"):
        _ = model.base_url


async def test_it_ends_at_once_with_streams_open_and_clients_idle(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    handlers = list(logging.getLogger("uvicorn.access").handlers), logging.getLogger("uvicorn.access").propagate
    async with ScriptedModel() as model:
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
        endless = ScriptedTurn(text="word " * 1000, token_delay_s=60)
        asleep = ScriptedTurn(text="word", delay_s=3600)
        asked = [
            asyncio.create_task(ask(model.endpoint([turn]), {**HELLO, "stream": streams}))
            for turn, streams in ((endless, True), (asleep, True), (asleep, False))
        ]
        flood = asyncio.create_task(ask(model.endpoint([ScriptedTurn(text="word " * 20_000)]), STREAM))
        idle = client(model.endpoint([DONE]))
        await idle.models.list()
        while model.open_requests < 4:
            await asyncio.sleep(0)
        started = time.monotonic()
    # Long before the next word of the slowest.
    assert time.monotonic() - started < 50
    answers = await asyncio.gather(*asked, flood, return_exceptions=True)
    assert not any(getattr(answer, "whole", False) for answer in answers)
    await idle.close()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert (
        list(logging.getLogger("uvicorn.access").handlers),
        logging.getLogger("uvicorn.access").propagate,
    ) == handlers
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


async def test_a_client_that_leaves_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedModel() as model:
        endpoint = model.endpoint([ScriptedTurn(text="word", delay_s=3600)])
        for _ in range(3):
            asked = asyncio.create_task(ask(endpoint, STREAM))
            while not model.open_requests:
                await asyncio.sleep(0)
            asked.cancel()
            while model.open_requests:
                await asyncio.sleep(0)
    assert not caplog.records


async def test_requests_are_kept_only_as_far_as_asked() -> None:
    async with ScriptedModel(keep_requests=2) as model:
        endpoint = model.endpoint([DONE])
        for n in range(4):
            await ask(endpoint, {**HELLO, "seed": n})
        assert [seen.body["seed"] for seen in model.requests(endpoint)] == [2, 3]


async def test_many_streams_at_once_do_not_mix(model: ScriptedModel) -> None:
    endpoints = [model.endpoint([ScriptedTurn(text=f"{n} " * 50, token_delay_s=0.0005)]) for n in range(40)]
    answers = await asyncio.gather(*(ask(endpoint, {**HELLO, **EVERYTHING}) for endpoint in endpoints))
    for n, answer in enumerate(answers):
        assert answer.text() == f"{n} " * 50
        assert default_tokenizer().decode(answer.ids) == f"{n} " * 50 + "<|im_end|>"
