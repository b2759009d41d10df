"""What a box can put into the log by calls that come to nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollcage.events import Ended, Queued, TurnEnded
from rollcage.gateway import Gateway
from rollcage.gateway.budget import BROKEN_CALLS, HEAD_CHARS, NOT_KEPT, Budget
from rollcage.store import Store
from rollcage.types import Endpoint, Job, Limits, Outcome, Task, Turn
from support.hand_made import Asked, chat, half_a_stream, hand_made, listener, plain, rig, says, until

REFUSED = {"error": {"message": "prompt is too long", "type": "invalid_request_error"}}
JOB = Job(task=Task(instruction="x"), model=Endpoint(base_url="http://x/v1", model="m"))

SMALL = 2 << 20
"""A budget that is used up soon."""


def failed(**request: Any) -> Turn:
    return Turn(index=0, request=request, status=400, error="prompt is too long")


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def refuse(_: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(plain("400 Bad Request", REFUSED))


async def test_bodies_that_the_model_refuses_fill_only_their_part_of_the_log(tmp_path: Path) -> None:
    async with (
        Store.open(tmp_path / "log.sqlite") as store,
        hand_made(refuse) as model,
        Gateway.open() as gateway,
    ):
        await store.append("r", Queued(job=JOB))

        async def record(turn: Turn) -> None:
            await store.append("r", TurnEnded(turn=turn))

        sock = listener()
        port = sock.getsockname()[1]
        lent = gateway.lend(model.endpoint(), sock, limits=Limits(), mode="transparent_proxy", record=record)
        async with lent as lease:
            lease.budget = Budget(SMALL)
            key = lease.endpoint.key.get_secret_value()
            # Nothing compresses this, and no two are alike.
            bodies = [json.dumps(chat(messages=[said(os.urandom(SMALL // 10).hex())])).encode() for _ in range(8)]
            for body in bodies:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                top = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\n"
                writer.write(f"{top}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                assert b"400" in await reader.readline()
                writer.close()
            await until(lambda: lease.turns == len(bodies))
        await store.append("r", Ended(outcome=Outcome.AGENT_FAILED))
        turns = (await store.rollout("r")).turns
    assert [NOT_KEPT in turn.request for turn in turns] == [False] * 4 + [True] * 4
    assert all(turn.status == 400 and "prompt is too long" in str(turn.error) for turn in turns)
    assert "not kept" in str(turns[-1].error)
    assert "not kept" not in str(turns[0].error)
    left = turns[-1].request[NOT_KEPT]
    assert SMALL // 5 < left["bytes"] < SMALL // 5 + 1000
    assert len(left["head"]) == HEAD_CHARS
    assert left["head"].startswith("{")
    # The log itself, and once more what SQLite has not put into place yet.
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * SMALL


async def test_bodies_left_by_an_agent_that_hangs_up_count_too_and_good_ones_never_do() -> None:
    size = SMALL * 2 // 5
    async with hand_made(half_a_stream) as model, rig(model.endpoint()) as gate:
        gate.lease.budget = Budget(SMALL)
        for number in range(3):
            async with gate.connect() as client:
                client.writer.write(gate.request(chat(messages=[said(f"{number}" * size)])))
                await client.head()
            await until(lambda: len(gate.recorded) > number)  # noqa: B023
        assert [NOT_KEPT in turn.request for turn in gate.recorded] == [False, False, True]
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        gate.lease.budget = Budget(SMALL)
        for number in range(5):
            await gate.ask(chat(messages=[said(f"{number}" * size)]))
        assert all("messages" in turn.request and turn.error is None for turn in gate.recorded)


async def test_a_conversation_that_fails_again_and_again_is_kept_because_its_words_are_stored_once() -> None:
    budget = Budget(1 << 20)
    conversation = [said(f"{number}" * 1000) for number in range(100)]
    for _ in range(50):
        conversation.append(said("one more"))
        turn = failed(model="m", messages=list(conversation))
        assert await budget.kept(turn) is turn
    other = await budget.kept(failed(messages=[said("y" * (1 << 20))]))
    assert NOT_KEPT in other.request
    small = failed(messages=[said("still room for a short one")])
    assert await budget.kept(small) is small


async def test_the_same_messages_in_another_order_cost_what_the_log_keeps_of_them(tmp_path: Path) -> None:
    budget, messages = Budget(SMALL), [said(os.urandom(200).hex()) for _ in range(2000)]
    turns = []
    async with Store.open(tmp_path / "log.sqlite") as store:
        await store.append("r", Queued(job=JOB))
        for number in range(16):
            turns.append(await budget.kept(failed(model="m", messages=messages[number:] + messages[:number])))
            await store.append("r", TurnEnded(turn=turns[-1]))
    assert [NOT_KEPT in turn.request for turn in turns] == [False] * 2 + [True] * 14
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 2 * SMALL


async def test_what_is_not_kept_can_be_recognised_by_its_digest() -> None:
    request = {"model": "m", "messages": [said("é" * 5000)], "tools": []}
    left = (await Budget(100).kept(failed(**request))).request[NOT_KEPT]
    whole = json.dumps(request, ensure_ascii=False, separators=(",", ":")).encode()
    assert left == {
        "bytes": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
        "head": whole[:HEAD_CHARS].decode(errors="replace"),
    }


@pytest.mark.parametrize(
    "odd",
    [float("inf"), 1 << 70, "\ud800", [[[]]] * 3, {"a": {"b": None}}],
    ids=["inf", "huge", "half", "list", "dict"],
)
async def test_whatever_a_body_holds_it_can_be_measured(odd: Any) -> None:
    turn = failed(odd=odd, messages=[odd])
    assert await Budget(1 << 20).kept(turn) is turn
    assert NOT_KEPT in (await Budget(10).kept(turn)).request


async def test_a_box_that_only_fails_is_not_passed_on_for_ever() -> None:
    async with hand_made(refuse) as model, rig(model.endpoint()) as gate:
        assert (await gate.ask()).status == 400
        gate.lease.budget.calls = BROKEN_CALLS
        refused = await gate.ask()
        assert (refused.status, len(model.asked)) == (400, 1)
        assert "no more are made" in refused.json["error"]["message"]
    assert len(gate.recorded) == 1


async def test_a_long_name_of_a_session_is_cut() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        await gate.ask(extra=f"x-session-id: {'s' * 30_000}\r\n")
    assert gate.recorded[0].session == "s" * 200
