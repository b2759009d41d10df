"""News on a connection of their own: fast where it can be had, and never the only way."""

from __future__ import annotations

import asyncio
import pickle
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import anyio
import pytest

from rollcage.cluster import stream
from rollcage.cluster.messages import Load, NodeNews, Welcome
from rollcage.cluster.stream import NewsStream, answer_news, proof
from rollcage.runner import Registry
from rollcage.store import Store
from rollcage.types import NO_MODEL, AgentSpec, Job, Outcome, Task
from support.cluster import Machines, opened_cluster

pytestmark = pytest.mark.anyio

SECRET = secrets.token_bytes(32)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Ray:
    """A link that only counts."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    async def exchange(self, heard: int, acknowledged: int) -> NodeNews:
        self.asked.append((heard, acknowledged))
        return NodeNews(heard + 1, [], Load(), [])


class NodeEnd:
    """A node that serves news, and counts them."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.go = anyio.Event()
        self.go.set()

    async def exchange(self, heard: int, acknowledged: int, most_s: float) -> NodeNews:
        self.asked.append((heard, acknowledged))
        await self.go.wait()
        return NodeNews(heard + 1, [], Load(running=7), [])

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            assert await reader.readexactly(stream.PROOF) == proof(SECRET, "news")
            await answer_news(reader, writer, SECRET, self.exchange)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def asking(serve: Serve, ray: Ray, lease_s: float = 600) -> AsyncIterator[NewsStream]:
    """The head's end, of a node that serves so."""
    served = 0

    async def counted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        served += 1
        try:
            await serve(reader, writer)
        finally:
            served -= 1

    server = await asyncio.start_server(counted, "127.0.0.1", 0)
    welcome = Welcome("1", server.sockets[0].getsockname()[1], SECRET, True, frozenset(), True)
    try:
        with closing(NewsStream("127.0.0.1", welcome, ray, lease_s)) as asked:  # type: ignore[arg-type]
            yield asked
    finally:
        server.close()
        with anyio.fail_after(60):
            while served:
                await anyio.sleep(0.001)


async def test_what_follows_an_answer_of_rays_comes_on_the_connection_until_ray_is_due() -> None:
    ray, node = Ray(), NodeEnd()
    async with asking(node.serve, ray) as asked:
        assert (await asked.exchange(0, 0)).load == Load()
        for number in range(1, 4):
            assert (await asked.exchange(number, number * 10)).load == Load(running=7)
        assert (ray.asked, node.asked) == ([(0, 0)], [(1, 10), (2, 20), (3, 30)])
        assert len(node.writers) == 1
        asked._ray_answered = float("-inf")
        await asked.exchange(4, 40)
        assert ray.asked == [(0, 0), (4, 40)]


async def test_ray_is_asked_where_the_connection_breaks_and_it_is_not_tried_again_at_once() -> None:
    ray, node = Ray(), NodeEnd()
    async with asking(node.serve, ray) as asked:
        await asked.exchange(0, 0)
        await asked.exchange(1, 0)
        node.writers[0].close()
        for number in (2, 3):
            assert (await asked.exchange(number, 0)).number == number + 1
        assert (ray.asked, node.asked) == ([(0, 0), (2, 0), (3, 0)], [(1, 0)])
        asked._not_before = float("-inf")
        await asked.exchange(4, 0)
        assert node.asked == [(1, 0), (4, 0)] and len(node.writers) == 2


async def test_ray_is_asked_where_nothing_comes() -> None:
    ray, node = Ray(), NodeEnd()
    node.go = anyio.Event()
    async with asking(node.serve, ray, lease_s=0.8) as asked:
        await asked.exchange(0, 0)
        assert (await asked.exchange(1, 0)).load == Load()
        node.go.set()
    assert (ray.asked, node.asked) == ([(0, 0), (1, 0)], [(1, 0)])


async def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next_one() -> None:
    ray, node = Ray(), NodeEnd()
    async with asking(node.serve, ray) as asked:
        await asked.exchange(0, 0)
        node.go = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked.exchange, 1, 0)
            while not node.asked:
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        node.go.set()
        asked._ray_answered = time.monotonic()
        assert (await asked.exchange(5, 0)).number == 6
        assert node.asked == [(1, 0), (5, 0)] and len(node.writers) == 2


@pytest.mark.parametrize("shown", [b"", b"x" * 32, proof(b"another", "node")], ids=["nothing", "made up", "another's"])
async def test_nothing_is_read_from_whoever_is_not_the_node(tmp_path: Path, shown: bytes) -> None:
    """A port that a node left may be anybody's; what is unpickled may run anything."""
    bomb = pickle.dumps(_Bomb(tmp_path / "harmed"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(shown + len(bomb).to_bytes(4, "big") + bomb)
        writer.write_eof()
        await reader.read()
        writer.close()

    ray = Ray()
    async with asking(serve, ray) as asked:
        await asked.exchange(0, 0)
        await asked.exchange(1, 0)
    assert ray.asked == [(0, 0), (1, 0)] and not (tmp_path / "harmed").exists()


class _Bomb:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("streams", [True, False])
async def test_rollouts_of_a_node_reach_the_log_by_its_connection(
    store: Store, backends: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    seen: list[int] = []

    async def counted(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, exchange: object
    ) -> None:
        seen.append(1)
        await answer_news(reader, writer, secret, exchange)  # type: ignore[arg-type]

    monkeypatch.setattr("rollcage.cluster.node.answer_news", counted)
    machines = Machines(backends, backends.providers["local"], tmp_path)
    machine = machines.add("one")
    machine.lifeline, machine.streams = True, streams
    task = Task(instruction="echo hello > said", verify=("grep -x hello said",))
    job = Job(task=task, model=NO_MODEL, agent=AgentSpec(name="shell"))
    async with opened_cluster(store, backends, machines, tmp_path) as (runner, _):
        for _ in range(20 if streams else 2):
            rollout = await runner.wait(await runner.start(job))
            assert (rollout.outcome, rollout.reward) == (Outcome.FINISHED, 1.0)
            if seen:
                break
    assert bool(seen) is streams


async def test_a_node_answers_nobody_who_does_not_know_its_secret(
    store: Store, backends: Registry, tmp_path: Path
) -> None:
    machines = Machines(backends, backends.providers["local"], tmp_path)
    machine = machines.add("one")
    machine.lifeline = True
    async with opened_cluster(store, backends, machines, tmp_path) as (_, head):
        while not head.nodes or head.nodes["one"].state != "ready":
            await anyio.sleep(0.01)
        assert machine.port
        reader, writer = await asyncio.open_connection("127.0.0.1", machine.port)
        writer.write(proof(secrets.token_bytes(32), "news") + bytes(16))
        with anyio.fail_after(60):
            assert await reader.read() == b""
        writer.close()
        assert head.nodes["one"].state == "ready"
