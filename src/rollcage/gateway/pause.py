"""Holds model calls back while weights are changed: new calls wait, those that run finish or are cut."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

WAIT_S = 600.0
"""How long a call waits for the end of a pause, unless the pause says otherwise; then it has failed."""
CUT = "cut off: the gateway was paused"

Running = Literal["finish", "cut"]
"""What becomes of the calls that run when a pause begins."""


class CallGate:
    """Every call of a gateway passes here when it begins. Used on the event loop only."""

    def __init__(self) -> None:
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._running: dict[object, Callable[[str], object]] = {}
        self._wait_s = WAIT_S
        self._waiting = 0
        self.policy_version = ""
        """The weights that the last resume named; empty where none did."""
        self.generation = 0
        """How often weights were named."""

    @property
    def paused(self) -> bool:
        """Whether calls wait."""
        return not self._open.is_set()

    @property
    def running(self) -> int:
        """Calls that run."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return self._waiting

    async def enter(self) -> float | None:
        """Wait until calls may begin; None. Where that takes too long, how long it was waited."""
        wait_s = self._wait_s
        self._waiting += 1
        try:
            async with asyncio.timeout(wait_s):
                await self._open.wait()
        except TimeoutError:
            return wait_s
        finally:
            self._waiting -= 1
        return None

    def begin(self, call: object, cut: Callable[[str], object]) -> None:
        """A call runs from now on; `cut` ends it at once."""
        self._running[call] = cut
        self._idle.clear()

    def end(self, call: object) -> None:
        """It is over, and in the log."""
        self._running.pop(call, None)
        if not self._running:
            self._idle.set()

    async def pause(self, running: Running = "finish", *, wait_s: float = WAIT_S) -> None:
        """Let no call begin; returns when none runs any more. `wait_s`: how long each new call waits at most."""
        self._wait_s = wait_s
        self._open.clear()
        if running == "cut":
            for cut in list(self._running.values()):
                cut(CUT)
        await self._idle.wait()

    def resume(self, policy_version: str = "") -> None:
        """Let calls begin again. `policy_version`: the weights that they ask from now on."""
        if policy_version:
            self.policy_version = policy_version
            self.generation += 1
        self._open.set()

    def version(self, own: str, generation: int | None) -> str:
        """What a rollout's calls are stamped with: what was started before weights were named takes their name; later,
        its own name counts, if it has one.
        """
        fresh = generation is None or generation == self.generation
        return own if (own and fresh) or not self.policy_version else self.policy_version
