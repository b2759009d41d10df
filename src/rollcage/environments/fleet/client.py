"""Two ways to an instance: `open`, which releases what it provisioned, and the published `FleetEnvClient`."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from typing import Any, Self, TypeVar

import anyio
from anyio.from_thread import start_blocking_portal
from pydantic import SecretStr, ValidationError

from rollcage.environments.fleet import sdk
from rollcage.environments.fleet.attached import attached
from rollcage.environments.fleet.errors import FleetError, InstanceLost, KeyRefused, QuotaReached, UnknownEnvironment
from rollcage.environments.fleet.orchestrator import RemoteEnvironment
from rollcage.environments.fleet.tools import FleetMCPTools, client
from rollcage.environments.fleet.types import Options, State, StepResult
from rollcage.errors import UsageError
from rollcage.mcp.tools import check_addresses
from rollcage.mcp.types import ToolOptions
from rollcage.settings import Settings

T = TypeVar("T")

RELEASE_S = 30.0
"""How long releasing an instance may take; then its own limits (heartbeat, ttl) end it."""


@asynccontextmanager
async def open(env_key: str, *, api_key: str | SecretStr = "", **options: Any) -> AsyncIterator[RemoteEnvironment]:
    """A running instance of a remote environment, released at the end of the block whatever happens.

    `api_key`: `FLEET_API_KEY` unless given. The rest are the fields of `Options`.
    """
    if not env_key or not env_key.strip():
        raise UsageError(
            "the key of an environment is needed", argument="env_key", remedy="rollcage fleet ls shows them"
        )
    chosen = options_of(options)
    if chosen.endpoints is not None:
        check_addresses(chosen.endpoints.values())
    key, base_url = credentials(api_key, chosen.base_url)
    # Without a run id of its own, an instance whose creation was interrupted could not be told from others.
    run_id = chosen.run_id or f"rollcage-{uuid.uuid4().hex}"
    async with client(chosen.request_timeout_s) as http:
        control = sdk.fleet(key, base_url, http)
        made: list[sdk.Instance] = []
        try:
            instance = await sdk.provision(control, env_key, chosen, run_id, made)
            tools = FleetMCPTools(key, chosen.endpoints or discovered(instance), chosen)
            environment = RemoteEnvironment(control, instance, tools, chosen)
            beating = asyncio.ensure_future(_beat(environment, instance, chosen))
            try:
                async with tools:
                    yield environment
            finally:
                beating.cancel()
                environment.lost = tools.ended = "it was released: the block that opened it is over"
        except BaseException as error:
            if made or not isinstance(error, KeyRefused | UnknownEnvironment | QuotaReached):
                failure = await _release(control, made[0] if made else None, "" if chosen.run_id else run_id)
                if failure:
                    error.add_note(failure)
            raise
        failure = await _release(control, instance, "")
        if failure:
            raise FleetError(failure)


def options_of(given: Mapping[str, Any]) -> Options:
    """The options, checked; UsageError names the first that is wrong."""
    try:
        return Options(**given)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            own = sorted(Options.model_fields, key=lambda field: field in ToolOptions.model_fields)
            raise UsageError("no such option", argument=name, remedy=f"known: {', '.join(own)}") from None
        raise UsageError(str(first["msg"]), argument=name) from None


def credentials(api_key: str | SecretStr = "", base_url: str = "") -> tuple[SecretStr, str]:
    """The key and the control plane's address: as given, else as the environment says."""
    key = api_key if isinstance(api_key, SecretStr) else SecretStr(api_key or "")
    if key.get_secret_value().strip() and base_url:
        return key, base_url
    said = Settings.from_environ().fleet
    return (key if key.get_secret_value().strip() else said.api_key), base_url or said.base_url


def discovered(instance: sdk.Instance) -> dict[str, str]:
    """Where an instance may have MCP endpoints, in order of precedence. Those that answer 404 are left out later."""
    urls = getattr(instance, "urls", None)
    if urls is None or not urls.root:
        raise FleetError(
            f"instance {instance.instance_id} does not tell its addresses; name its MCP endpoints (endpoints=...)"
        )
    root = str(urls.root).rstrip("/")
    return {"mcp": f"{root}/mcp", "api/v1/mcp": f"{root}/api/v1/mcp"}


