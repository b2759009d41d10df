"""Opens environments of a local Fleet for tests, and checks that nothing was left running."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from rollcage.environments import fleet as fleets
from rollcage.environments.fleet import RemoteEnvironment
from rollcage.simulators import FleetRuntime

KEY = "ticket-desk"


@asynccontextmanager
async def opened(fleet: FleetRuntime, key: str = KEY, **options: Any) -> AsyncIterator[RemoteEnvironment]:
    """An environment of this Fleet; afterwards nothing runs any more."""
    given = {"api_key": fleet.key, "base_url": fleet.base_url, **options}
    try:
        async with fleets.open(key, **given) as environment:
            yield environment
    finally:
        assert fleet.running == []


async def charged_twice(environment: RemoteEnvironment) -> int:
    """The ticket that the desk's task is about."""
    found = await environment.tools.call_tool("search_tickets", {"search": {"text": "charged twice"}})
    number: int = found.structured["tickets"][0]["id"]
    return number
