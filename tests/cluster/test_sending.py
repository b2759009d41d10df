"""What nodes send of turns: packed there, each piece of content once, and in the log as if appended here."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from rollcage.cluster.flow import Flow
from rollcage.cluster.messages import OutboxItem
from rollcage.cluster.outbox import EventSender, Outbox
from rollcage.events import Ended, Event, Queued, StageStarted, TurnEnded
from rollcage.rollout.run import RolloutDeps
from rollcage.runner.executor import Execution
from rollcage.store import Store
from rollcage.store.packed import Packed
from rollcage.store.retention import Prune, prune
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome, Stage, Task, TokenColumns
from support.turns import turn

pytestmark = pytest.mark.anyio

JOB = Job(task=Task(instruction="x"), model=NO_MODEL, agent=AgentSpec(name="nop"))


def conversation(turns: int) -> list[TurnEnded]:
    """Each request repeats what was said before; the last turns have what no JSON tool carries, and no count."""
    found, messages, prompt = [], [{"role": "system", "content": "words " * 2000}], list(range(3000))
    for index in range(turns):
        answer = range(9000 + 50 * index, 9050 + 50 * index)
        one = turn(index, prompt, answer, request={"messages": list(messages)}, policy_version="v1")
        if index % 2:
            one = one.model_copy(update={"tokens": TokenColumns.of(one.tokens)})
        found.append(TurnEnded(turn=one))
        messages.append({"role": "assistant", "content": f"{index} said " * 100})
        prompt += answer
    odd = turn(turns, prompt, (1, 2), message={"content": "half \ud800", "number": 1e999}, usage={}, trainable=False)
    return [*found, TurnEnded(turn=odd)]


async def sent(events: Sequence[Event]) -> list[OutboxItem]:
    """What an outbox has of them, one by one, as a head takes them."""
    outbox = Outbox()
    items: list[OutboxItem] = []
    async with anyio.create_task_group() as tasks:

        async def send() -> None:
            sender = EventSender(outbox, "far", 1)
            for event in events:
                await sender.send(event)

        tasks.start_soon(send)
        while len(items) < len(events):
            items += await outbox.news(10)
            outbox.acknowledge(items[-1].number)
    return items


async def committed(store: Store, items: Sequence[OutboxItem]) -> Flow:
    async def log(event: Event | Packed) -> None:
        await store.append("far", event)

    flow = Flow(Execution("far", JOB, RolloutDeps(None, None, None), log, ""), 1)  # type: ignore[arg-type]
    await flow.commit(items)
    return flow


def row(store: Store, name: str) -> tuple[Any, ...]:
    import sqlite3

    sql = "SELECT turns, tokens, trainable_tokens, prompt_tokens, policy_version FROM rollouts WHERE id = ?"
    with sqlite3.connect(store.path) as connection:
        return tuple(connection.execute(sql, (name,)).fetchone())


async def test_turns_of_a_node_are_in_the_log_as_if_they_had_been_appended_here(store: Store) -> None:
    events: list[Event] = [StageStarted(stage=Stage.AGENT), *conversation(12), Ended(outcome=Outcome.FINISHED)]
    for name in ("near", "far"):
        await store.append(name, Queued(job=JOB))
    for event in events:
        await store.append("near", event)
    flow = await committed(store, await sent(events))
    assert flow.ended and flow.agent_began
    near, far = [[entry.event for entry in await store.read(name)] for name in ("near", "far")]
    assert near == far and len(far) == len(events) + 1
    assert row(store, "near") == row(store, "far") == (13, 602, 600, row(store, "near")[3], "v1")
    await store.rebuild()
    assert row(store, "far") == row(store, "near")


async def test_content_travels_once(store: Store) -> None:
    events = conversation(40)
    sizes = [len(item.data) for item in await sent(events)]
    whole = [len(pickle.dumps(event, 5)) for event in events]
    assert sum(sizes) < sum(whole) / 10
    assert max(sizes[20:]) < 2 * max(sizes[2:10]), "a turn is as small at the end of a conversation as at its beginning"


async def test_content_that_an_open_rollout_brought_outlives_pruning(store: Store, tmp_path: Path) -> None:
    events = conversation(6)
    for name in ("near", "far"):
        await store.append(name, Queued(job=JOB))
    ended: list[Event] = [*events, Ended(outcome=Outcome.FINISHED)]
    for event in ended:
        await store.append("near", event)
    items = await sent(events)
    await committed(store, items[:3])
    prune(store.path, tmp_path / "work", Prune(older_than_s=0))
    assert [each.id for each in await store.list()] == ["far"]
    await committed(store, items[3:])
    assert [entry.event for entry in await store.read("far")][1:] == events
