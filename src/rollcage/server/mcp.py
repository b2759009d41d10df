"""The MCP endpoint at /mcp: streamable HTTP for every published protocol version, and the door to OpenEnv's own.

It keeps nothing between requests: a client's session outlives a restart of the server, and costs nothing while idle.
A request that speaks OpenEnv's JSON-RPC subset instead (same address, other shapes) goes to the environment's app.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import anyio

from rollcage.server.admission import caller_of
from rollcage.server.mcp_answer import Answer, Receive, Send, error, result, tool_result
from rollcage.server.mcp_request import (
    CANCELLED,
    HANDSHAKE_VERSIONS,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    MODERN_VERSIONS,
    SERVER,
    Refused,
    Request,
    malformed,
    parsed,
    speaks_mcp,
)
from rollcage.server.mcp_tools import TOOLS, Progress, Tool, ToolFailure, call, find
from rollcage.server.service import Service
from rollcage.types import JsonObject, Value

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEEP_ALIVE_S = 15.0
"""A call that takes longer than this shows a sign of life as often."""

_ABOUT = (
    "Runs coding agents on tasks in isolated boxes and brings back rollouts: reward, tokens, files. run_rollout waits "
    "for the end; start_rollout returns at once, and get_state, get_messages, subscribe_events, abort_rollout and "
    "finalize_rollout follow by rollout_id."
)


def build(service: Service, environment: App, *, keep_alive_s: float = KEEP_ALIVE_S) -> App:
    """The app that gets every request to /mcp; what is OpenEnv's it hands to `environment`."""
    return Endpoint(service, environment, keep_alive_s)


class Endpoint:
    """Answers MCP requests over HTTP."""

    def __init__(self, service: Service, environment: App, keep_alive_s: float) -> None:
        self._service, self._environment, self._keep_alive_s = service, environment, keep_alive_s
        self._calls: dict[tuple[str, str, object], anyio.CancelScope] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] != "http":
            await self._environment(scope, receive, send)
        else:
            await self._http(scope, receive, send)

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] == "POST":
            await self._post(scope, headers, receive, send)
        elif scope["method"] == "DELETE":
            self._end_session(caller_of(scope).name, headers.get("mcp-session-id", ""))
            await Answer(send).end(None, status=204)
        else:
            # There is nothing to tell outside of requests, so there is no stream to open with GET.
            answer = Answer(send, headers=((b"allow", b"POST, DELETE"),))
            await answer.end(error(None, INVALID_REQUEST, "POST requests here; there is no stream to GET"), status=405)

    async def _post(self, scope: Scope, headers: Mapping[str, str], receive: Receive, send: Send) -> None:
        raw = await _read(receive)
        try:
            body: object = json.loads(raw)
        except (ValueError, RecursionError):
            body = None
        if not speaks_mcp(headers, body):
            if wrong := malformed(body):
                await Answer(send).end(error(None, *wrong))
            else:
                await self._environment(scope, _replayed(raw, receive), send)
            return
        try:
            request = parsed(body, headers)
            await self._message(request, scope, receive, send)
        except Refused as refusal:
            request_id = body.get("id") if isinstance(body, dict) else None
            text = error(request_id, refusal.code, refusal.message, refusal.data)
            await Answer(send).end(text, status=refusal.status)

    async def _message(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        if request.id is None or not request.method:
            if request.method == "notifications/cancelled" and not request.modern:
                self._cancel(caller_of(scope).name, request)
            await Answer(send).end(None, status=202)
        elif request.method == "tools/call":
            await self._call(request, scope, receive, send)
        elif request.method == "initialize" and not request.modern:
            session = ((b"mcp-session-id", secrets.token_hex(16).encode()),)
            await Answer(send, headers=session).end(result(request.id, _initialized(request)))
        else:
            await Answer(send).end(result(request.id, _simple(request)))

    async def _call(self, request: Request, scope: Scope, receive: Receive, send: Send) -> None:
        tool = _found(request)
        accepts = "text/event-stream" in request.headers.get("accept", "")
        told = request.progress_token is not None and tool.is_slow and accepts and request.takes_large_events
        answer, progress = Answer(send, stream=told), Progress(wanted=told)
        said: list[Value | ToolFailure] = []
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            # Session ids are what clients say: whose it is tells the key.
            key = (caller_of(scope).name, request.session, request.id)
            if request.session:
                self._calls[key] = tasks.cancel_scope
            try:
                tasks.start_soon(watch)
                tasks.start_soon(self._tell, request, answer, progress)
                said.append(await self._said(request, tool, scope, progress))
            finally:
                self._calls.pop(key, None)
                tasks.cancel_scope.cancel()
        if said:
            written = tool_result(request.id, said[0], request.extra) if tool.is_brief else None
            if written is None:
                # It can be many megabytes; meanwhile the others go on.
                written = await anyio.to_thread.run_sync(tool_result, request.id, said[0], request.extra)
            await answer.end(written)
        elif not gone:
            await answer.end(error(request.id, CANCELLED, "cancelled on request"))

    async def _said(self, request: Request, tool: Tool, scope: Scope, progress: Progress) -> Value | ToolFailure:
        arguments = request.params.get("arguments")
        try:
            given = {} if arguments is None else arguments
            return await call(tool, given, self._service, caller_of(scope), progress, older=False)
        except ToolFailure as failure:
            return failure

    async def _tell(self, request: Request, answer: Answer, progress: Progress) -> None:
        """Show signs of life: how far it is to those who asked, white space or comments to the others."""
        began, seconds = time.monotonic(), 0.0
        while True:
            await progress.news(self._keep_alive_s)
            if progress.wanted:
                # Progress must grow with every notification, however soon it follows.
                seconds = round(max(time.monotonic() - began, seconds + 0.001), 3)
                told = {"progressToken": request.progress_token, "progress": seconds, "message": progress.words}
                await answer.tell("notifications/progress", told)
            else:
                await answer.keep_alive()

    def _cancel(self, caller: str, request: Request) -> None:
        named = request.params.get("requestId")
        if isinstance(named, str | int) and (scope := self._calls.get((caller, request.session, named))):
            scope.cancel()

    def _end_session(self, caller: str, session: str) -> None:
        for (owner, named, _), scope in list(self._calls.items()):
            if session and (owner, named) == (caller, session):
                scope.cancel()


def _initialized(request: Request) -> JsonObject:
    asked = request.params.get("protocolVersion")
    return {
        "protocolVersion": asked if asked in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1],
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": SERVER,
        "instructions": _ABOUT,
    }


