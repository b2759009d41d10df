"""The judged's side of a divided box, as its judge and our process use it; each backend knows how to run there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple

from rollcage.sandboxes.base import Process, Separation
from rollcage.sandboxes.box_rpc import environment_of
from rollcage.sandboxes.inside import orders
from rollcage.sandboxes.inside.orders import LaunchOrder
from rollcage.types import HOME

TOOLS = orders.TOOLS
"""Where the judge finds the launcher, the Python module and the socket."""


class Side(NamedTuple):
    """Where in a box a command runs."""

    judged: bool = False
    """Apart from the judge."""
    scratch: tuple[str, ...] = ()
    """Paths of which it gets copies."""
    network: bool = True
    """Whether it has the box's network, and not one of its own."""
    streams: tuple[int, int, int] | None = None
    """Descriptors that are its streams; else they are pipes that end here."""


Running = Callable[[Sequence[str], Mapping[str, str], str, Side], AbstractAsyncContextManager[Process]]


class JudgedSide:
    """Starts commands as the judged."""

    tools = TOOLS

    def __init__(self, running: Running, separation: Separation) -> None:
        """`running`: how the box runs a command on a side."""
        self._running, self._separation = running, separation
        self.launched = 0

    def spawn(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = HOME,
        scratch: bool = False,
        network: bool = True,
    ) -> AbstractAsyncContextManager[Process]:
        """Start a command as the judged, from here."""
        side = Side(True, self._separation.shared if scratch else (), network)
        return self._running(argv, environment_of({}, env, inherit=False), cwd, side)

    @asynccontextmanager
    async def launch(self, order: LaunchOrder, streams: Sequence[int]) -> AsyncIterator[Process]:
        """Start what the judge asked for, with the streams that came along."""
        stdin, stdout, stderr = streams
        scratch = self._separation.shared if order.scratch else ()
        side = Side(True, scratch, order.network, (stdin, stdout, stderr))
        async with self._running(order.argv, {**order.env}, order.cwd, side) as process:
            yield process


def null_streams() -> list[int]:
    """Three descriptors that stand for streams that end elsewhere."""
    return [os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC) for _ in range(3)]
