"""MCP servers of a task that run in its box, each a command: their tools as one union, which the agent is offered.

They speak by lines on their standard streams. They lie where the agent could have written, so nothing they say is
trusted: lines and times are bounded, and one that breaks ends as an error of the call.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, TaskGroup

from rollcage.environments.base import Environment
from rollcage.errors import EnvironmentFailed
from rollcage.json_safe import json_safe
from rollcage.mcp.convert import Union
from rollcage.mcp.errors import EndpointDown, ToolFailed, ToolNotFound, ToolTimeout
from rollcage.mcp.jsonrpc import ABOUT_US, HANDSHAKE_VERSIONS
from rollcage.mcp.types import ListToolsAction, ToolResult, Tools
from rollcage.types import JsonObject, Task

START_S, CALL_S = 60.0, 300.0
LONGEST_LINE = 8 << 20
_MOST_PAGES = 50
_COMPLAINT, _COMPLAINT_S = 4096, 2.0
"""What is kept of what a server printed on standard error, and how long its end is waited for."""


class Streams(Protocol):
    """A running command."""

    @property
    def stdin(self) -> ByteSendStream:
        """What it reads."""

    @property
    def stdout(self) -> ByteReceiveStream:
        """What it says."""

    @property
    def stderr(self) -> ByteReceiveStream:
        """What it complains of."""


class SpawnsInBox(Protocol):
    """What is needed of a sandbox: commands in it."""

    def spawn(self, argv: Sequence[str], *, cwd: str) -> AbstractAsyncContextManager[Any]:
        """Start one; it is dead when the block is left."""


class BoxTools:
    """The tools of servers that were started."""

    def __init__(self, tasks: TaskGroup) -> None:
        """`tasks`: in which what servers print on standard error is read, for as long as they run."""
        self._union, self._tasks = Union("prefix"), tasks
        self._servers: dict[str, _Spoken] = {}

    async def add(self, name: str, streams: Streams) -> None:
        """Shake hands with a server, and ask what it offers; EnvironmentFailed where it does not answer."""
        server = _Spoken(name, streams)
        self._tasks.start_soon(server.hear_complaints)
        about = {"protocolVersion": HANDSHAKE_VERSIONS[-1], "capabilities": {}, "clientInfo": ABOUT_US}
        listed: list[JsonObject] = []
        try:
            with anyio.fail_after(START_S):
                await server.ask("initialize", about)
                await server.tell("notifications/initialized")
                cursor: object = None
                for _ in range(_MOST_PAGES):
                    page = await server.ask("tools/list", {"cursor": cursor} if cursor else {})
                    listed += [tool for tool in page.get("tools") or () if isinstance(tool, dict)]
                    if not (cursor := page.get("nextCursor")):
                        break
        except TimeoutError:
            late = f"the MCP server {name!r} of the task had not answered after {START_S:g} s"
            raise EnvironmentFailed(f"{late}{server.complaint}", blame="task") from None
        except EndpointDown as error:
            raise EnvironmentFailed(str(error), blame="task") from error
        self._servers[name] = server
        self._union.add(name, listed)

    async def list_tools(self) -> ListToolsAction:
        """Every tool with its schema."""
        tools = list(self._union.tools.values())
        return ListToolsAction(tools=[tool.openai for tool in tools], offered=tools)

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Call one; raises a ToolError."""
        tool = self._union.find(name)
        if tool is None:
            raise ToolNotFound(f"there is no tool {name!r}")
        started, answer = anyio.current_time(), None
        with anyio.move_on_after(CALL_S):
            server = self._servers[tool.endpoint]
            answer = await server.ask("tools/call", {"name": tool.original, "arguments": dict(arguments or {})})
        if answer is None:
            raise ToolTimeout(f"{name} had not answered after {CALL_S:g} s", endpoint=tool.endpoint, may_have_run=True)
        content = [block for block in answer.get("content") or () if isinstance(block, dict)]
        result = ToolResult(
            tool=name,
            endpoint=tool.endpoint,
            content=content,
            structured=answer.get("structuredContent"),
            is_error=bool(answer.get("isError")),
            seconds=anyio.current_time() - started,
        )
        if result.is_error:
            raise ToolFailed(f"{name} failed", endpoint=tool.endpoint, result=result)
        return result


@asynccontextmanager
async def tools_for(task: Task, box: SpawnsInBox, environment: Environment | None) -> AsyncIterator[Tools | None]:
    """What the agent is offered beside its own tools: those of a remote environment, or of servers in the box, which
    run as long as the block lasts. None: nothing."""
    if environment and task.mcp_servers:
        raise EnvironmentFailed("a task that brings MCP servers along takes no remote environment beside them")
    started = [server for server in task.mcp_servers if server.command]
    if not started:
        yield environment.tools if environment else None
        return
    async with anyio.create_task_group() as tasks, AsyncExitStack() as stack:
        tools = BoxTools(tasks)
        for server in started:
            process = await stack.enter_async_context(box.spawn([server.command, *server.args], cwd=task.workdir))
            await tools.add(server.name, process)
        yield tools
        tasks.cancel_scope.cancel()


class _Spoken:
    """What is said with one server: one request at a time, a line each."""

    def __init__(self, name: str, streams: Streams) -> None:
        self._name, self._streams = name, streams
        self._read, self._number = bytearray(), 0
        self._turn = anyio.Lock()
        self._said, self._silent = bytearray(), anyio.Event()

    async def hear_complaints(self) -> None:
        """Read what it prints on standard error to the end: one that nobody reads stands still once a pipe is full."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in self._streams.stderr:
                self._said += chunk
                del self._said[:-_COMPLAINT]
        self._silent.set()

    @property
    def complaint(self) -> str:
        """The last that it printed there, to be put after what is wrong."""
        lines = self._said.decode(errors="replace").strip().splitlines()
        return f": {lines[-1][:400]}" if lines else ""

    async def tell(self, method: str) -> None:
        await self._send({"jsonrpc": "2.0", "method": method})

    async def ask(self, method: str, parameters: JsonObject) -> JsonObject:
        """The result; a JSON-RPC error is told as a failed call would be."""
        async with self._turn:
            self._number += 1
            number = self._number
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": parameters})
            while True:
                message = await self._message()
                if message.get("id") == number and "method" not in message:
                    break
        error, result = message.get("error"), message.get("result")
        if isinstance(error, dict):
            said = [{"type": "text", "text": str(error.get("message", "unknown error"))}]
            return {"content": said, "isError": True}
        if not isinstance(result, dict):
            raise self._down("answered with neither result nor error")
        return result

    async def _send(self, message: JsonObject) -> None:
        try:
            await self._streams.stdin.send(json.dumps(message).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            raise await self._ended() from error

    async def _message(self) -> JsonObject:
        """The next line that is a JSON object; whatever else it prints is passed over."""
        while True:
            while (end := self._read.find(b"\n")) < 0:
                if len(self._read) > LONGEST_LINE:
                    raise self._down("said a line without end")
                try:
                    self._read += await self._streams.stdout.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                    raise await self._ended() from error
            line = bytes(self._read[:end])
            del self._read[: end + 1]
            try:
                message = json_safe(json.loads(line))
            except (ValueError, RecursionError):
                continue
            if isinstance(message, dict):
                return message

    async def _ended(self) -> EndpointDown:
        with anyio.move_on_after(_COMPLAINT_S):
            await self._silent.wait()
        return self._down(f"has ended{self.complaint}")

    def _down(self, what: str) -> EndpointDown:
        return EndpointDown(f"the MCP server {self._name!r} of the task {what}", endpoint=self._name, may_have_run=True)
