"""What an agent is: what its box must contain, and how it works on an instruction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from rollcage.events import AgentSaid, AgentStarted
from rollcage.layers import Layer
from rollcage.sandboxes.base import Sandbox
from rollcage.types import AgentSpec, Endpoint

Say = Callable[[AgentStarted | AgentSaid], Awaitable[object]]
"""Puts what the agent says into the log, as it comes."""


class Offer(NamedTuple):
    """What an agent is given to work with: addresses in its box, served by this process."""

    model: Endpoint
    """Who thinks: lent by the gateway, with a key that is worth nothing elsewhere."""
    tools_url: str = ""
    """An MCP endpoint with the tools of a remote environment; empty where there is none. It needs no key."""


class AgentExit(NamedTuple):
    """How an agent ended by itself."""

    code: int
    """Its exit code."""
    error: str | None
    """The last error it spoke of, in one line."""


class Agent(Protocol):
    """One agent CLI: how to install, configure, start it and read its events."""

    @property
    def name(self) -> str:
        """`opencode`, ..."""

    @property
    def version(self) -> str:
        """The exact version that is run."""

    @property
    def own_paths(self) -> Sequence[str]:
        """Where below home it keeps its own state: changes there are no news."""

    def check(self, spec: AgentSpec) -> None:
        """Raise UsageError for a configuration it cannot follow, before anything is started."""

    def layers(self) -> Sequence[Layer]:
        """What its boxes start with."""

    async def solve(
        self, box: Sandbox, instruction: str, offer: Offer, spec: AgentSpec, *, workdir: str, say: Say
    ) -> AgentExit:
        """Work on the instruction until the agent ends by itself. Cancelled when its time is up."""

    async def log_tail(self, box: Sandbox) -> str:
        """The end of the agent's own log, read when its processes are dead; empty where it kept none."""


@runtime_checkable
class InProcess(Protocol):
    """An agent that is no program: it works in this process, on a remote environment's tools, and gets no box."""

    in_process: bool
