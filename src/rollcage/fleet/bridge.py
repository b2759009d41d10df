"""Serves the tools of a remote environment to an agent in a box, as an MCP endpoint on a socket.

What is served is the tools and nothing else: no reset, no step, no state, no key, no address of the environment. The
credentials are added out here, by the `tools` that calls are handed to. The client is hostile: bodies and connections
are bounded, and when the block ends, calls in flight are cut.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any, Protocol

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollcage.errors import UsageError
from rollcage.fleet.errors import EndpointDown, ToolError, ToolFailed, ToolNotFound
from rollcage.fleet.session import own_version
from rollcage.fleet.types import ListToolsAction, ToolResult
from rollcage.types import JsonObject, Value

PATH = "/mcp"
"""Where the agent finds the endpoint: http://127.0.0.1:PORT/mcp."""
VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26")
"""The protocol versions that are spoken; the newest is offered to whoever asks for another."""
LARGEST = 4 << 20
"""Bytes of one request."""
ROOM = 16 << 20
"""Bytes of all requests that are under way; what is read of them takes several times as much."""
CONNECTIONS = 128
"""How many at once."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Tools(Protocol):
    """What is served: `FleetMCPTools`, or anything like it."""

    async def list_tools(self) -> ListToolsAction: ...
    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult: ...


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
    config = uvicorn.Config(
        app,
        http=_Connection,
        lifespan="off",
        ws="none",
        log_config=None,
        server_header=False,
        limit_concurrency=CONNECTIONS,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Its startup alone: serve() would take over the process's signals and wake up ten times a second.
    await server.startup(sockets=[sock])
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            app.stop()
            for listener in server.servers:
                listener.close()
            while server.server_state.connections or server.server_state.tasks:
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
                tasks = list(server.server_state.tasks)
                await (asyncio.wait(tasks, timeout=0.05) if tasks else asyncio.sleep(0))


class _Connection(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False

    def connection_made(self, transport: Any) -> None:
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does this only for sockets made with an explicit protocol number; else answers wait for 40 ms.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)


class _Refused(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _App:
    """JSON-RPC over POST; every answer is one JSON document."""

    def __init__(self, tools: Tools, record: Record | None) -> None:
        self._tools, self._record = tools, record
        self._calls: dict[tuple[str, Any], anyio.CancelScope] = {}
        self._held = 0

    def stop(self) -> None:
        """Cut the calls in flight."""
        for scope in list(self._calls.values()):
            scope.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["path"].rstrip("/") != PATH:
            await _send(send, 404, {"error": "not found"})
        elif scope["method"] == "DELETE":
            await _send(send, 200, {})
        elif scope["method"] != "POST":
            # There is nothing to tell unasked, and a client may try.
            await _send(send, 405, {"error": "only POST"}, {b"allow": b"POST, DELETE"})
        else:
            async with self._body(receive) as body:
                await self._post(scope, body, receive, send)

    @asynccontextmanager
    async def _body(self, receive: Receive) -> AsyncIterator[bytes | None]:
        """What was sent, while there is room for it; nothing, where there is none or the client went away."""
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

    async def _post(self, scope: Scope, body: bytes | None, receive: Receive, send: Send) -> None:
        message = _message(body)
        if message is None:
            problem = {"code": -32700, "message": "this is no JSON-RPC message, or a very large one"}
            await _send(send, 400, {"jsonrpc": "2.0", "id": None, "error": problem})
            return
        session = dict(scope["headers"]).get(b"mcp-session-id", b"").decode("latin-1")
        number, method = message.get("id"), str(message.get("method", ""))
        parameters = message.get("params")
        parameters = parameters if isinstance(parameters, dict) else {}
        if "id" not in message or "method" not in message:
            if method == "notifications/cancelled":
                self._cancel(session, parameters.get("requestId"))
            await _send(send, 202, None)
            return
        headers: dict[bytes, bytes] = {}
        answer: JsonObject = {"jsonrpc": "2.0", "id": number}
        if method == "initialize":
            headers[b"mcp-session-id"] = secrets.token_urlsafe(16).encode()
        try:
            answer["result"] = await self._answer((session, _key(number)), method, parameters, receive)
        except _Refused as refused:
            answer["error"] = {"code": refused.code, "message": str(refused)}
        try:
            await _send(send, 200, answer, headers)
        except (ValueError, RecursionError):
            said = {"code": -32603, "message": "the tool's answer cannot be written as JSON"}
            known = number if isinstance(number, str | int) else None
            await _send(send, 200, {"jsonrpc": "2.0", "id": known, "error": said}, headers)

    async def _answer(self, key: tuple[str, Any], method: str, parameters: JsonObject, receive: Receive) -> JsonObject:
        if method == "initialize":
            asked = parameters.get("protocolVersion")
            spoken = asked if asked in VERSIONS else VERSIONS[0]
            about = {"name": "rollcage", "version": own_version()}
            return {"protocolVersion": spoken, "capabilities": {"tools": {}}, "serverInfo": about}
        if method == "ping":
            return {}
        if method == "tools/list":
            try:
                listed = await self._tools.list_tools()
            except ToolError as error:
                raise _Refused(-32603, _said(error)) from error
            return {"tools": [{**tool.raw, "name": tool.name} for tool in listed.offered]}
        if method == "tools/call":
            return await self._call(key, parameters, receive)
        raise _Refused(-32601, f"there is no method {method[:100]!r} here")

    async def _call(self, key: tuple[str, Any], parameters: JsonObject, receive: Receive) -> JsonObject:
        name, arguments = parameters.get("name"), parameters.get("arguments")
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            raise _Refused(-32602, "a call needs the tool's name, and its arguments as an object")
        answer: JsonObject | None = None
        async with anyio.create_task_group() as tasks:
            self._calls[key] = tasks.cancel_scope
            tasks.start_soon(_until_gone, receive, tasks.cancel_scope)
            try:
                answer = await self._made(name, arguments)
            finally:
                self._calls.pop(key, None)
                tasks.cancel_scope.cancel()
        if answer is None:
            raise _Refused(-32800, "the call was cancelled")
        return answer

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

    def _cancel(self, session: str, number: Any) -> None:
        scope = self._calls.get((session, _key(number)))
        if scope:
            scope.cancel()


def _said(error: ToolError) -> str:
    """What the agent may read of it: no addresses, and nothing about keys."""
    if isinstance(error, EndpointDown):
        return "the environment does not answer" + ("; the call may have run" if error.may_have_run else "")
    if isinstance(error, ToolNotFound):
        return "there is no such tool"
    return str(error)


def _key(number: Any) -> Any:
    return number if isinstance(number, str | int) else repr(number)


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _message(body: bytes | None) -> JsonObject | None:
    try:
        message = json.loads(body or b"", parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


async def _send(send: Send, status: int, value: JsonObject | None, more: Mapping[bytes, bytes] | None = None) -> None:
    body = b"" if value is None else json.dumps(value, allow_nan=False).encode()
    headers = {b"content-type": b"application/json", b"content-length": str(len(body)).encode(), **(more or {})}
    await send({"type": "http.response.start", "status": status, "headers": list(headers.items())})
    await send({"type": "http.response.body", "body": body})
