"""An agent that does nothing: what a task pays for no work at all."""

from __future__ import annotations

from rollcage.agents.base import AgentContext, AgentExit, BareAgent, Emit
from rollcage.events import AgentStarted
from rollcage.sandboxes.base import Sandbox
from rollcage.types import AgentSpec


class Nop(BareAgent):
    """The agent `nop`: no layers, no model, no configuration, no work."""

    name = "nop"
    asks_no_model = True

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Nothing."""
        await emit(AgentStarted(agent=self.name, version=self.version))
        return AgentExit(code=0, error=None)
