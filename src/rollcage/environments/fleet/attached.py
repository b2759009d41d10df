"""An instance that runs already, by the address of its manager: no control plane, no SDK, and nothing is released."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx

from rollcage.environments.fleet.errors import FleetError
from rollcage.environments.fleet.orchestrator import RemoteEnvironment
from rollcage.environments.fleet.tools import FleetMCPTools, client
from rollcage.environments.fleet.types import Options
from rollcage.errors import UsageError

MANAGER = "/api/v1/env"
"""Where an instance has its manager, below its root."""


@asynccontextmanager
async def attached(base_url: str, headers: Mapping[str, str], options: Options) -> AsyncIterator[RemoteEnvironment]:
    """The instance whose manager answers at `base_url`. `headers` go with every request to it."""
    address = base_url.rstrip("/")
    if not address.startswith(("http://", "https://")):
        raise UsageError(f"{base_url!r} is no http address", argument="base_url", remedy=f"it ends in {MANAGER}")
    root = address.removesuffix(MANAGER)
    bearer = next((value for name, value in headers.items() if name.lower() == "authorization"), "")
    urls = options.endpoints or {"mcp": f"{root}/mcp", "api/v1/mcp": f"{root}/api/v1/mcp"}
    tools = FleetMCPTools(bearer.removeprefix("Bearer "), urls, options)
    async with client(options.request_timeout_s) as http, tools:
        instance: Any = SimpleNamespace(
            instance_id=address,
            env_key=address,
            version="",
            instance=SimpleNamespace(client=_Manager(http, address, dict(headers))),
        )
        control: Any = _NoControlPlane()
        yield RemoteEnvironment(control, instance, tools, options)


class _Manager:
    """The manager's HTTP, as the SDK's client of it is called."""

    def __init__(self, http: httpx.AsyncClient, address: str, headers: dict[str, str]) -> None:
        self._http, self._address, self._headers = http, address, headers

    async def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Ask it."""
        return await self._http.request(method, self._address + path, headers=self._headers, **more)


class _NoControlPlane:
    async def instance(self, instance_id: str) -> Any:
        """There is nobody to ask."""
        raise FleetError(f"no control plane is known for {instance_id}")
