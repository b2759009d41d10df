"""Where rollouts are run: in this process, unless somebody takes them elsewhere (`rollcage.cluster`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from rollcage.events import Event
from rollcage.gateway import Gateway
from rollcage.gateway.live import Delta
from rollcage.rollout.run import RolloutDeps, run
from rollcage.runner.queue import FairQueue
from rollcage.runner.write_behind import WriteBehind
from rollcage.schema.nodes import NodeView
from rollcage.store.packed import Packed
from rollcage.types import Job


@dataclass(frozen=True)
class Execution:
    """A rollout that has a place and is to be run."""

    name: str
    """Its id."""
    job: Job
    deps: RolloutDeps
    """The parts it is run with in this process."""
    log: Callable[[Event | Packed], Awaitable[object]]
    """Appends to its log; durable when it returns. What comes packed has no key of the rollout in it."""
    owner: str
    """This process, as the log names it."""


class Executor(Protocol):
    """Runs rollouts to their ends."""

    def attach(self, queue: FairQueue) -> None:
        """The queue whose rollouts these are: an executor may change how many of them run at once."""

    async def run(self, rollout: Execution) -> None:
        """Run one; the last thing it does is to log `Ended`, also where it is cancelled. Only a broken log raises."""

    def watch(self, name: str) -> AsyncIterator[Delta]:
        """What models say to a rollout from now on, while they say it."""

    def nodes_view(self) -> list[NodeView]:
        """The machines that it uses; none: this process alone."""


class InThisProcess:
    """Runs them here."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def attach(self, queue: FairQueue) -> None:
        """As many as were asked for."""

    async def run(self, rollout: Execution) -> None:
        """Take it through its stages."""
        await run(rollout.job, rollout.deps, WriteBehind(rollout.log), name=rollout.name)

    def watch(self, name: str) -> AsyncIterator[Delta]:
        """What the gateway hears."""
        return self._gateway.watch(name)

    def nodes_view(self) -> list[NodeView]:
        """None."""
        return []
