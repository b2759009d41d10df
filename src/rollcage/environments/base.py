"""What a remote environment is to a rollout: tools for the agent, and a reward once the agent is gone."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from rollcage.errors import EnvironmentFailed, SetupError, UsageError
from rollcage.events import EnvironmentOpened, Suspicion, ToolCalled
from rollcage.json_safe import json_safe
from rollcage.mcp.types import Tools
from rollcage.types import JsonObject, Task

if TYPE_CHECKING:
    from rollcage.mcp.bridge import ToolCall

PORT = 7002
"""Where the agent finds the tools, in every box."""
MOST = 64 << 10
"""Characters of one call's arguments, and of its answer, that go into the log."""
TOTAL = 16 << 20
"""Characters of all calls together; a runaway cannot fill the disk."""
OVERHEAD = 300
"""What a call takes at least."""

Log = Callable[[EnvironmentOpened | ToolCalled | Suspicion], Awaitable[object]]


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
        """What it says the agent earned; None where it judges nothing. EnvironmentLost where it is gone.

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


class ListensInBox(Protocol):
    """What is needed of a sandbox: a port in it that is served out here."""

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket; the box's own 127.0.0.1:`port` leads to it."""


@asynccontextmanager
async def ready(source: Environments, address: str, task: Task, log: Log) -> AsyncIterator[Environment]:
    """An instance that was reset and whose tools answer."""
    from rollcage.environments.failures import boundary

    used = False
    try:
        async with source.open(address.partition(":")[2]) as environment:
            await environment.reset(task.environment_seed)
            with boundary(address):
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
        await log(Suspicion(code="environment_not_released", what=f"the remote environment was not released: {error}"))


@asynccontextmanager
async def offered(tools: Tools | None, box: ListensInBox, log: Log) -> AsyncIterator[str]:
    """The address, in the box, of an MCP endpoint with these tools; each call goes into the log.

    At the end of the block nobody listens there any more, and calls in flight are cut. Empty without tools.
    """
    if tools is None:
        yield ""
        return
    from rollcage.mcp.bridge import PATH, serve_tools

    logged = 0

    async def record(call: ToolCall) -> None:
        nonlocal logged
        if logged >= TOTAL:
            return
        event = called(call)
        logged += OVERHEAD + len(event.answer) + len(str(event.arguments))
        await log(event)
        if logged >= TOTAL:
            await log(
                Suspicion(code="tool_calls_left_out", what="so many tool calls that the log keeps no more of them")
            )

    async with box.listen(PORT) as sock, serve_tools(tools, sock, record=record):
        yield f"http://127.0.0.1:{PORT}{PATH}"


def called(call: ToolCall) -> ToolCalled:
    """A call as the log keeps it."""
    arguments: JsonObject = json_safe(call.arguments)
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


def check_address(scheme: str, place: str) -> None:
    """UsageError where this is no http address."""
    try:
        parts = urlsplit(place)
        right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and place.isprintable()
    except ValueError:  # a port or an IPv6 address that is not one
        right = False
    if not right:
        raise UsageError(
            f"{scheme}: is followed by an address, such as {scheme}:http://host:8000", argument="environment"
        )
    if parts.username or parts.password:
        raise UsageError("an address may hold no user name or password; it goes into the log", argument="environment")


def check_package(name: str, extra: str) -> None:
    """SetupError where a package is missing."""
    if find_spec(name) is None:
        raise SetupError(f"environment: the package {name} is not installed: pip install 'rollcage[{extra}]'")
