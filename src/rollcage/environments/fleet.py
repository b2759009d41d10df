"""`fleet:KEY`: environments of a Fleet, provisioned for one rollout each and released after it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rollcage.environments.base import Environment, Tools
from rollcage.environments.mcp import check_package
from rollcage.errors import UsageError
from rollcage.settings import FleetSettings
from rollcage.types import Task

if TYPE_CHECKING:
    from rollcage.fleet import RemoteEnvironment


class FleetEnvironments:
    """Every environment that the key may use."""

    def __init__(self, settings: FleetSettings) -> None:
        self._settings = settings

    @property
    def secrets(self) -> tuple[str, ...]:
        """The key."""
        return (self._settings.api_key.get_secret_value(),)

    def check(self, place: str, task: Task) -> None:
        """An environment's key is needed, and a key of ours."""
        if not place.strip():
            raise UsageError("environment: fleet: is followed by an environment's key; rollcage fleet ls shows them")
        if not self._settings.api_key.get_secret_value():
            raise UsageError("environment: FLEET_API_KEY is not set; rollcage fleet demo needs none")
        check_package("fleet", "fleet")

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[Environment]:
        """Provision an instance; its heartbeats go out until the end of the block, then it is released."""
        import rollcage.fleet
        from rollcage.environments.failures import named

        said = self._settings
        with named(f"fleet:{place}"):
            async with rollcage.fleet.open(place, api_key=said.api_key, base_url=said.base_url) as remote:
                yield _Instance(remote)


class _Instance:
    def __init__(self, remote: RemoteEnvironment) -> None:
        self._remote = remote

    @property
    def name(self) -> str:
        return self._remote.key

    @property
    def instance_id(self) -> str:
        return self._remote.instance_id

    @property
    def tools(self) -> Tools:
        return self._remote.tools

    async def reset(self, seed: int | None) -> None:
        await self._remote.reset(seed)

    async def reward(self, task: Task) -> float | None:
        from rollcage.environments.failures import reward_of
        from rollcage.fleet import NotOffered

        if task.verifier:
            # Later than the rollout's own deadline: that one says what ran out of time.
            return await self._remote.verify(task.verifier, timeout_s=task.limits.verify_timeout_s + 60)
        try:
            state = await self._remote.state()
        except NotOffered:
            return None
        return reward_of(self.name, state.more.get("reward"))