def _simple(request: Request) -> JsonObject:
    """The result of a request that needs nobody's help."""
    cached = {"ttlMs": 60_000, "cacheScope": "public"} if request.modern else {}
    if request.method == "tools/list":
        return {"tools": [_listed(tool) for tool in TOOLS.values()], **cached, **request.extra}
    if request.method == "ping" and not request.modern:
        return {}
    if request.method == "server/discover" and request.modern:
        versions = {"supportedVersions": list(MODERN_VERSIONS), "capabilities": {"tools": {"listChanged": False}}}
        return {**versions, "instructions": _ABOUT, **cached, **request.extra}
    status = 404 if request.modern else 200
    raise Refused(METHOD_NOT_FOUND, f"method not found: {request.method}", status=status)


def _listed(tool: Tool) -> JsonObject:
    hints = {"readOnlyHint": tool.reads_only, "idempotentHint": tool.reads_only, "openWorldHint": False}
    if not tool.reads_only:
        hints["destructiveHint"] = tool.name == "abort_rollout"
    return {
        "name": tool.name,
        "description": tool.description,
        "inputSchema": tool.input_schema,
        "outputSchema": tool.output_schema,
        "annotations": hints,
    }


def _found(request: Request) -> Tool:
    try:
        return find(request.params.get("name"))
    except ToolFailure as failure:
        raise Refused(INVALID_PARAMS, failure.message, status=400 if request.modern else 200) from None


async def _read(receive: Receive) -> bytes:
    """The whole body; the gate before us has seen to it that it is not too long."""
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replayed(raw: bytes, receive: Receive) -> Receive:
    """The request as if nobody had read it yet."""
    fresh = True

    async def replay() -> MutableMapping[str, Any]:
        nonlocal fresh
        if not fresh:
            return await receive()
        fresh = False
        return {"type": "http.request", "body": raw, "more_body": False}

    return replay


async def _lifespan(receive: Receive, send: Send) -> None:
    """Nothing to open, nothing to close."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
