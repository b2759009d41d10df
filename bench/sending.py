"""How fast what a node logs reaches the head's log: through Ray, and through a plain socket, beside appends here.

What 32 rollouts of 20 turns log, appended here, sent by a process of Ray's into a log here, and sent by another process
through a socket, in turns; the ratios to the first of entries per second of processor time (of both processes, and of
this one) and of wall time. `python bench/on_ray.py --pairs 0 --losses 0` runs it.
"""

from __future__ import annotations

import asyncio
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from cluster import JOB, short_rollout
from rollcage.agents.nop import Nop
from rollcage.cluster.flow import Flow
from rollcage.cluster.messages import Load, NodeNews, OutboxItem
from rollcage.cluster.outbox import EventSender, Outbox
from rollcage.cluster.ray_nodes import RayLink
from rollcage.events import Event, Queued
from rollcage.rollout.run import RolloutDeps
from rollcage.runner.executor import Execution
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.store import Store


class Sender:
    """A node that has an outbox, and nothing else."""

    def __init__(self) -> None:
        self._outbox, self._number = Outbox(), 0
        self._logged: dict[str, list[Event]] = {}

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        self._outbox.acknowledge(acknowledged)
        self._number += 1
        return NodeNews(self._number, await self._outbox.news(10), Load(), [])

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


@dataclass(frozen=True)
class Way:
    """How a sender in another process is reached."""

    prepare: Callable[[Sequence[str], int], Awaitable[None]]
    exchange: Callable[[int, int], Awaitable[NodeNews]]
    send: Callable[[], Awaitable[float]]


@asynccontextmanager
async def through_ray() -> AsyncIterator[Way]:
    """As nodes are: calls of an actor."""
    import ray

    actor = ray.remote(Sender).options(num_cpus=0, max_concurrency=8).remote()
    try:
        yield Way(actor.prepare.remote, RayLink(actor, 600).exchange, actor.send.remote)
    finally:
        ray.kill(actor)


@asynccontextmanager
async def through_stream() -> AsyncIterator[Way]:
    """What a stream of our own would be at best: pickled frames on a socket, without a word about failures."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import sending; sending.serve()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            port = int(await anyio.to_thread.run_sync(process.stdout.readline))
            ways = [await asyncio.open_connection("127.0.0.1", port, limit=1 << 24) for _ in range(2)]

            async def call(way: int, name: str, *values: object) -> Any:
                reader, writer = ways[way]
                writer.write(framed((name, values)))
                return await read_frame(reader)

            yield Way(partial(call, 0, "prepare"), partial(call, 1, "exchange"), partial(call, 0, "send"))
            for _, writer in ways:
                writer.close()
        finally:
            process.kill()


def serve() -> None:
    """The far end of `through_stream`; says its port."""

    async def begin() -> None:
        sender = Sender()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError):
                while True:
                    name, values = await read_frame(reader)
                    writer.write(framed(await getattr(sender, name)(*values)))

        server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 24)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    anyio.run(begin)


def framed(value: object) -> bytes:
    data = pickle.dumps(value, 5)
    return len(data).to_bytes(4, "big") + data


async def read_frame(reader: asyncio.StreamReader) -> Any:
    return pickle.loads(await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big")))


async def sent(store: Store, names: Sequence[str], turns: int, way: Way) -> tuple[float, float, float, int]:
    """Processor time here and there, and wall time, from the first entry that another process sends to the last; and in
    how many answers they came."""
    await way.prepare(names, turns)
    flows, answers = {}, 0
    for name in names:
        await store.append(name, Queued(job=JOB))
        deps = RolloutDeps(InProcessProvider(), Nop(), None)  # type: ignore[arg-type]
        flows[name] = Flow(Execution(name, JOB, deps, partial(store.append, name), ""), 1)

    async def follow() -> None:
        nonlocal answers
        heard = acknowledged = 0
        while True:
            news = await way.exchange(heard, acknowledged)
            answers += 1
            by_name: dict[str, list[OutboxItem]] = {}
            for item in news.items:
                by_name.setdefault(item.name, []).append(item)
            await asyncio.gather(*(flows[name].commit(some) for name, some in by_name.items()))
            heard, acknowledged = news.number, news.items[-1].number if news.items else acknowledged

    cpu, wall = time.process_time(), time.perf_counter()
    follower = asyncio.create_task(follow())
    there = await way.send()
    found = time.process_time() - cpu, there, time.perf_counter() - wall, answers
    follower.cancel()
    return found


async def entries(folder: Path, number: int, turns: int = 20, rollouts: int = 32) -> dict[str, float]:
    """The log here beside the log through Ray, and beside one through a stream of our own."""
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
        for kind, through in (("ray", through_ray), ("stream", through_stream)):
            async with Store.open(folder / f"{kind}{turn}.db") as store, through() as way:
                here, there, whole, answers = await sent(store, names, turns, way)
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
