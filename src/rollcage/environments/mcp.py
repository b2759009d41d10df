"""`mcp:http://host:port/mcp`: the tools of any MCP server. It has no reset and judges nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollcage.environments.base import Environment, check_address, check_package
from rollcage.errors import EnvironmentFailed, UsageError
from rollcage.mcp.types import Tools
from rollcage.types import Task

if TYPE_CHECKING:
    from rollcage.mcp.tools import McpTools


class McpEnvironments:
    """Every MCP server over streamable HTTP."""

    secrets: tuple[str, ...] = ()

    def check(self, place: str, task: Task) -> None:
        """An address is needed, and nothing that only environments have."""
        check_address("mcp", place)
        check_package("httpx", "fleet")
        if task.verifier or task.environment_seed is not None:
            raise UsageError(
                "an MCP server has no reset and judges nothing; no seed, no verifier", argument="environment"
            )

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[Environment]:
        """Sessions with the server, until the end of the block."""
        from rollcage.environments.failures import boundary
        from rollcage.mcp.tools import McpTools

        with boundary(f"mcp:{place}"):
            async with McpTools({"mcp": place}) as tools:
                yield _McpEnvironment(place, tools)


class _McpEnvironment:
    instance_id = ""

    def __init__(self, place: str, tools: McpTools) -> None:
        self._place, self._tools = place, tools

    @property
    def name(self) -> str:
        return self._tools.report().endpoints[0].server or self._place

    @property
    def tools(self) -> Tools:
        return self._tools

    async def reset(self, seed: int | None) -> None:
        listed = await self._tools.list_tools()
        if not listed.tools:
            raise EnvironmentFailed(f"mcp:{self._place} offers no tools")

    async def reward(self, task: Task) -> float | None:
        # What the agent did is worth nothing where the server went away under it.
        await self._tools.list_tools(refresh=True)
        return None
