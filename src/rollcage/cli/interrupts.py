"""What Ctrl-C, TERM and HUP do to a command: it stops in order, and what it opened is closed."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
from anyio.abc import TaskStatus

from rollcage.cli import codes

Stop = Callable[[], Awaitable[None]]


class Display(Protocol):
    """Whoever shows what happens."""

    def note(self, message: str) -> None:
        """Something that is not in the log."""

    def leave(self) -> None:
        """Give the terminal back at once."""


class Interrupts:
    """Signals while a rollout runs: the first one stops it cleanly, the second leaves at once."""

    def __init__(self, output: Display) -> None:
        self._output = output
        self.code: int | None = None
        """The exit code of the signal, once one came."""
        self.reader_left = False
        """Whoever read our output went away."""
        self.stop: Stop = nothing
        """How to stop what runs at the moment."""

    async def listen(self, *, task_status: TaskStatus[None]) -> None:
        """Wait for signals until cancelled."""
        with anyio.open_signal_receiver(*_not_ignored(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as signals:
            task_status.started()
            async for number in signals:
                if self.code is not None:
                    self._output.leave()
                    os._exit(self.code)
                self.code = 128 + number
                self._output.note("stopping; once more leaves at once")
                await self.stop()


async def nothing() -> None:
    """There is nothing to stop."""


def cancelling(scope: anyio.CancelScope) -> Stop:
    """Stop by cancelling this scope."""

    async def stop() -> None:
        scope.cancel()

    return stop


async def cancel_at_signal(scope: anyio.CancelScope) -> None:
    """Cancel the scope at the first Ctrl-C or TERM."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return


async def stoppable(work: Callable[[], Awaitable[int]]) -> int:
    """Do the work; TERM and HUP cut it short, so that what it opened is released, as Ctrl-C does anyway."""
    received: list[int] = []
    code = codes.BROKEN

    async def listen(*, task_status: TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(*_not_ignored(signal.SIGTERM, signal.SIGHUP)) as signals:
            task_status.started()
            async for number in signals:
                received.append(number)
                scope.cancel()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            await tasks.start(listen)
            code = await work()
            tasks.cancel_scope.cancel()
    return 128 + received[0] if received else code


def _not_ignored(*numbers: signal.Signals) -> list[signal.Signals]:
    """What our parent chose to ignore (nohup, background jobs) stays ignored."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
