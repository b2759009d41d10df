"""One node of a cluster: its boxes, its gateway, the rollouts that run there. It knows nothing of Ray.

What rollouts log goes to the head; what counts is waited for until it is on the head's disk. A node that the head has
not heard for the lease's time, or whose head's process ended, stops everything it runs and ends.
"""

from __future__ import annotations

import asyncio
import hmac
import math
import os
import secrets
import time
from collections.abc import AsyncIterable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version

import anyio
import zstandard
from pydantic import SecretStr

from rollcage.cluster.content import ContentStore
from rollcage.cluster.messages import GateState, Hello, Load, NodeNews, Order, Welcome
from rollcage.cluster.outbox import EventSender, Outbox
from rollcage.cluster.stream import PROOF, answer_news, proof
from rollcage.errors import RollcageError, StoreError
from rollcage.events import Ended, Event
from rollcage.gateway.live import Delta
from rollcage.gateway.pause import Running
from rollcage.rollout.run import run
from rollcage.runner import Registry
from rollcage.settings import Settings
from rollcage.store.redact import hidden
from rollcage.store.work import WorkStore, WorkTooLarge
from rollcage.types import Job, Outcome
from rollcage.wiring import MOST_TREE_BYTES, opened_registry, provider

MOST_DELTAS = 1000
"""What models say and nobody has fetched; more is dropped: it is for looking at."""

OpenRegistry = Callable[[Settings, Hello], AbstractAsyncContextManager[Registry]]


def registry_of(settings: Settings, hello: Hello) -> AbstractAsyncContextManager[Registry]:
    """What rollouts are run with on this machine."""
    return opened_registry(settings, warm=hello.warm)


