"""The server side of MCP over streamable HTTP: one message in, its answer out. What the tools are, subclasses say.

It keeps nothing between requests but the calls in flight: a client's session outlives a restart, and costs nothing.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import anyio

from rollcage.json_safe import on_one_line
from rollcage.mcp.jsonrpc import (
    ABOUT_US,
    CANCELLED,
    HANDSHAKE_VERSIONS,
    INTERNAL_ERROR,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MODERN_VERSIONS,
    PARSE_ERROR,
    Malformed,
    RpcRefused,
    RpcRequest,
    checked,
    error,
    json_of_message,
    notification,
    result,
)
from rollcage.types import JsonObject

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ToolServer(ABC):
    """Answers MCP requests; `answer` gets each HTTP request that came to the endpoint."""

    instructions = ""
    """What clients are told about the tools as a whole."""

    def __init__(self) -> None:
        self._calls: dict[object, anyio.CancelScope] = {}

    @abstractmethod
    async def list_tools(self) -> Sequence[JsonObject]:
        """The tools as MCP writes them; RpcRefused where they cannot be listed."""

    @abstractmethod
    async def call_tool(self, request: RpcRequest, scope: Scope, reply: RpcReply) -> str:
        """Call one; the JSON-RPC response. `reply` can tell how it goes meanwhile."""

    def reply_to(self, request: RpcRequest, send: Send) -> RpcReply:
        """How a tool call is answered."""
        return RpcReply(send)

    def owner(self, scope: Scope) -> str:
        """Whose request this is: session ids are what clients say, and one must not cancel another's calls."""
        return ""

    def stop(self) -> None:
        """Cut the calls in flight."""
        for scope in list(self._calls.values()):
            scope.cancel()

    async def answer(self, scope: Scope, body: bytes | None, receive: Receive, send: Send) -> None:
        """One HTTP request, whose body was read already; None: there was no room for it."""
        headers = headers_of(scope)
        if scope["method"] == "DELETE":
            self._end_session(self.owner(scope), headers.get("mcp-session-id", ""))
            await RpcReply(send).end(None, status=204)
        elif scope["method"] != "POST":
            # There is nothing to tell outside of requests, so there is no stream to open with GET.
            said = error(None, INVALID_REQUEST, "POST requests here; there is no stream to GET")
            await RpcReply(send, headers=((b"allow", b"POST, DELETE"),)).end(said, status=405)
        else:
            await self._post(scope, headers, body, receive, send)

    async def _post(
        self, scope: Scope, headers: Mapping[str, str], body: bytes | None, receive: Receive, send: Send
    ) -> None:
        message: object = None
        try:
            if body is None:
                raise RpcRefused(PARSE_ERROR, "the body is too large, or broke off", status=400)
            message = json_of_message(body)
            await self._message(checked(message, headers), scope, receive, send)
        except Malformed:
            await RpcReply(send).end(error(None, PARSE_ERROR, "the body is not JSON"), status=400)
        except RpcRefused as refused:
            given = message.get("id") if isinstance(message, dict) else None
            said = error(given if isinstance(given, str | int) else None, refused.code, refused.message, refused.data)
            await RpcReply(send).end(said, status=refused.status)

    async def _message(self, request: RpcRequest, scope: Scope, receive: Receive, send: Send) -> None:
        if request.id is None or not request.method:
            if request.method == "notifications/cancelled" and not request.modern:
                self._cancel(self.owner(scope), request)
            await RpcReply(send).end(None, status=202)
        elif request.method == "tools/call":
            await self._call(request, scope, receive, send)
        elif request.method == "initialize" and not request.modern:
            session = ((b"mcp-session-id", secrets.token_hex(16).encode()),)
            await RpcReply(send, headers=session).end(result(request.id, self._initialized(request)))
        else:
            await RpcReply(send).end(_written(request, await self._simple(request)))

    async def _call(self, request: RpcRequest, scope: Scope, receive: Receive, send: Send) -> None:
        reply = self.reply_to(request, send)
        said, status, gone = "", 200, False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            # Without a session nobody can name the call to cancel it; closing the connection does.
            key = (self.owner(scope), request.session, request.id) if request.session else object()
            self._calls[key] = tasks.cancel_scope
            tasks.start_soon(watch)
            try:
                said = await self.call_tool(request, scope, reply)
            except RpcRefused as refused:  # told below: a task group would put it into a group of its own
                said, status = error(request.id, refused.code, refused.message, refused.data), refused.status
            finally:
                self._calls.pop(key, None)
                tasks.cancel_scope.cancel()
        if said:
            await reply.end(said, status=status)
        elif not gone:
            await reply.end(error(request.id, CANCELLED, "cancelled on request"))

    async def _simple(self, request: RpcRequest) -> JsonObject:
        """The result of a request that starts nothing."""
        cached = {"ttlMs": 60_000, "cacheScope": "public"} if request.modern else {}
        if request.method == "tools/list":
            return {"tools": list(await self.list_tools()), **cached, **request.extra}
        if request.method == "ping" and not request.modern:
            return {}
        if request.method == "server/discover" and request.modern:
            versions = {"supportedVersions": list(MODERN_VERSIONS), "capabilities": {"tools": {"listChanged": False}}}
            return {**versions, **self._instructed(), **cached, **request.extra}
        status = 404 if request.modern else 200
        raise RpcRefused(METHOD_NOT_FOUND, f"method not found: {request.method[:100]}", status=status)

    def _initialized(self, request: RpcRequest) -> JsonObject:
        asked = request.params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": ABOUT_US,
            **self._instructed(),
        }

    def _instructed(self) -> JsonObject:
        return {"instructions": self.instructions} if self.instructions else {}

    def _cancel(self, owner: str, request: RpcRequest) -> None:
        named = request.params.get("requestId")
        if isinstance(named, str | int) and (scope := self._calls.get((owner, request.session, named))):
            scope.cancel()

    def _end_session(self, owner: str, session: str) -> None:
        for key, scope in list(self._calls.items()):
            if session and isinstance(key, tuple) and key[:2] == (owner, session):
                scope.cancel()


