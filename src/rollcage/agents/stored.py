"""An agent whose work was done before: it puts what another rollout left into the box, to be judged again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from rollcage.agents.base import AgentContext, AgentExit, Emit
from rollcage.agents.nop import Nop
from rollcage.errors import UsageError
from rollcage.events import AgentStarted
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.files import unpack_archive
from rollcage.types import HOME, AgentSpec


class StoredWork(Nop):
    """The agent `stored-work`: its configuration names an archive, and what is removed to make room for it."""

    name = "stored-work"
    internal = True
    """Nobody asks for it by name: it is not listed."""

    def __init__(self, archive: Callable[[str], AsyncGenerator[bytes, None]]) -> None:
        """`archive`: its bytes, by its name."""
        self._archive = archive

    def check(self, spec: AgentSpec) -> None:
        """It needs to know which."""
        if spec.config.keys() != {"digest", "paths"}:
            raise UsageError("it is `rollcage reverify` that uses this agent", argument="agent")

    async def solve(
        self, box: Sandbox, instruction: str, context: AgentContext, spec: AgentSpec, *, workdir: str, emit: Emit
    ) -> AgentExit:
        """Take away what setup made of these paths, and unpack what was kept of them."""
        await emit(AgentStarted(agent=self.name, version=self.version))
        async with aclosing(self._archive(spec.config["digest"])) as chunks:
            await unpack_archive(box, HOME, chunks, instead_of=spec.config["paths"])
        return AgentExit(code=0, error=None)
