"""The MCP endpoint at /mcp: the rollout tools for every published protocol version, beside OpenEnv's own.

A request that speaks OpenEnv's JSON-RPC subset instead (same address, other shapes) goes to the environment's app.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

import anyio
from pydantic_core import to_json

from rollcage.mcp.jsonrpc import (
    INVALID_PARAMS,
    INVALID_REQUEST,
    PARSE_ERROR,
    Malformed,
    RpcRefused,
    RpcRequest,
    dumped,
    error,
    json_of_message,
)
from rollcage.mcp.server import Receive, RpcReply, Scope, Send, ToolServer, headers_of
from rollcage.schema.writing import json_of
from rollcage.server.auth import caller_of
from rollcage.server.mcp_call import CallProgress, RolloutTool, ToolFailure, call
from rollcage.server.mcp_tools import EVERY_TOOL, find
from rollcage.server.service import Service
from rollcage.types import JsonObject, Value

App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEEP_ALIVE_S = 15.0
"""A call that takes longer than this shows a sign of life as often."""


def build(service: Service, environment: App, *, keep_alive_s: float = KEEP_ALIVE_S) -> App:
    """The app that gets every request to /mcp; what is OpenEnv's it hands to `environment`."""
    return RolloutToolServer(service, environment, keep_alive_s)


class RolloutToolServer(ToolServer):
    """The rollout tools over MCP."""

    instructions = (
        "Runs coding agents on tasks in isolated boxes and brings back rollouts: reward, tokens, files. run_rollout "
        "waits for the end; start_rollout returns at once, and get_state, get_messages, subscribe_events, "
        "abort_rollout and finalize_rollout follow by rollout_id."
    )

    def __init__(self, service: Service, environment: App, keep_alive_s: float) -> None:
        super().__init__()
        self._service, self._environment, self._keep_alive_s = service, environment, keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        elif scope["type"] != "http":
            await self._environment(scope, receive, send)
        else:
            raw = await _read(receive) if scope["method"] == "POST" else b""
            if scope["method"] == "POST" and not speaks_mcp(headers_of(scope), body := _parsed(raw)):
                await self._openenv(scope, raw, body, receive, send)
            else:
                await self.answer(scope, raw, receive, send)

    async def _openenv(self, scope: Scope, raw: bytes, body: object, receive: Receive, send: Send) -> None:
        if wrong := malformed(body):
            await RpcReply(send).end(error(None, *wrong))
        else:
            await self._environment(scope, _replayed(raw, receive), send)

    def owner(self, scope: Scope) -> str:
        """The name of the caller's key."""
        return caller_of(scope).name

    async def list_tools(self) -> Sequence[JsonObject]:
        """Every rollout tool."""
        return [_listed(tool) for tool in EVERY_TOOL.values()]

    def reply_to(self, request: RpcRequest, send: Send) -> RpcReply:
        """As a stream where the client wants to hear how a long call goes, and can."""
        tool = _found(request)
        accepts = "text/event-stream" in request.headers.get("accept", "")
        told = request.progress_token is not None and tool.is_slow and accepts and request.takes_large_events
        return RpcReply(send, stream=told)

    async def call_tool(self, request: RpcRequest, scope: Scope, reply: RpcReply) -> str:
        """Call one, with signs of life while it runs."""
        tool, progress = _found(request), CallProgress(wanted=reply.tells)
        arguments = request.params.get("arguments")
        answer: Value | ToolFailure
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._tell, request, reply, progress)
            try:
                given = {} if arguments is None else arguments
                answer = await call(tool, given, self._service, caller_of(scope), progress, older=False)
            except ToolFailure as failure:
                answer = failure
            tasks.cancel_scope.cancel()
        if tool.is_brief:
            return tool_result(request.id, answer, request.extra)
        # It can be many megabytes; meanwhile the others go on.
        return await anyio.to_thread.run_sync(tool_result, request.id, answer, request.extra)

    async def _tell(self, request: RpcRequest, reply: RpcReply, progress: CallProgress) -> None:
        """Show signs of life: how far it is to those who asked, white space or comments to the others."""
        began, seconds = time.monotonic(), 0.0
        while True:
            await progress.news(self._keep_alive_s)
            if progress.wanted:
                # Progress must grow with every notification, however soon it follows.
                seconds = round(max(time.monotonic() - began, seconds + 0.001), 3)
                told = {"progressToken": request.progress_token, "progress": seconds, "message": progress.words}
                await reply.tell("notifications/progress", told)
            else:
                await reply.keep_alive()


def tool_result(request_id: object, answer: Value | ToolFailure, extra: JsonObject) -> str:
    """The response to a tool call: the answer as structured content, and the same as one block of JSON text."""
    if isinstance(answer, ToolFailure):
        text, structured, failed = dumped(answer.message), dumped(answer.problem), True
    else:
        # Results can be many megabytes: they are turned into text once and then put in twice as they are.
        structured = json_of(answer).decode()
        text, failed = to_json(structured).decode(), False
    shell = dumped({"isError": failed, **extra})
    content = f'{{"content":[{{"type":"text","text":{text}}}],"structuredContent":{structured},{shell[1:]}'
    return f'{{"jsonrpc":"2.0","id":{dumped(request_id)},"result":{content}}}'


def speaks_mcp(headers: Mapping[str, str], body: object) -> bool:
    """Whether a POST is MCP; otherwise it is OpenEnv's JSON-RPC subset, which shares the address."""
    method, params = (body.get("method"), body.get("params")) if isinstance(body, dict) else (None, None)
    method = method if isinstance(method, str) else ""
    if method.startswith("openenv/") or (isinstance(params, dict) and "session_id" in params):
        return False
    if "mcp-session-id" in headers or "mcp-protocol-version" in headers:
        return True
    if "text/event-stream" in headers.get("accept", ""):
        return True
    return method in ("initialize", "ping", "server/discover") or method.startswith("notifications/")


def malformed(body: object) -> tuple[int, str] | None:
    """What is wrong with a message for OpenEnv. Its own words repeat the message, and there may be a key in it."""
    if body is None:
        return PARSE_ERROR, "Parse error"
    if not isinstance(body, dict) or body.get("jsonrpc") != "2.0" or not isinstance(body.get("method"), str):
        return INVALID_REQUEST, "Invalid request: it must be one JSON-RPC 2.0 message with a method"
    if body.keys() - {"jsonrpc", "method", "params", "id"} or not isinstance(body.get("params", {}), dict):
        return INVALID_REQUEST, "Invalid request: beside jsonrpc, method and id there may be params, an object"
    if not isinstance(body.get("id"), str | int | None):
        return INVALID_REQUEST, "Invalid request: id must be text or a whole number"
    return None


def _listed(tool: RolloutTool) -> JsonObject:
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


def _found(request: RpcRequest) -> RolloutTool:
    try:
        return find(request.params.get("name"), EVERY_TOOL)
    except ToolFailure as failure:
        raise RpcRefused(INVALID_PARAMS, failure.message, status=400 if request.modern else 200) from None


def _parsed(raw: bytes) -> object:
    try:
        return json_of_message(raw)
    except Malformed:
        return None


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
