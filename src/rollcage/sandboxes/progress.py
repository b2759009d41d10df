"""Tells whoever waits for a box what is being done for it: what takes a while, and is done once for many boxes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar

import anyio

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Tells nobody."""


_listener: ContextVar[Say] = ContextVar("progress", default=silent)


def tell(line: str) -> None:
    """Tell whoever waits for what is being done here."""
    _listener.get()(line)


@contextmanager
def listening(say: Say) -> Iterator[None]:
    """What is told in the block is told to `say`."""
    before = _listener.set(say)
    try:
        yield
    finally:
        _listener.reset(before)


class SharedWork:
    """A lock around work that is done once: all who wait for it are told how it goes."""

    def __init__(self) -> None:
        self._lock = anyio.Lock()
        self._waiting: list[Say] = []
        self._last = ""

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Nobody else is in the block; look again whether there is anything left to do."""
        own = _listener.get()
        self._waiting.append(own)
        try:
            if self._last:
                own(self._last)
            async with self._lock:
                with listening(self._tell_all):
                    try:
                        yield
                    finally:
                        self._last = ""
        finally:
            self._waiting.remove(own)

    def _tell_all(self, line: str) -> None:
        self._last = line
        for say in tuple(self._waiting):
            say(line)
