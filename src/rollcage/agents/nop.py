"""An agent that does nothing: what a task pays for no work at all."""

from __future__ import annotations

from collections.abc import Sequence

from rollcage.agents.base import AgentContext, AgentExit, Emit, takes_only
from rollcage.events import AgentStarted
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.layers import Layer
from rollcage.types import AgentSpec


class Nop:
    """The agent `nop`: no layers, no model, no configuration, no work."""

    name = "nop"
    version = "1"
    own_paths: Sequence[str] = ()
    asks_no_model = True

    def check(self, spec: AgentSpec) -> None:
        """There is nothing that could be set."""
        takes_only(self.name, spec)

    def layers(self) -> Sequence[Layer]:
        """None."""
        return ()

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Nothing."""
        await emit(AgentStarted(agent=self.name, version=self.version))
        return AgentExit(code=0, error=None)

    async def log_tail(self, box: Sandbox) -> str:
        """It keeps no log."""
        return ""
