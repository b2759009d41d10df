"""Boxes that are open before anybody asks: a provider that keeps some of each kind, and replaces what is taken."""

from __future__ import annotations

import socket
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Protocol

import anyio
from anyio.abc import TaskGroup, TaskStatus

from rollcage.errors import FileMissing, SandboxError, UsageError
from rollcage.layers import Layer
from rollcage.sandboxes.base import Process, Provider, Sandbox
from rollcage.types import HOME, SandboxSpec

KINDS = 4
"""How many kinds of boxes are kept; the one that was not asked for the longest gives way."""
YOUNG_S = 10
"""How long a warm box must have lived to be replaced at once."""
PROBE_S = 5
"""How long a box may take to show that it lives."""
_PROBE = f"{HOME}/.rollcage/no-such-file"


class Warmth(Protocol):
    """What a warmer started in a box."""

    async def kept(self) -> None:
        """Wait until it is used up, or dead."""


class Warmer(Protocol):
    """An agent that can start in a box what every task needs of it, before the task is known."""

    def layers(self) -> Sequence[Layer]:
        """What its boxes start with; other boxes are not warmed."""

    async def warm(self, box: Sandbox, *, task_status: TaskStatus[Warmth]) -> None:
        """Start it, tell when it is ready, and keep it until it is used up, or dead."""


class WarmBox:
    """A box in which something runs already. So it cannot be rewound: verification takes a fresh one."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box

    @property
    def id(self) -> str:
        """A name that is unique on this machine."""
        return self._box.id

    @property
    def notes(self) -> tuple[str, ...]:
        """Asked-for limits that cannot be enforced here, in words."""
        return self._box.notes

    def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str = HOME
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command."""
        return self._box.spawn(argv, env=env, cwd=cwd)

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file."""
        return await self._box.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""
        await self._box.write(path, data, mode=mode)

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket that is 127.0.0.1:port in the box."""
        return self._box.listen(port)


class _Held:
    """One open box, and the task that holds it open."""

    def __init__(self, box: Sandbox) -> None:
        self.box, self.since = box, time.monotonic()
        self.released, self.closed = anyio.Event(), anyio.Event()


class _Shelf:
    """The boxes of one kind that nobody has taken yet."""

    def __init__(self, spec: SandboxSpec, layers: Sequence[Layer]) -> None:
        self.spec, self.layers = spec, layers
        self.held: deque[_Held] = deque()
        self.filling = self.dropped = False

    def remove(self, held: _Held) -> bool:
        """Take that one off; whether it was there."""
        if held in self.held:
            self.held.remove(held)
            return True
        return False


_Kind = tuple[SandboxSpec, tuple[tuple[str, str], ...]]