async def _beat(environment: RemoteEnvironment, instance: sdk.Instance, options: Options) -> None:
    """Tell the service that the instance is still wanted, as often as it asked for, and then some."""
    interval = instance.heartbeat_interval or options.heartbeat_interval or 60
    while True:
        await anyio.sleep(interval / 3)
        try:
            with sdk.boundary("send a heartbeat"), anyio.fail_after(max(interval / 3, 5)):
                await instance.heartbeat()
        except InstanceLost as error:
            environment.lost = str(error)
            return
        except (FleetError, TimeoutError):
            continue  # one that is missed is no loss; the next may get through


async def _release(client: sdk.Fleet, instance: sdk.Instance | None, run_id: str) -> str:
    """End the instance, or whatever an interrupted creation left under `run_id`. Returns what went wrong."""
    with anyio.CancelScope(shield=True), anyio.move_on_after(RELEASE_S):
        problem = ""
        for pause in (0.5, 1.0, 2.0, 0.0):
            try:
                if instance is not None:
                    with sdk.boundary(f"release instance {instance.instance_id}"):
                        await client.close(instance.instance_id)
                elif run_id:
                    with sdk.boundary("release what was being created"):
                        await client.close_all(run_id=run_id)
                return ""
            except InstanceLost:
                return ""
            except FleetError as error:
                problem = str(error)
            await anyio.sleep(pause)
        return f"{problem}; it ends by itself once heartbeats stop or its ttl is over"
    what = instance.instance_id if instance else run_id
    return f"{what} was not released within {RELEASE_S:g} s; it ends by itself once heartbeats stop or its ttl is over"


class FleetEnvClient:
    """The HTTP plane as it was published: plain calls, no `await`. `from_fleet` gives it together with the tools.

    Heartbeats go out from a thread of its own until `close`, which releases the instance; if nobody calls it, the end
    of the process does.
    """

    def __init__(self, base_url: str, default_headers: Mapping[str, str] | None = None, **options: Any) -> None:
        """For an instance that runs already: `close` leaves it running.

        `base_url`: its manager's address, which ends in `/api/v1/env`. `default_headers` go with every request: the
        manager asks for `X-Runner-Token`, the tools for `Authorization`.
        """
        self._hold(attached(base_url, default_headers or {}, options_of(options)))

    @classmethod
    def from_fleet(cls, api_key: str = "", env_key: str = "", **options: Any) -> tuple[FleetEnvClient, FleetMCPTools]:
        """Provision an instance: the orchestrator's handle, and the agent's. `image_type` is `mcp` unless given."""
        made = cls.__new__(cls)
        made._hold(open(env_key, api_key=api_key, **{"image_type": "mcp", **options}))
        return made, made.tools

    def _hold(self, opening: AbstractAsyncContextManager[RemoteEnvironment]) -> None:
        """Keep it open, in a thread of its own, until `close`."""
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="fleet"))
            self._environment = stack.enter_context(self._portal.wrap_async_context_manager(opening))
            self._end = weakref.finalize(self, stack.pop_all().close)

    def _call(self, method: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        if not self._end.alive:
            raise FleetError(f"{self._environment.key}: this client is closed; make another one to go on")
        return self._portal.call(method, *arguments)

    @property
    def tools(self) -> FleetMCPTools:
        """The agent's handle."""
        return self._environment.tools

    @property
    def instance_id(self) -> str:
        """What the service calls this instance."""
        return self._environment.instance_id

    def reset(self, seed: int | None = None, timestamp: int | None = None) -> StepResult:
        """As `RemoteEnvironment.reset`."""
        return self._call(self._environment.reset, seed, timestamp)

    def step(self, action: Mapping[str, Any]) -> StepResult:
        """As `RemoteEnvironment.step`."""
        return self._call(self._environment.step, action)

    def state(self) -> State:
        """As `RemoteEnvironment.state`."""
        return self._call(self._environment.state)

    def verify(self, function: str | Callable[..., Any], name: str = "") -> float:
        """As `RemoteEnvironment.verify`."""
        return self._call(self._environment.verify, function, name)

    def close(self) -> None:
        """Release the instance; a second time does nothing."""
        self._end()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Release the instance."""
        self.close()