class NodeHost:
    """Runs what the head orders. Used on one event loop only."""

    def __init__(
        self, address: str = "127.0.0.1", open_registry: OpenRegistry = registry_of, *, streams: bool = True
    ) -> None:
        """`address`: where the head reaches this node. `streams`: whether news may go there beside Ray."""
        self._address, self._open_registry, self._streams = address, open_registry, streams
        self._outbox = Outbox()
        self._running: dict[str, tuple[int, anyio.CancelScope]] = {}
        self._deltas: list[tuple[str, Delta | None]] = []
        self._watching: set[asyncio.Task[None]] = set()
        self._asking: set[asyncio.StreamWriter] = set()
        """Connections on which the head asks for news."""
        self._serving: asyncio.Task[None] | None = None
        self._over, self._idle = asyncio.Event(), asyncio.Event()
        self._told: dict[int, float] = {}
        """When news were told, by number, since the last that the head says it has heard."""
        self._number, self._heard = 0, time.monotonic()
        self._secret = secrets.token_bytes(32)
        self._why = ""

    async def open(self, hello: Hello) -> Welcome:
        """Begin to serve; returns when rollouts can be run."""
        ready: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(hello, ready))
        return await ready

    async def ended(self) -> str:
        """Wait until everything here has ended; why it did."""
        if self._serving is not None:
            await asyncio.wait([self._serving])
        return self._why

    def stop(self, why: str) -> None:
        """Stop what runs, tell the head nothing more, and end."""
        self._why = self._why or why
        self._outbox.close(self._why)
        for _, scope in self._running.values():
            scope.cancel()
        self._over.set()

    async def exchange(self, heard: int, acknowledged: int, most_s: float = math.inf) -> NodeNews:
        """The head has heard the news of this number, and has all items up to that one; what else there is.

        Waits for news, a part of the lease or `most_s`.
        The lease counts from when heard news were told. A question alone proves nothing: it may have been under way for
        long, and its answer may get lost.
        """
        self._heard = max(self._heard, self._told.get(heard, 0.0))
        self._told = {number: at for number, at in self._told.items() if number > heard}
        self._outbox.acknowledge(acknowledged)
        items = await self._outbox.news(min(self._wait_s, most_s), lambda: bool(self._deltas))
        deltas, self._deltas = self._deltas, []
        gate = self._registry.gateway.gate
        self._number += 1
        self._told[self._number] = time.monotonic()
        load = Load(len(self._running), gate.running, gate.waiting, os.getloadavg()[0])
        return NodeNews(self._number, items, load, deltas)

    async def run(self, order: Order, key: str) -> None:
        """Run a rollout to its end: when this returns the head has its last entry, or never will."""
        endpoint = order.job.model.model_copy(update={"key": SecretStr(key)})
        job = order.job.model_copy(update={"model": endpoint})

        sender = EventSender(self._outbox, order.name, order.attempt)

        with anyio.CancelScope() as scope:
            self._running[order.name] = (order.attempt, scope)
            self._idle.clear()
            try:
                with suppress(StoreError):  # the head is gone, and knows more than this node
                    await self._run(order, job, sender)
            finally:
                del self._running[order.name]
                if not self._running:
                    self._idle.set()

    async def _run(self, order: Order, job: Job, sender: EventSender) -> None:
        try:
            deps = self._registry.deps(job)
        except RollcageError as error:
            said = f"{Outcome.SANDBOX_FAILED.value}: this node cannot do it: {error}"
            await sender.send(Ended(outcome=Outcome.SANDBOX_FAILED, error=said, error_code="machine_not_ready"))
            return
        kept = (job.model.key.get_secret_value(), *(deps.environments.secrets if deps.environments else ()))

        async def log(event: Event) -> None:
            for secret in kept:
                event = hidden(event, secret)
            await sender.send(event)

        work = deps.work if self._shared or deps.work is None else _WorkAtHead(order, self._outbox, deps.work.limit)
        await run(job, replace(deps, work=work, generation=order.generation), log, name=order.name)

    def abort(self, name: str, attempt: int) -> None:
        """Stop a rollout; it tells the head how it ended."""
        number, scope = self._running.get(name, (0, None))
        if scope is not None and number == attempt:
            scope.cancel()

    async def gate(self, state: GateState) -> None:
        """Pause or resume model calls as the head says."""
        gateway = self._registry.gateway
        gateway.replicas.addresses, gateway.replicas.named = state.replicas, state.named
        if state.paused:
            running: Running = "cut" if state.running == "cut" else "finish"
            await gateway.gate.pause(running, wait_s=state.wait_s)
            return
        # A node that joins late has missed earlier weights: its count is the head's.
        gateway.resume(state.policy_version if state.generation != gateway.gate.generation else "")
        gateway.gate.policy_version, gateway.gate.generation = state.policy_version, state.generation

    def watch(self, token: str, name: str) -> None:
        """Tell what models say to this rollout, until its agent is done."""

        async def tell() -> None:
            async with aclosing(self._registry.gateway.watch(name)) as deltas:  # type: ignore[type-var]
                async for delta in deltas:
                    if len(self._deltas) < MOST_DELTAS:
                        self._deltas.append((token, delta))
                        self._outbox.wake()
            self._deltas.append((token, None))
            self._outbox.wake()

        task = asyncio.create_task(tell())
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    def missing(self, names: frozenset[str]) -> frozenset[str]:
        """Which of these layers, images and trees are not here."""
        return self._content.missing(names)

    async def receive(self, name: str, pieces: list[bytes]) -> None:
        """Have one of them."""
        await self._content.receive(name, pieces)

    async def _serve(self, hello: Hello, ready: asyncio.Future[Welcome]) -> None:
        try:
            settings = settings_on_node(hello)
            self._wait_s = hello.lease_s / 4
            self._shared = (settings.home / hello.marker).exists()
            trees, work = WorkStore(settings.trees_dir, MOST_TREE_BYTES), WorkStore(settings.work_dir, MOST_TREE_BYTES)
            self._content = ContentStore(provider(settings).images, trees, work)
            server = await asyncio.start_server(self._connected, self._address, 0)
            async with self._open_registry(settings, hello) as self._registry:
                port, self._heard = server.sockets[0].getsockname()[1], time.monotonic()
                welcome = Welcome(
                    version("rollcage"), port, self._secret, self._shared, self._content.held, self._streams
                )
                ready.set_result(welcome)
                await self._keep_lease(hello.lease_s)
                if self._running:
                    await self._idle.wait()
                for task in self._watching:
                    task.cancel()
            server.close()
            for writer in self._asking:
                writer.close()
        except Exception as error:  # noqa: BLE001 - the head is told
            self._why = self._why or str(error)
            if not ready.done():
                # In words: not every error of ours can be pickled.
                ready.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    async def _keep_lease(self, lease_s: float) -> None:
        """Return when this node is to end: it was told so, or the head may take it for lost."""
        while (left := self._heard + lease_s - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._over.wait()
                    return
        self.stop(f"the head has not heard it for {lease_s:g} s")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A connection of the head's: its lifeline, or one for news."""
        try:
            async with asyncio.timeout(10):
                shown = await reader.readexactly(PROOF)
            if hmac.compare_digest(shown, proof(self._secret, "lifeline")):
                await reader.read(1)  # it breaks at once when the head's process ends
                self.stop("the head ended, or gave it up")
                await self.ended()  # a head that is there begins elsewhere what ran here as soon as this breaks
            elif self._streams and hmac.compare_digest(shown, proof(self._secret, "news")):
                self._asking.add(writer)
                await answer_news(reader, writer, self._secret, self.exchange)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass
        finally:
            self._asking.discard(writer)
            writer.close()


class _WorkAtHead:
    """Sends the agent's work to the head, which keeps it beside its log."""

    def __init__(self, order: Order, outbox: Outbox, limit: int) -> None:
        self._order, self._outbox, self.limit = order, outbox, limit

    async def put(self, chunks: AsyncIterable[bytes]) -> tuple[str, int]:
        """Send it; its name and its size, once the head has it."""
        digest, size, compressor = blake2b(digest_size=16), 0, zstandard.ZstdCompressor(level=1)
        kind = "drop"
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > self.limit:
                    raise WorkTooLarge(f"it is larger than {self.limit >> 20} MB")
                digest.update(chunk)
                await self._outbox.put(self._order.name, self._order.attempt, compressor.compress(chunk), "piece")
            kind = "work"
        finally:
            with anyio.CancelScope(shield=True):
                number = await self._outbox.put(self._order.name, self._order.attempt, b"", kind)
        await self._outbox.delivered(number)
        return digest.hexdigest(), size


def settings_on_node(hello: Hello) -> Settings:
    """The head's settings, with what only this machine can know."""
    own = Settings.from_environ(home=hello.home or None)
    update = {"home": own.home, "engines": own.engines, "proxies": own.proxies, "replicas": ()}
    if own.npm_registry:
        update["npm_registry"] = own.npm_registry
    return hello.settings.model_copy(update=update)
