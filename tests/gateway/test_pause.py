"""A pause of the gateway: new calls wait, running ones finish or are cut, and the weights have a name afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from rollcage.gateway.pause import CUT
from rollcage.rollout.ending import Failure, verdict_of
from rollcage.rollout.run import stopwatch
from rollcage.types import Outcome
from support.hand_made import Asked, chat, half_a_stream, hand_made, hang, rig, says, until


class Slow:
    """A model that answers when it is told to."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.asked = 0

    async def __call__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.asked += 1
        await self.go.wait()
        await says("a")(asked, writer)


async def test_new_calls_wait_and_are_stamped_with_the_weights_that_they_ask() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        gate.lease.policy_version = "1"
        await gate.ask()
        await gate.gateway.pause()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(gate.ask)
            await until(lambda: gate.gateway.gate.waiting == 1)
            assert len(gate.recorded) == 1 and gate.gateway.gate.paused
            gate.gateway.resume("2")
        assert [turn.policy_version for turn in gate.recorded] == ["1", "2"]
        assert gate.recorded[1].trainable and gate.gateway.gate.waiting == gate.gateway.gate.running == 0


async def test_running_calls_finish_before_a_pause_begins() -> None:
    slow = Slow()
    async with hand_made(slow) as model, rig(model.endpoint()) as gate, anyio.create_task_group() as tasks:
        gate.lease.policy_version = "1"
        tasks.start_soon(gate.ask)
        await until(lambda: slow.asked == 1)
        paused = anyio.Event()

        async def pause() -> None:
            await gate.gateway.pause("finish")
            paused.set()

        tasks.start_soon(pause)
        await until(lambda: gate.gateway.gate.paused)
        assert gate.gateway.gate.running == 1 and not paused.is_set()
        slow.go.set()
        await paused.wait()
        (turn,) = gate.recorded
        assert turn.error is None and turn.policy_version == "1"


async def test_a_cut_call_of_which_the_agent_has_heard_nothing_is_asked_again_by_the_gateway() -> None:
    slow = Slow()
    async with hand_made(slow) as model, rig(model.endpoint()) as gate, anyio.create_task_group() as tasks:
        gate.lease.policy_version = "1"
        replies: list[Any] = []

        async def ask() -> None:
            replies.append(await gate.ask(chat(stream=False)))

        tasks.start_soon(ask)
        await until(lambda: slow.asked == 1)
        await gate.gateway.pause("cut")
        assert gate.gateway.gate.running == 0
        (broken,) = gate.recorded
        assert (broken.error, broken.trainable, broken.policy_version) == (CUT, False, "1")
        await until(lambda: gate.gateway.gate.waiting == 1)
        slow.go.set()
        gate.gateway.resume("2")
        await until(lambda: replies)
        assert replies[0].status == 200
        again = gate.recorded[1]
        assert (again.replaces, again.error, again.policy_version) == (broken.index, None, "2")
        assert gate.lease.last_failure is None


async def test_a_call_that_is_cut_in_mid_stream_is_the_agents_to_repeat() -> None:
    async with hand_made(half_a_stream) as model, rig(model.endpoint()) as gate, gate.connect() as client:
        client.writer.write(gate.request(chat()))
        await client.head()
        await client.reader.readuntil(b'"b"')
        await gate.gateway.pause("cut")
        assert b"[DONE]" not in await client.reader.read()
        (broken,) = gate.recorded
        assert broken.error == CUT and not broken.trainable
        # An agent that gives up now was not let finish: that is nobody's failure but ours.
        assert gate.lease.last_failure is broken


async def test_a_call_waits_for_so_long_and_then_has_failed() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        await gate.gateway.pause(wait_s=0.01)
        reply = await gate.ask(chat(stream=False))
        assert reply.status == 503 and b"paused for more than 0.01 s" in reply.body
        (turn,) = gate.recorded
        assert turn.status == 503 and turn.request["messages"] and not turn.trainable
        assert gate.lease.last_failure is turn


async def test_an_agent_that_leaves_while_it_waits_asked_nothing() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        await gate.gateway.pause()
        async with gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await until(lambda: gate.gateway.gate.waiting == 1)
        await until(lambda: gate.gateway.gate.waiting == 0)
        gate.gateway.resume()
        await gate.ask()
        assert [turn.index for turn in gate.recorded] == [0]


async def test_weights_that_were_named_hold_for_what_was_started_before_and_not_after() -> None:
    async with hand_made(says("a")) as model, rig(model.endpoint()) as gate:
        pauses = gate.gateway.gate
        assert pauses.version("1", 0) == "1"
        gate.gateway.resume("2")
        assert gate.lease.policy_version == "2"
        assert (pauses.version("1", 0), pauses.version("3", 1), pauses.version("", 1)) == ("2", "3", "2")


async def test_an_agents_time_stands_still_while_it_waits() -> None:
    now = anyio.current_time()
    scope = anyio.CancelScope(deadline=now + 10)
    tell = stopwatch(scope, now + 100)
    tell(True)
    assert scope.deadline == now + 100
    tell(False)
    assert now + 10 <= scope.deadline < now + 100
    late = stopwatch(scope, now + 5)
    late(True)
    late(False)
    assert scope.deadline == now + 5


@pytest.mark.parametrize("model_does", [hang, half_a_stream], ids=["never says a word", "speaks, slowly"])
async def test_a_slow_model_uses_up_the_agents_time_once_it_speaks(model_does: Any) -> None:
    async with hand_made(model_does) as model:
        async with rig(model.endpoint()) as gate, gate.connect() as client:
            client.writer.write(gate.request(chat()))
            await model.arrived.wait()
            if model_does is half_a_stream:
                await client.head()
                await client.reader.readuntil(b'"b"')
        # The agent's time is over: its lease ended.
        lease = gate.lease
        assert lease.turns == 1 and lease.answers == 0 and lease.last_failure is None
        if lease.heard:
            ended = verdict_of(None, lease.last_failure, limit="", silent=not lease.heard)
            assert ended.outcome is Outcome.AGENT_TIMEOUT and ended.outcome.scored
        else:
            with pytest.raises(Failure, match="never answered"):
                verdict_of(None, lease.last_failure, limit="", silent=not lease.heard)
        assert lease.heard is (model_does is half_a_stream)
