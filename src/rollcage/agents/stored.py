"""An agent whose work was done before: it puts what another rollout left into the box, to be judged again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import anyio

from rollcage.agents.base import AgentContext, AgentExit, Emit
from rollcage.agents.nop import Nop
from rollcage.errors import SandboxError, UsageError
from rollcage.events import AgentStarted
from rollcage.sandboxes.base import PATH, Sandbox, tail
from rollcage.types import HOME, AgentSpec

_UNPACK = """
rm -rf -- "$@" || exit 1
exec tar --extract --no-same-owner --same-permissions --file=-
"""


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
        argv = ["bash", "--noprofile", "--norc", "-c", _UNPACK, "unpack", *spec.config["paths"]]
        async with (
            box.spawn(argv, env={"PATH": PATH}, inherit_image_env=False, cwd=HOME) as process,
            aclosing(self._archive(spec.config["digest"])) as chunks,
        ):
            try:
                async for chunk in chunks:
                    await process.stdin.send(chunk)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # its exit code tells why it ended early
            await process.stdin.aclose()
            said = (await tail(process.stderr, 2000)).text.strip()
            if code := await process.wait():
                raise SandboxError(f"the stored work could not be unpacked: {said or code}")
        return AgentExit(code=0, error=None)
