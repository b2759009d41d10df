"""Opens environments of a local Fleet for tests, and checks that nothing was left running."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from rollcage.environments import fleet as fleets
from rollcage.environments.fleet import RemoteEnvironment
from rollcage.simulators import FleetRuntime
from support.commands import environ, rollcage

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


@contextmanager
def served_fleet(home: Path) -> Iterator[dict[str, str]]:
    """The variables that lead to a local Fleet in another process; afterwards nothing runs any more."""
    command = [sys.executable, "-m", "rollcage", "fleet", "demo", "--serve", "--json"]
    with subprocess.Popen(command, env=environ(home), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        said = json.loads(process.stdout.readline())
        variables = {"FLEET_BASE_URL": said["base_url"], "FLEET_API_KEY": said["api_key"]}
        yield variables
        assert json.loads(rollcage(home, "fleet", "ls", "--instances", "--json", env=variables).stdout) == []
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


async def charged_twice(environment: RemoteEnvironment) -> int:
    """The ticket that the desk's task is about."""
    found = await environment.tools.call_tool("search_tickets", {"search": {"text": "charged twice"}})
    number: int = found.structured["tickets"][0]["id"]
    return number
