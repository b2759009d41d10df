"""The remote environments this server can reach, and instances of them that callers try tools on.

A caller gets one instance per environment, of its own. It is provisioned at the first call, kept for some minutes after
the last one, and released then, on request, and when the server stops.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from rollcage.environments.base import Environment, Environments
from rollcage.errors import EnvironmentFailed, QueueFull, RollcageError, SetupError, UsageError
from rollcage.schema.errors import NoSuchEnvironment, Stopping
from rollcage.schema.views import CalledTool, OfferedEnvironment, OfferedEnvironments, OfferedTool, OfferedTools
from rollcage.server.auth import Caller
from rollcage.settings import Settings
from rollcage.types import JsonObject, Task

# The parts that talk to environments are fetched when somebody uses one: a server shall answer soon.
if TYPE_CHECKING:
    from rollcage.mcp.types import ListToolsAction, ToolResult

IDLE_S = 300.0
READY_S = 900.0
"""How long an instance may take to come up."""
CALL_S = 120.0
"""How long one call may take."""
EACH, ALL = 4, 32
"""Instances that one caller may have at once, and all callers together."""
LISTED_S = 60.0
"""How long the list of a Fleet's environments is believed."""
LARGEST = 4 << 20
"""Characters of one answer that are passed on."""


@dataclass
class _Instance:
    """One caller's instance of one environment."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    settled: anyio.Event = field(default_factory=anyio.Event)
    over: anyio.Event = field(default_factory=anyio.Event)
    environment: Environment | None = None
    listed: ListToolsAction | None = None
    failure: RollcageError | None = None
    leaving: bool = False
    used: float = field(default_factory=time.monotonic)
    calls: set[anyio.CancelScope] = field(default_factory=set)


class RemoteEnvironments:
    """What `environment` may name here: those the operator gave a name, and a Fleet's where there is a key for it."""

    def __init__(
        self, known: Mapping[str, Environments], given: Mapping[str, str], settings: Settings, tasks: TaskGroup
    ) -> None:
        self._known, self._given, self._settings, self._tasks = known, dict(given), settings, tasks
        self._instances: dict[tuple[str, str], _Instance] = {}
        self._fleet: tuple[float, list[OfferedEnvironment]] | None = None
        self._asking = anyio.Lock()
        self.idle_s = IDLE_S
        """An instance that nobody has called for so long is released."""
        for name in self._given:
            self._source(self.address(name))

    def address(self, name: str) -> str:
        """What a name stands for; UnknownEnvironment where callers may not name it."""
        if name in self._given:
            return self._given[name]
        if name.startswith("fleet:") and self._has_fleet:
            return name
        known = ", ".join([*sorted(self._given), *(["fleet:KEY"] if self._has_fleet else [])])
        offer = f"it offers {known}" if known else "it offers none"
        raise NoSuchEnvironment(
            f"this server offers no {name[:100]!r}",
            argument="environment",
            remedy=f"{offer}; its operator can add one",
        )

    async def offered(self) -> OfferedEnvironments:
        """All that can be named, and why a part of it is missing, if it is."""
        from rollcage.environments.failures import boundary

        found = [OfferedEnvironment(name=name, kind=address.partition(":")[0]) for name, address in self._given.items()]
        problem = ""
        if self._has_fleet:
            try:
                with boundary("fleet"), anyio.fail_after(20):
                    found += await self._of_fleet()
            except (EnvironmentFailed, SetupError, TimeoutError) as error:
                problem = str(error) or "fleet: no answer within 20 s"
        return OfferedEnvironments(environments=found, problem=problem)

    async def tools(self, name: str, caller: Caller) -> OfferedTools:
        """The tools of an environment; the caller's instance of it is provisioned where there is none yet."""
        instance = await self._instance(name, caller)
        assert instance.environment is not None
        assert instance.listed is not None
        tools = [
            OfferedTool(
                name=tool.name, description=str(tool.raw.get("description") or ""), input_schema=tool.input_schema
            )
            for tool in instance.listed.offered
        ]
        return OfferedTools(
            name=name,
            title=instance.environment.name,
            instance_id=instance.environment.instance_id,
            tools=tools,
            idle_s=self.idle_s,
        )

    async def call(self, name: str, tool: str, arguments: JsonObject, caller: Caller) -> CalledTool:
        """Call a tool on the caller's instance."""
        instance = await self._instance(name, caller)
        assert instance.environment is not None
        result: ToolResult | None = None
        with anyio.CancelScope(deadline=anyio.current_time() + CALL_S) as scope:
            instance.calls.add(scope)
            try:
                result = await _called(instance.environment, name, tool, arguments)
            finally:
                instance.calls.discard(scope)
                instance.used = time.monotonic()
        if result is None:
            why = "it was released meanwhile" if instance.leaving else f"{tool!r} gave no answer in {CALL_S:g} s"
            raise EnvironmentFailed(f"{name}: {why}; the call may have run")
        return CalledTool(
            tool=result.tool,
            text=result.text[:LARGEST],
            content=_shown(result.content),
            structured=result.structured if _size(result.structured) <= LARGEST else None,
            is_error=result.is_error,
            seconds=result.seconds,
        )

    async def release(self, name: str, caller: Caller) -> bool:
        """End the caller's instance; False where there was none. It is gone when this returns."""
        instance = self._instances.get((caller.name, name))
        if instance is None:
            return False
        instance.leaving = True
        for call in list(instance.calls):
            call.cancel()
        instance.scope.cancel()
        await instance.over.wait()
        return True

    @property
    def _has_fleet(self) -> bool:
        return bool(self._settings.fleet.api_key.get_secret_value()) and "fleet" in self._known

    def _source(self, address: str) -> tuple[Environments, str]:
        scheme, _, place = address.partition(":")
        source = self._known.get(scheme)
        if source is None:
            raise UsageError(f"{scheme!r} is none of {', '.join(sorted(self._known))}", argument="environment")
        source.check(place, Task(instruction="try"))
        return source, place

    async def _of_fleet(self) -> list[OfferedEnvironment]:
        from rollcage.environments.fleet import sdk
        from rollcage.environments.fleet.tools import client

        async with self._asking:
            if self._fleet is None or time.monotonic() - self._fleet[0] > LISTED_S:
                said = self._settings.fleet
                async with client(15) as http:
                    found = await sdk.environments(sdk.fleet(said.api_key, said.base_url, http))
                offered = [
                    OfferedEnvironment(
                        name=f"fleet:{one.key}", kind="fleet", version=one.default_version, description=one.description
                    )
                    for one in found
                ]
                self._fleet = (time.monotonic(), offered)
            return self._fleet[1]

    async def _instance(self, name: str, caller: Caller) -> _Instance:
        key = (caller.name, name)
        while (instance := self._instances.get(key)) is not None and instance.leaving:
            # On its way out: whoever comes now gets another.
            await instance.over.wait()
        if instance is None:
            source, place = self._source(self.address(name))
            mine = [other for other in self._instances if other[0] == caller.name]
            if len(mine) >= EACH or len(self._instances) >= ALL:
                raise QueueFull(f"environment: {EACH} instances at once are the most; release one", retry_after_s=60)
            instance = self._instances[key] = _Instance()
            self._tasks.start_soon(self._live, key, instance, source, place)
        instance.used = time.monotonic()
        await instance.settled.wait()
        if instance.failure is not None:
            raise instance.failure
        if instance.environment is None:
            raise Stopping("environment: it was released meanwhile; ask again")
        return instance

    async def _live(self, key: tuple[str, str], instance: _Instance, source: Environments, place: str) -> None:
        """One instance from its beginning to its end."""
        from rollcage.environments.failures import boundary

        try:
            with instance.scope, boundary(key[1]):
                deadline = anyio.current_time() + READY_S
                with anyio.CancelScope(deadline=deadline) as booting:
                    async with source.open(place) as environment:
                        await environment.reset(None)
                        instance.listed = await environment.tools.list_tools()
                        instance.environment = environment
                        booting.deadline = float("inf")
                        # Nobody could use it while it came up.
                        instance.used = time.monotonic()
                        instance.settled.set()
                        await _until_idle(instance, self.idle_s)
                        instance.leaving = True
                if instance.environment is None:
                    instance.failure = EnvironmentFailed(f"{key[1]}: it had not come up after {READY_S:g} s")
        except RollcageError as error:
            instance.failure = error
        finally:
            instance.environment = None
            self._instances.pop(key, None)
            instance.settled.set()
            instance.over.set()