class Pool:
    """A provider in front of another one. A kind of box is kept from the first time it is asked for, or prepared."""

    def __init__(
        self, provider: Provider, tasks: TaskGroup, *, size: int, warmer: Warmer | None, pause_s: float
    ) -> None:
        """Made by `Pool.over`."""
        self._provider, self._tasks, self._size, self._warmer = provider, tasks, size, warmer
        self._pause_s = pause_s
        self._shelves: OrderedDict[_Kind, _Shelf] = OrderedDict()
        # One at a time: what is kept for later must not slow down what runs now more than it has to.
        self._opening = anyio.Lock()

    @classmethod
    @asynccontextmanager
    async def over(
        cls, provider: Provider, *, size: int, warmer: Warmer | None = None, pause_s: float = 3
    ) -> AsyncIterator[Pool]:
        """A pool of `size` boxes of each kind, for as long as the block lasts; then all of them are closed.

        `warmer`: the agent whose boxes are kept with its server already started. `pause_s`: how long whoever took a box
        has the machine to itself before the next one is opened.
        """
        if size < 1:
            raise UsageError(f"size {size}: a pool keeps at least one box")
        async with anyio.create_task_group() as tasks:
            yield cls(provider, tasks, size=size, warmer=warmer, pause_s=pause_s)
            tasks.cancel_scope.cancel()

    @property
    def name(self) -> str:
        """The name of the provider behind it."""
        return self._provider.name

    @property
    def ready(self) -> int:
        """How many boxes are open and waiting."""
        return sum(len(shelf.held) for shelf in self._shelves.values())

    def check(self, spec: SandboxSpec) -> None:
        """What the provider behind it says."""
        self._provider.check(spec)

    def prepare(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> None:
        """Keep boxes of this kind from now on, without waiting for the first that asks."""
        self._fill_later(self._shelf(spec, layers))

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Sandbox]:
        """One that is open already, or else a new one. Closed at the end of the block; no box is given out twice."""
        shelf = self._shelf(spec, layers)
        held = await self._take(shelf)
        self._fill_later(shelf, self._pause_s)
        if held is None:
            async with self._provider.open(spec, layers) as box:
                yield box
            return
        try:
            yield held.box
        finally:
            held.released.set()
            with anyio.CancelScope(shield=True):
                await held.closed.wait()

    def _shelf(self, spec: SandboxSpec, layers: Sequence[Layer]) -> _Shelf:
        kind = (spec, _names(layers))
        shelf = self._shelves.setdefault(kind, _Shelf(spec, tuple(layers)))
        self._shelves.move_to_end(kind)
        while len(self._shelves) > KINDS:
            _, oldest = self._shelves.popitem(last=False)
            oldest.dropped = True
            for held in oldest.held:
                held.released.set()
        return shelf

    async def _take(self, shelf: _Shelf) -> _Held | None:
        while shelf.held:
            held = shelf.held.popleft()
            try:
                lives = await _lives(held.box)
            except BaseException:
                held.released.set()
                raise
            if lives and not held.closed.is_set():
                return held
            held.released.set()
        return None

    def _fill_later(self, shelf: _Shelf, pause_s: float = 0) -> None:
        if not shelf.filling and not shelf.dropped:
            shelf.filling = True
            self._tasks.start_soon(self._fill, shelf, pause_s)

    async def _fill(self, shelf: _Shelf, pause_s: float) -> None:
        try:
            await anyio.sleep(pause_s)
            while len(shelf.held) < self._size and not shelf.dropped:
                async with self._opening:
                    opened = await self._tasks.start(self._hold, shelf)
                if not opened:
                    # Whoever asks next opens one, and is told why it cannot be done.
                    return
        finally:
            shelf.filling = False

    async def _hold(self, shelf: _Shelf, *, task_status: TaskStatus[bool]) -> None:
        """Keep one box open until it is released; it is on the shelf until somebody takes it."""
        held: _Held | None = None
        started = False
        # What breaks here breaks for whoever uses the box, too, and is told there.
        with suppress(Exception):
            try:
                async with self._provider.open(shelf.spec, shelf.layers) as box, anyio.create_task_group() as tasks:
                    held = await self._warmed(box, shelf, tasks)
                    shelf.held.append(held)
                    started = True
                    task_status.started(True)
                    await held.released.wait()
                    tasks.cancel_scope.cancel()
            finally:
                if held is not None:
                    shelf.remove(held)
                    held.closed.set()
        if not started:
            task_status.started(False)

    async def _warmed(self, box: Sandbox, shelf: _Shelf, tasks: TaskGroup) -> _Held:
        if self._warmer is None or _names(shelf.layers) != _names(self._warmer.layers()):
            return _Held(box)
        warmth: Warmth = await tasks.start(self._warmer.warm, box)
        held = _Held(WarmBox(box))
        tasks.start_soon(self._watch, warmth, held, shelf)
        return held

    async def _watch(self, warmth: Warmth, held: _Held, shelf: _Shelf) -> None:
        """A box whose warmth is gone while it waits is not worth keeping."""
        await warmth.kept()
        if shelf.remove(held):
            held.released.set()
            # One that dies young would die young again; the next one who asks may have it tried.
            if time.monotonic() - held.since > YOUNG_S:
                self._fill_later(shelf)


async def _lives(box: Sandbox) -> bool:
    try:
        with anyio.move_on_after(PROBE_S):
            await box.read(_PROBE, limit=1)
            return True
    except FileMissing:
        return True
    except SandboxError:
        return False
    return False


def _names(layers: Sequence[Layer]) -> tuple[tuple[str, str], ...]:
    return tuple((layer.name, layer.key) for layer in layers)
