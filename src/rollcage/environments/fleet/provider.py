"""`fleet:KEY`: environments of a Fleet, provisioned for one rollout each and released after it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from pydantic import SecretStr

from rollcage.environments.base import Environment, check_package
from rollcage.errors import UsageError
from rollcage.mcp.types import Tools
from rollcage.types import Task

if TYPE_CHECKING:
    from rollcage.environments.fleet import RemoteEnvironment


class FleetEnvironments:
    """Every environment that the key may use."""

    def __init__(self, api_key: SecretStr, base_url: str = "") -> None:
        """`base_url`: the control plane's address; empty: Fleet's own."""
        self._key, self._base_url = api_key, base_url

    @property
    def secrets(self) -> tuple[str, ...]:
        """The key."""
        return (self._key.get_secret_value(),)

    def check(self, place: str, task: Task) -> None:
        """An environment's key is needed, and a key of ours."""
        if not place.strip():
            raise UsageError(
                "fleet: is followed by an environment's key",
                argument="environment",
                remedy="rollcage fleet ls shows them",
            )
        if not self._key.get_secret_value():
            raise UsageError(
                "FLEET_API_KEY is not set", argument="environment", remedy="rollcage fleet demo needs none"
            )
        check_package("fleet", "fleet")

    @asynccontextmanager
    async def open(self, place: str) -> AsyncIterator[Environment]:
        """Provision an instance; its heartbeats go out until the end of the block, then it is released."""
        from rollcage.environments import fleet as fleets
        from rollcage.environments.failures import boundary

        with boundary(f"fleet:{place}"):
            async with fleets.open(place, api_key=self._key, base_url=self._base_url) as remote:
                yield _FleetEnvironment(remote)


class _FleetEnvironment:
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
        from rollcage.environments.fleet import NotOffered

        if task.verifier:
            # Later than the rollout's own deadline: that one says what ran out of time.
            return await self._remote.verify(task.verifier, timeout_s=task.limits.verify_timeout_s + 60)
        try:
            state = await self._remote.state()
        except NotOffered:
            return None
        return reward_of(self.name, state.more.get("reward"))