class RpcReply:
    """Sends one answer. Nothing goes out before there is something to say or the connection must be kept alive.

    Plain JSON may begin with white space: that is what keeps the connection alive while a call runs.
    """

    def __init__(self, send: Send, *, stream: bool = False, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """`stream`: as server-sent events, which can tell progress on the way."""
        self._send, self._stream, self._headers = send, stream, headers
        self._begun = self._ended = False
        self._lock = anyio.Lock()

    @property
    def tells(self) -> bool:
        """Whether it can carry notifications."""
        return self._stream

    async def keep_alive(self) -> None:
        """Show intermediaries that somebody is there."""
        await self._write(b": still running\n\n" if self._stream else b"\n")

    async def tell(self, method: str, params: JsonObject) -> None:
        """A notification; only a stream can carry one."""
        if self._stream:
            await self._write(_event(notification(method, params)))

    async def end(self, text: str | None, *, status: int = 200) -> None:
        """The answer itself; None is an answer without a body."""
        async with self._lock:
            body = b"" if text is None else _event(text) if self._stream else _bytes(text)
            if not self._begun:
                sized = None if self._stream else len(body)
                await self._begin(status, sized=sized, typed=text is not None)
            self._ended = True
            await self._send({"type": "http.response.body", "body": body})

    async def _write(self, body: bytes) -> None:
        async with self._lock:
            if self._ended:
                return
            if not self._begun:
                await self._begin(200)
            await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def _begin(self, status: int, *, sized: int | None = None, typed: bool = True) -> None:
        self._begun = True
        headers = [*self._headers, (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        if typed:
            headers.append((b"content-type", b"text/event-stream" if self._stream else b"application/json"))
        if sized is not None:
            headers.append((b"content-length", str(sized).encode()))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of a request, by their names in small letters."""
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _written(request: RpcRequest, value: JsonObject) -> str:
    try:
        return result(request.id, value)
    except (ValueError, RecursionError) as broken:
        raise RpcRefused(INTERNAL_ERROR, "the answer cannot be written as JSON") from broken


def _event(text: str) -> bytes:
    return b"event: message\ndata: " + on_one_line(_bytes(text)) + b"\n\n"


def _bytes(text: str) -> bytes:
    # Half a surrogate pair, which JSON can name but UTF-8 cannot, stays the escape that it was.
    return text.encode(errors="backslashreplace")
