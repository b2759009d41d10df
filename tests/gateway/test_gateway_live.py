"""Those who watch a running turn, and attempts that are repeated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest

from rollcage.gateway import Delta, Gateway, exchange
from rollcage.gateway.capture import PORTION
from rollcage.gateway.retries import Attempt, Attempts
from rollcage.simulators import ScriptedCall, ScriptedModel, ScriptedTurn
from rollcage.types import Limits, Turn
from support.hand_made import (
    Asked,
    chat,
    chunked,
    half_a_stream,
    hand_made,
    head,
    listener,
    plain,
    rig,
    says,
    text_event,
    until,
    whole,
)

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


async def test_a_watcher_sees_words_before_the_turn_is_over_and_the_end_of_it() -> None:
    may_end = asyncio.Event()
    events = whole("Hel", "lo")

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, events[:2])))
        await may_end.wait()
        writer.write(b"".join(map(chunked, events[2:])) + b"0\r\n\r\n")

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        asking = asyncio.ensure_future(gate.ask(extra="x-session-id: ses_1\r\n"))
        await model.arrived.wait()
        watching = gate.lease.watch()
        first = await anext(watching)
        assert (first.turn, first.session, first.content, first.tokens) == (0, "ses_1", "Hel", 1)
        assert gate.recorded == []
        may_end.set()
        second = await anext(watching)
        assert (second.content, second.tokens, second.ended) == ("lo", 2, False)
        assert (await anext(watching)).ended
        assert (await asking).body == b"".join(events)


async def test_of_a_long_answer_every_watcher_hears_each_word_once_though_most_of_it_is_read_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "READ_S", 0.0)
    may_go, may_end = asyncio.Event(), asyncio.Event()
    words = [f"w{n} " for n in range(2000)]
    events = whole(*words)
    assert len(b"".join(events)) > 3 * PORTION

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, events[:50])))
        await may_go.wait()
        for at in range(50, 1500, 100):
            writer.write(b"".join(map(chunked, events[at : min(at + 100, 1500)])))
            await writer.drain()
        await may_end.wait()
        writer.write(b"".join(map(chunked, events[1500:])) + b"0\r\n\r\n")

    async def heard(watching: AsyncIterator[Delta], first: asyncio.Event) -> tuple[str, int]:
        said, tokens = "", 0
        async for delta in watching:
            said, tokens = said + delta.content, max(tokens, delta.tokens)
            if words[1400] in said:
                first.set()
            if delta.ended:
                break
        return said, tokens

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        asking = asyncio.ensure_future(gate.ask())
        await model.arrived.wait()
        early, late = asyncio.Event(), asyncio.Event()
        one = asyncio.ensure_future(heard(gate.lease.watch(), early))
        may_go.set()
        await early.wait()
        [call] = gate.lease._exchanges.values()
        assert len(b"".join(call.pieces)) < 2 * PORTION and call.spoken.tokens > 500
        other = asyncio.ensure_future(heard(gate.lease.watch(), late))
        await late.wait()
        may_end.set()
        assert await one == await other == ("".join(words), len(words))
        assert (await asking).body == b"".join(events)
        assert gate.recorded[0].message["content"] == "".join(words) and len(gate.recorded[0].tokens) == len(words)


async def test_a_watcher_finds_a_rollout_by_name_and_is_done_when_its_lease_is() -> None:
    async def record(_: Turn) -> None:
        pass

    seen: list[Delta] = []

    async def watch(gateway: Gateway) -> list[Delta]:
        async for delta in gateway.watch("rollout-7"):
            seen.append(delta)
        return seen

    async with hand_made(half_a_stream) as model, Gateway.open() as gateway:
        assert await watch(gateway) == []
        sock = listener()
        port = sock.getsockname()[1]
        async with gateway.lend(
            model.endpoint(), sock, limits=Limits(), mode="transparent_proxy", record=record, name="rollout-7"
        ) as lease:
            watching = asyncio.ensure_future(watch(gateway))
            key = lease.endpoint.key.get_secret_value()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
                'Content-Length: 29\r\n\r\n{"messages":[],"stream":true}'.encode()
            )
            await reader.readuntil(text_event("b", ids=[11])[-20:])
            await until(lambda: "".join(delta.content for delta in seen) == "ab")
        with anyio.fail_after(120):
            await watching
        writer.close()
        assert "".join(delta.content for delta in seen) == "ab"
        assert [delta.ended for delta in seen][-1] is True
        seen.clear()
        assert await watch(gateway) == []


@pytest.mark.parametrize("profile", ["vllm-0.32", "sglang"])
async def test_a_watcher_sees_thoughts_and_tool_calls_streamed_or_not(profile: str) -> None:
    calls = (ScriptedCall(name="bash", arguments={"command": "ls"}),)
    turn = ScriptedTurn(reasoning="Hm.", text="Look.", tool_calls=calls, delay_s=0.2, token_delay_s=0.01)
    async with ScriptedModel() as model, Gateway.open() as gateway:
        endpoint = model.endpoint([turn], profile=profile)
        await gateway.check(endpoint)
        async with rig(endpoint, gateway=gateway) as gate:
            asking = asyncio.ensure_future(gate.ask(chat(tools=[TOOL])))
            seen: list[Delta] = []
            async for delta in gate.lease.watch():
                seen.append(delta)
                if delta.ended:
                    break
            await asking
        assert "".join(delta.content for delta in seen) == "Look."
        assert "".join(delta.reasoning for delta in seen) == "Hm."
        assert "".join(delta.calls for delta in seen) == 'bash {"command": "ls"}'
        assert seen[-1].tokens == len(gate.recorded[0].tokens)


async def test_a_watcher_that_does_not_read_holds_up_nobody() -> None:
    events = whole(*("word " for _ in range(2000)))
    seen = asyncio.Event()

    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, events[:9])))
        await seen.wait()
        writer.write(b"".join(map(chunked, events[9:])) + b"0\r\n\r\n")

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        asking = asyncio.ensure_future(gate.ask())
        watching = gate.lease.watch()
        assert (await anext(watching)).content.startswith("word ")
        seen.set()
        assert (await asking).body == b"".join(events)
        assert [(await gate.ask()).body == b"".join(events) for _ in range(5)] == [True] * 5
        assert all(turn.trainable for turn in gate.recorded)
        # Late, but nothing is lost of what it was at.
        said = [delta.content async for delta in _until_ended(watching)]
        assert len("".join(said)) > 5 * 1900


async def _until_ended(watching: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
    async for delta in watching:
        yield delta
        if delta.ended:
            return


async def test_a_call_repeated_after_a_failure_says_which_attempt_it_replaces() -> None:
    failures = iter([plain("500 Internal Server Error", {}), None, plain("503 Service Unavailable", {})])
    good = says("fine")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        failure = next(failures, b"")
        if failure is None:
            writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a", "b")[:2])))
            writer.close()
        elif failure:
            writer.write(failure)
        else:
            await good(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        session = "x-session-id: one\r\n"
        for body in (chat(), chat(), chat(), chat(stream=False), chat()):
            await gate.ask(body, extra=session)
        await gate.ask(extra="x-session-id: two\r\n")
        # Each attempt replaces the one before; once one was good, saying the same again replaces nothing.
        assert [turn.replaces for turn in gate.recorded] == [None, 0, 1, 2, None, None]
        assert [turn.error is None for turn in gate.recorded] == [False, False, False, True, True, True]


async def test_a_call_repeated_after_hanging_up_replaces_the_one_it_left() -> None:
    good = says("fine")

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (half_a_stream if len(model.asked) == 1 else good)(asked, writer)

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        async with gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await client.reader.readuntil(text_event("b", ids=[11])[-20:])
        await gate.ask(chat(temperature=1))
        await until(lambda: len(gate.recorded) == 2)
        replaced = {turn.index: turn.replaces for turn in gate.recorded}
        assert replaced == {0: None, 1: 0}


async def test_another_conversation_replaces_nothing_whatever_broke_before_it() -> None:
    async def answer(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(plain("500 Internal Server Error", {}))

    async with hand_made(answer) as model, rig(model.endpoint()) as gate:
        await gate.ask(chat(tools=[TOOL]))
        await gate.ask(chat(tools=[]))
        await gate.ask({"messages": [{"role": "user", "content": "else"}], "stream": True})
        assert [turn.replaces for turn in gate.recorded] == [None, None, None]


def test_a_client_that_says_it_tries_again_is_believed_even_while_the_first_attempt_runs() -> None:
    def attempt(index: int, session: str = "s", **body: Any) -> Attempt:
        return Attempt(index, session, body, 1)

    attempts = Attempts()
    again = {"x-stainless-retry-count": "1"}
    assert attempts.begin(attempt(0, messages=["a"]), {}) is None
    assert attempts.begin(attempt(1, messages=["a"]), {"x-stainless-retry-count": "0"}) is None
    assert attempts.begin(attempt(2, messages=["b"]), again) is None
    assert attempts.begin(attempt(3, "other", messages=["a"]), again) is None
    assert attempts.begin(attempt(4, messages=["a"]), again) == 1
    attempts.end(0, broken=False)
    attempts.end(4, broken=False)
    assert attempts.begin(attempt(5, messages=["a"]), again) is None


def test_what_broke_long_ago_is_forgotten() -> None:
    attempts = Attempts()
    for index in range(100):
        attempts.begin(Attempt(index, "", {"messages": [index]}, 1), {})
        attempts.end(index, broken=True)
    assert attempts.begin(Attempt(100, "", {"messages": [0]}, 1), {}) is None
    assert attempts.begin(Attempt(101, "", {"messages": [99]}, 1), {}) == 99


def test_a_box_cannot_make_the_gateway_remember_its_largest_bodies() -> None:
    attempts = Attempts()
    for index in range(3):
        attempts.begin(Attempt(index, "", {"messages": [index]}, 20 << 20), {})
        attempts.end(index, broken=True)
    assert attempts.begin(Attempt(3, "", {"messages": [1]}, 1), {}) is None
    assert attempts.begin(Attempt(4, "", {"messages": [2]}, 1), {}) == 2
