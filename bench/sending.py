"""How fast what a node logs reaches the head's log: by calls of Ray's alone, and as nodes do, beside appends here.

What 32 rollouts of 20 turns log, appended here, and sent by a process of Ray's into a log here by both ways, in turns;
the ratios to the first of entries per second of processor time (of both processes, and of this one) and of wall time.
`python bench/on_ray.py --pairs 0 --losses 0` runs it.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

from cluster import JOB, short_rollout
from rollcage.agents.nop import Nop
from rollcage.cluster.flow import Flow
from rollcage.cluster.messages import Load, NodeNews, OutboxItem, Welcome
from rollcage.cluster.outbox import EventSender, Outbox
from rollcage.cluster.ray_nodes import RayLink
from rollcage.cluster.stream import PROOF, NewsStream, answer_news
from rollcage.events import Event, Queued
from rollcage.rollout.run import RolloutDeps
from rollcage.runner.executor import Execution
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.store import Store

Exchange = Callable[[int, int], Awaitable[NodeNews]]


class Sender:
    """A node that has an outbox, and nothing else."""

    def __init__(self) -> None:
        self._outbox, self._number = Outbox(), 0
        self._logged: dict[str, list[Event]] = {}
        self._secret = secrets.token_bytes(32)

    async def open(self) -> Welcome:
        """It is there; where its news are, too."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(PROOF)
            await answer_news(reader, writer, self._secret, self.exchange)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return Welcome("", server.sockets[0].getsockname()[1], self._secret, True, frozenset(), True)

    async def exchange(self, heard: int, acknowledged: int, most_s: float = 10) -> NodeNews:
        self._outbox.acknowledge(acknowledged)
        self._number += 1
        return NodeNews(self._number, await self._outbox.news(most_s), Load(), [])

    async def prepare(self, names: Sequence[str], turns: int) -> None:
        """Make what rollouts of these names log."""
        self._logged = logged(names, turns)

    async def send(self) -> float:
        """Log it all; the processor time that it took."""
        began = time.process_time()

        async def one(name: str) -> None:
            sender = EventSender(self._outbox, name, 1)
            for event in self._logged[name]:
                await sender.send(event)

        await asyncio.gather(*map(one, self._logged))
        return time.process_time() - began


def logged(names: Sequence[str], turns: int) -> dict[str, list[Event]]:
    """What each says: they have system prompt and tools in common."""
    return {name: short_rollout(turns, sample) for sample, name in enumerate(names, 1)}


@asynccontextmanager
async def sender(kind: str) -> AsyncIterator[tuple[Any, Exchange]]:
    """An actor that sends, and how it is asked for news."""
    import ray

    actor = ray.remote(Sender).options(num_cpus=0, max_concurrency=8).remote()
    try:
        link, welcome = RayLink(actor, 600), await actor.open.remote()
        with closing(NewsStream("127.0.0.1", welcome, link, 600)) as stream:
            yield actor, (stream.exchange if kind == "stream" else link.exchange)
    finally:
        ray.kill(actor)


async def sent(
    store: Store, names: Sequence[str], turns: int, actor: Any, exchange: Exchange
) -> tuple[float, float, float, int]:
    """Processor time here and there, and wall time, from the first entry that another process sends to the last; and in
    how many answers they came."""
    await actor.prepare.remote(names, turns)
    flows, answers = {}, 0
    for name in names:
        await store.append(name, Queued(job=JOB))
        deps = RolloutDeps(InProcessProvider(), Nop(), None)  # type: ignore[arg-type]
        flows[name] = Flow(Execution(name, JOB, deps, partial(store.append, name), ""), 1)

    async def follow() -> None:
        nonlocal answers
        heard = acknowledged = 0
        while True:
            news = await exchange(heard, acknowledged)
            answers += 1
            by_name: dict[str, list[OutboxItem]] = {}
            for item in news.items:
                by_name.setdefault(item.name, []).append(item)
            await asyncio.gather(*(flows[name].commit(some) for name, some in by_name.items()))
            heard, acknowledged = news.number, news.items[-1].number if news.items else acknowledged

    cpu, wall = time.process_time(), time.perf_counter()
    follower = asyncio.create_task(follow())
    there = await actor.send.remote()
    found = time.process_time() - cpu, there, time.perf_counter() - wall, answers
    follower.cancel()
    return found


async def entries(folder: Path, number: int, turns: int = 20, rollouts: int = 32) -> dict[str, float]:
    """The log here beside the log of what a node sends."""
    names = [f"r{rollout}" for rollout in range(rollouts)]
    said: dict[str, list[Event]] = {}

    async def appended(store: Store, name: str) -> None:
        await store.append(name, Queued(job=JOB))
        for event in said[name]:
            await store.append(name, event)

    found: dict[str, list[float]] = {}
    for turn in range(number):
        said |= logged(names, turns)  # made anew: an event is packed faster the second time
        async with Store.open(folder / f"appended{turn}.db") as store:
            cpu, wall = time.process_time(), time.perf_counter()
            await asyncio.gather(*(appended(store, name) for name in names))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        for kind in ("ray", "stream"):
            async with Store.open(folder / f"{kind}{turn}.db") as store, sender(kind) as (actor, exchange):
                here, there, whole, answers = await sent(store, names, turns, actor, exchange)
            row = {
                "per_cpu_second_ratio": cpu / (here + there),
                "per_cpu_second_of_the_head_ratio": cpu / here,
                "per_wall_second_ratio": wall / whole,
                "answers": answers,
            }
            for name, value in row.items():
                found.setdefault(f"{kind}_{name}", []).append(value)
    number_of = sum(len(events) + 1 for events in said.values())
    return {"entries": number_of, **{name: statistics.median(values) for name, values in found.items()}}
