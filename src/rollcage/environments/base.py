"""What a remote environment is to a rollout: tools for the agent, and a reward once the agent is gone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from rollcage._packing import tamed
from rollcage.errors import EnvironmentFailed
from rollcage.events import EnvironmentOpened, Noticed, ToolCalled
from rollcage.sandboxes.base import Sandbox
from rollcage.types import JsonObject, Task

if TYPE_CHECKING:
    from rollcage.fleet.bridge import ToolCall
    from rollcage.fleet.types import ListToolsAction, ToolResult

PORT = 7002
"""Where the agent finds the tools, in every box."""
MOST = 64 << 10
"""Characters of one call's arguments, and of its answer, that go into the log."""
TOTAL = 16 << 20
"""Characters of all calls together; a runaway cannot fill the disk."""
OVERHEAD = 300
"""What a call takes at least."""

Log = Callable[[EnvironmentOpened | ToolCalled | Noticed], Awaitable[object]]


class Tools(Protocol):
    """What the agent may use: these two, and nothing else of the environment."""

    async def list_tools(self) -> ListToolsAction:
        """Every tool with its schema."""

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Call one; raises a ToolError."""


class Environment(Protocol):
    """One instance, for one rollout. Errors are EnvironmentFailed and what is below it."""

    @property
    def name(self) -> str:
        """What it calls itself, with its version."""

    @property
    def instance_id(self) -> str:
        """Which instance of it; empty where it does not tell."""

    @property
    def tools(self) -> Tools:
        """The agent's plane."""

    async def reset(self, seed: int | None) -> None:
        """Put it to its start; ResetFailed where it refuses."""

    async def reward(self, task: Task) -> float | None:
        """What it says the agent earned; null where it judges nothing. EnvironmentLost where it is gone.

        ScoringError where it tried to judge and could not: that is no 0.
        """


class Environments(Protocol):
    """All environments whose addresses begin with the same word."""

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must never be seen in a log."""

    def check(self, place: str, task: Task) -> None:
        """UsageError where the rest of the address or the task makes no sense, or a key is missing.

        Nothing is started.
        """

    def open(self, place: str) -> AbstractAsyncContextManager[Environment]:
        """An instance of one's own, released at the end of the block whatever happens."""


@asynccontextmanager
async def ready(source: Environments, address: str, task: Task, log: Log) -> AsyncIterator[Environment]:
    """An instance that was reset and whose tools answer."""
    from rollcage.environments.failures import named

    used = False
    try:
        async with source.open(address.partition(":")[2]) as environment:
            await environment.reset(task.environment_seed)
            with named(address):
                listed = await environment.tools.list_tools()
            opened = EnvironmentOpened(
                address=address, name=environment.name, instance_id=environment.instance_id, tools=tuple(listed.names)
            )
            await log(opened)
            yield environment
            used = True
    except EnvironmentFailed as error:
        if not used:
            raise
        # The rollout is over and judged; whatever keeps the instance from being released does not undo that.
        await log(Noticed(what=f"the remote environment was not released: {error}"))


@asynccontextmanager
async def offered(environment: Environment | None, box: Sandbox, log: Log) -> AsyncIterator[str]:
    """The address, in the box, of an MCP endpoint with the environment's tools; each call goes into the log.

    At the end of the block nobody listens there any more, and calls in flight are cut. Empty without an environment.
    """
    if environment is None:
        yield ""
        return
    from rollcage.fleet.bridge import PATH, serve_tools

    logged = 0

    async def record(call: ToolCall) -> None:
        nonlocal logged
        if logged >= TOTAL:
            return
        event = called(call)
        logged += OVERHEAD + len(event.answer) + len(str(event.arguments))
        await log(event)
        if logged >= TOTAL:
            await log(Noticed(what="so many tool calls that the log keeps no more of them"))

    async with box.listen(PORT) as sock, serve_tools(environment.tools, sock, record=record):
        yield f"http://127.0.0.1:{PORT}{PATH}"


def called(call: ToolCall) -> ToolCalled:
    """A call as the log keeps it."""
    arguments: JsonObject = tamed(call.arguments)
    written = json.dumps(arguments, ensure_ascii=False)
    if len(written) > MOST:
        arguments = {"...": written[:MOST]}
    answer = call.result.text if call.result else ""
    return ToolCalled(
        name=call.name[:200],
        arguments=arguments,
        answer=answer[:MOST],
        failed=_failed(call),
        error=call.error[:2000],
        seconds=call.seconds,
    )


def _failed(call: ToolCall) -> bool:
    return call.result is None or call.result.is_error
