"""The MCP plane of a Fleet's instance under its published name: the tools, and nothing that resets or ends it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import httpx
from pydantic import SecretStr

from rollcage.environments.fleet.types import Options
from rollcage.mcp import guarded
from rollcage.mcp.tools import McpTools
from rollcage.mcp.types import Remedies


class FleetMCPTools(McpTools):
    """The tools of one instance: `list_tools`, `call_tool`, `report`."""

    remedies = Remedies(
        key="check FLEET_API_KEY",
        down="check that the instance still runs (rollcage fleet ls --instances), or name its endpoints",
    )

    def __init__(
        self,
        api_key: str | SecretStr = "",
        mcp_urls: Sequence[str] | Mapping[str, str] = (),
        options: Options | None = None,
    ) -> None:
        """Without `endpoints` in the options the addresses are where an instance may have endpoints."""
        guessed = options is not None and options.endpoints is None
        super().__init__(mcp_urls, options, api_key=api_key, guessed=guessed)


def client(timeout_s: float) -> httpx.AsyncClient:
    """An HTTP client for the control plane and the instances' managers; neither of our keys comes back from there."""
    return guarded.client(secret_headers=("authorization", "x-runner-token"), timeout=timeout_s)
