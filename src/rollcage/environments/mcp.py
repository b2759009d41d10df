"""`mcp:http://host:port/mcp`: the tools of any MCP server. It has no reset and judges nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rollcage.environments.base import Environment, Tools
from rollcage.errors import EnvironmentFailed, SetupError, UsageError
from rollcage.types import Task

if TYPE_CHECKING:
    from rollcage.fleet import FleetMCPTools


class McpEnvironments:
    """Every MCP server over streamable HTTP."""

    secrets: tuple[str, ...] = ()

    def check(self, place: str, task: Task) -> None:
        """An address is needed, and nothing that only environments have."""
        check_address("mcp", place)
        check_package("httpx", "fleet")
        if task.verifier or task.environment_seed is not None:
            raise UsageError("environment: an MCP server has no reset and judges nothing; no seed, no verifier")

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[Environment]:
        """Sessions with the server, until the end of the block."""
        from rollcage.environments.failures import named
        from rollcage.fleet import FleetMCPTools

        with named(f"mcp:{place}"):
            async with FleetMCPTools("", {"mcp": place}) as tools:
                yield _Server(place, tools)


class _Server:
    instance_id = ""

    def __init__(self, place: str, tools: FleetMCPTools) -> None:
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


def check_address(scheme: str, place: str) -> None:
    """UsageError where this is no http address."""
    try:
        parts = urlsplit(place)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and place.isprintable()
    except ValueError:  # a port or an IPv6 address that is none
        right = False
    if not right:
        raise UsageError(f"environment: {scheme}: is followed by an address, such as {scheme}:http://host:8000")
    if parts.username or parts.password:
        raise UsageError("environment: an address may hold no user name or password; it goes into the log")


def check_package(name: str, extra: str) -> None:
    """SetupError where a package is missing."""
    if find_spec(name) is None:
        raise SetupError(f"environment: the package {name} is not installed: pip install 'rollcage[{extra}]'")
