"""Serves the tools of a remote environment to an agent in a box, as an MCP endpoint on a socket.

What is served is the tools and nothing else: no reset, no step, no state, no key, no address of the environment. The
credentials are added out here, by the `tools` that calls are handed to. The client is hostile: bodies and connections
are bounded, and when the block ends, calls in flight are cut.
"""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from rollcage.asgi import serve, stop
from rollcage.errors import UsageError
from rollcage.mcp.errors import EndpointDown, ToolError, ToolFailed, ToolNotFound
from rollcage.mcp.jsonrpc import INTERNAL_ERROR, INVALID_PARAMS, RpcRefused, RpcRequest, dumped, result
from rollcage.mcp.server import Receive, RpcReply, Scope, Send, ToolServer
from rollcage.mcp.types import ToolResult, Tools
from rollcage.types import JsonObject, Value

PATH = "/mcp"
"""Where the agent finds the endpoint: http://127.0.0.1:PORT/mcp."""
LARGEST = 4 << 20
"""Bytes of one request."""
ROOM = 16 << 20
"""Bytes of all requests that are under way; what is read of them takes several times as much."""
CONNECTIONS = 128
"""How many at once."""


class ToolCall(Value):
    """One call that the agent made, for the log."""

    name: str
    arguments: JsonObject
    result: ToolResult | None = None
    """The answer, also where the tool says that it failed."""
    error: str = ""
    """Why there is none."""
    seconds: float


Record = Callable[[ToolCall], Awaitable[object]]


@asynccontextmanager
async def serve_tools(tools: Tools, sock: socket.socket, *, record: Record | None = None) -> AsyncIterator[None]:
    """Serve them on a listening socket until the end of the block. Each call is recorded before it is answered."""
    app = _App(tools, record)
    server = await serve(app, sock, connections=CONNECTIONS)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            app.stop()
            await stop(server)


class _App(ToolServer):
    """One endpoint, over the tools; every answer is one JSON document."""

    def __init__(self, tools: Tools, record: Record | None) -> None:
        super().__init__()
        self._tools, self._record = tools, record
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["path"].rstrip("/") != PATH:
            await RpcReply(send).end(dumped({"error": "not found"}), status=404)
            return
        async with self._body(receive) as body:
            await self.answer(scope, body, receive, send)

    @asynccontextmanager
    async def _body(self, receive: Receive) -> AsyncIterator[bytes | None]:
        """What was sent, while there is room for it; None where there is no room or the client went away."""
        parts: list[bytes] = []
        size = 0
        more = True
        try:
            while more and size <= LARGEST and self._held <= ROOM:
                message = await receive()
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._held += len(parts[-1])
                more = message["type"] == "http.disconnect" or message.get("more_body", False)
                if message["type"] == "http.disconnect":
                    break
            yield None if more or size > LARGEST else b"".join(parts)
        finally:
            self._held -= size

    async def list_tools(self) -> Sequence[JsonObject]:
        """What is offered, under the names that agents call."""
        try:
            listed = await self._tools.list_tools()
        except ToolError as failed:
            raise RpcRefused(INTERNAL_ERROR, _said(failed)) from failed
        return [{**tool.raw, "name": tool.name} for tool in listed.offered]

    async def call_tool(self, request: RpcRequest, scope: Scope, reply: RpcReply) -> str:
        """Call one, and record it."""
        name, arguments = request.params.get("name"), request.params.get("arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise RpcRefused(INVALID_PARAMS, "a call needs the tool's name, and its arguments as an object")
        answer = await self._made(name, arguments)
        try:
            return result(request.id, {**answer, **request.extra})
        except (ValueError, RecursionError) as broken:
            raise RpcRefused(INTERNAL_ERROR, "the tool's answer cannot be written as JSON") from broken

    async def _made(self, name: str, arguments: JsonObject) -> JsonObject:
        started = time.monotonic()
        result: ToolResult | None = None
        error = ""
        try:
            result = await self._tools.call_tool(name, arguments)
        except ToolFailed as failed:
            result = failed.result
        except ToolError as failed:
            error = str(failed)
            said = _said(failed)
        except UsageError as wrong:
            error = said = str(wrong)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self._note(name, arguments, started, None, "the call was cancelled; it may have run")
            raise
        await self._note(name, arguments, started, result, error)
        if result is None:
            return {"content": [{"type": "text", "text": said}], "isError": True}
        answer: JsonObject = {"content": result.content, "isError": result.is_error}
        if result.structured is not None:
            answer["structuredContent"] = result.structured
        return answer

    async def _note(
        self, name: str, arguments: JsonObject, started: float, result: ToolResult | None, error: str
    ) -> None:
        if self._record:
            seconds = time.monotonic() - started
            await self._record(ToolCall(name=name, arguments=arguments, result=result, error=error, seconds=seconds))


def _said(error: ToolError) -> str:
    """What the agent may read of it: no addresses, and nothing about keys."""
    if isinstance(error, EndpointDown):
        return "the environment does not answer" + ("; the call may have run" if error.may_have_run else "")
    if isinstance(error, ToolNotFound):
        return "there is no such tool"
    return str(error)