async def _until_idle(instance: _Instance, seconds: float) -> None:
    while True:
        left = instance.used + seconds - time.monotonic()
        if left <= 0 and not instance.calls:
            return
        await anyio.sleep(max(left, 0.1))


async def _called(environment: Environment, name: str, tool: str, arguments: JsonObject) -> ToolResult:
    """The tool's answer, its own failure too; every other error names the environment and not its address."""
    from rollcage.environments.failures import boundary
    from rollcage.mcp.errors import EndpointDown, ToolFailed, ToolNotFound

    try:
        with boundary(name):
            return await environment.tools.call_tool(tool, arguments)
    except EnvironmentFailed as error:
        match error.__cause__:
            case ToolFailed(result=result):
                return result
            case ToolNotFound():
                raise UsageError(f"{name} has no {tool[:100]!r}", argument="tool") from error
            case EndpointDown(may_have_run=may_have_run):
                ran = "; the call may have run" if may_have_run else ""
                raise EnvironmentFailed(f"{name} does not answer{ran}; release it and try again") from error
        raise


def _shown(content: list[JsonObject]) -> list[JsonObject]:
    """As many blocks as a page can show, the last one perhaps by its beginning."""
    shown, left = [], LARGEST
    for block in content:
        if left <= 0:
            break
        too_long = [key for key, value in block.items() if isinstance(value, str) and len(value) > left]
        shown.append({**block, **{key: block[key][:left] for key in too_long}})
        left -= _size(shown[-1])
    return shown


def _size(value: Any) -> int:
    return len(json.dumps(value)) if value is not None else 0
