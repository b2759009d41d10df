"""Boxes that are open before anybody asks: a provider that keeps some of each kind, and replaces what is taken."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

import anyio
from anyio.abc import TaskGroup, TaskStatus

from rollcage.errors import FileMissing, SandboxError, UsageError
from rollcage.sandboxes.base import Provider, Sandbox
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.plain import PlainBox
from rollcage.types import HOME, SandboxSpec

KINDS = 4
"""How many kinds of boxes are kept; the one that was not asked for the longest gives way."""
YOUNG_S = 10
"""How long a warm box must have lived to be replaced at once."""
PROBE_S = 5
"""How long a box may take to show that it lives."""
_PROBE = f"{HOME}/.rollcage/no-such-file"


class WarmServer(Protocol):
    """What a warmer started in a box."""

    async def used_up(self) -> None:
        """Wait until it is used up, or dead."""


class Warmer(Protocol):
    """An agent that can start in a box what every task needs of it, before the task is known."""

    def layers(self) -> Sequence[Layer]:
        """What its boxes start with; other boxes are not warmed."""

    async def warm(self, box: Sandbox, *, task_status: TaskStatus[WarmServer]) -> None:
        """Start it, tell when it is ready, and keep it until it is used up, or dead."""


class WarmBox(PlainBox):
    """A box in which something runs already. So it cannot be rewound: verification takes a fresh one."""


class _OpenBox:
    """One open box, and the task that holds it open."""

    def __init__(self, box: Sandbox) -> None:
        self.box, self.since = box, time.monotonic()
        self.released, self.closed = anyio.Event(), anyio.Event()


class _Waiting:
    """The boxes of one kind that nobody has taken yet."""

    def __init__(self, spec: SandboxSpec, layers: Sequence[Layer]) -> None:
        self.spec, self.layers = spec, layers
        self.held: deque[_OpenBox] = deque()
        self.filling = self.dropped = False

    def remove(self, held: _OpenBox) -> bool:
        """Take that one off; whether it was there."""
        if held in self.held:
            self.held.remove(held)
            return True
        return False


_Kind = tuple[str, tuple[tuple[str, str], ...]]


class Pool:
    """A provider in front of another one. A kind of box is kept from the first time it is asked for, or prepared."""

    def __init__(
        self, provider: Provider, tasks: TaskGroup, *, size: int, warmer: Warmer | None, pause_s: float
    ) -> None:
        """Made by `Pool.over`."""
        self._provider, self._tasks, self._size, self._warmer = provider, tasks, size, warmer
        self._pause_s = pause_s
        self._kinds: OrderedDict[_Kind, _Waiting] = OrderedDict()
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
        return sum(len(waiting.held) for waiting in self._kinds.values())

    def check(self, spec: SandboxSpec) -> None:
        """What the provider behind it says."""
        self._provider.check(spec)

    def prepare(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> None:
        """Keep boxes of this kind from now on, without waiting for the first that asks."""
        self._fill_later(self._waiting_of(spec, layers))

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, layers: Sequence[Layer] = ()) -> AsyncIterator[Sandbox]:
        """One that is open already, or else a new one. Closed at the end of the block; no box is given out twice."""
        waiting = self._waiting_of(spec, layers)
        held = await self._take(waiting)
        self._fill_later(waiting, self._pause_s)
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

    def _waiting_of(self, spec: SandboxSpec, layers: Sequence[Layer]) -> _Waiting:
        kind = (spec.model_dump_json(), _names(layers))
        waiting = self._kinds.setdefault(kind, _Waiting(spec, tuple(layers)))
        self._kinds.move_to_end(kind)
        while len(self._kinds) > KINDS:
            _, oldest = self._kinds.popitem(last=False)
            oldest.dropped = True
            for held in oldest.held:
                held.released.set()
        return waiting

    async def _take(self, waiting: _Waiting) -> _OpenBox | None:
        while waiting.held:
            held = waiting.held.popleft()
            try:
                lives = await _lives(held.box)
            except BaseException:
                held.released.set()
                raise
            if lives and not held.closed.is_set():
                return held
            held.released.set()
        return None

    def _fill_later(self, waiting: _Waiting, pause_s: float = 0) -> None:
        if not waiting.filling and not waiting.dropped:
            waiting.filling = True
            self._tasks.start_soon(self._fill, waiting, pause_s)

    async def _fill(self, waiting: _Waiting, pause_s: float) -> None:
        try:
            await anyio.sleep(pause_s)
            while len(waiting.held) < self._size and not waiting.dropped:
                async with self._opening:
                    opened = await self._tasks.start(self._hold, waiting)
                if not opened:
                    # Whoever asks next opens one, and is told why it cannot be done.
                    return
        finally:
            waiting.filling = False

    async def _hold(self, waiting: _Waiting, *, task_status: TaskStatus[bool]) -> None:
        """Keep one box open until it is released; it waits until somebody takes it."""
        held: _OpenBox | None = None
        started = False
        # What breaks here breaks for whoever uses the box, too, and is told there.
        with suppress(Exception):
            try:
                async with self._provider.open(waiting.spec, waiting.layers) as box, anyio.create_task_group() as tasks:
                    held = await self._warmed(box, waiting, tasks)
                    waiting.held.append(held)
                    started = True
                    task_status.started(True)
                    await held.released.wait()
                    tasks.cancel_scope.cancel()
            finally:
                if held is not None:
                    waiting.remove(held)
                    held.closed.set()
        if not started:
            task_status.started(False)

    async def _warmed(self, box: Sandbox, waiting: _Waiting, tasks: TaskGroup) -> _OpenBox:
        if self._warmer is None or _names(waiting.layers) != _names(self._warmer.layers()):
            return _OpenBox(box)
        server: WarmServer = await tasks.start(self._warmer.warm, box)
        held = _OpenBox(WarmBox(box))
        tasks.start_soon(self._watch, server, held, waiting)
        return held

    async def _watch(self, server: WarmServer, held: _OpenBox, waiting: _Waiting) -> None:
        """A box whose server ends while the box waits is of no use."""
        await server.used_up()
        if waiting.remove(held):
            held.released.set()
            # One that dies young would die young again; the next one who asks may have it tried.
            if time.monotonic() - held.since > YOUNG_S:
                self._fill_later(waiting)


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
