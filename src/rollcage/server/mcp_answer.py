"""The answer to one MCP request as it goes out: plain JSON, or an event stream where progress is told on the way."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import anyio
from pydantic_core import to_json

from rollcage.api.writing import json_of, on_one_line
from rollcage.server.mcp_tools import ToolFailure
from rollcage.types import JsonObject, Value

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def dumped(value: object) -> str:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def result(request_id: object, value: object) -> str:
    """A JSON-RPC response."""
    return dumped({"jsonrpc": "2.0", "id": request_id, "result": value})


def error(request_id: object, code: int, message: str, data: object = None) -> str:
    """A JSON-RPC error."""
    wrong: JsonObject = {"code": code, "message": message}
    if data is not None:
        wrong["data"] = data
    return dumped({"jsonrpc": "2.0", "id": request_id, "error": wrong})


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


class Answer:
    """Sends one answer. Nothing goes out before there is something to say or the connection must be kept alive.

    Plain JSON may begin with white space: that is what keeps the connection alive while a rollout runs.
    """

    def __init__(self, send: Send, *, stream: bool = False, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self._send, self._stream, self._headers = send, stream, headers
        self._begun = self._ended = False
        self._lock = anyio.Lock()

    async def keep_alive(self) -> None:
        """Show intermediaries that somebody is there."""
        await self._write(b": still running\n\n" if self._stream else b"\n")

    async def tell(self, method: str, params: JsonObject) -> None:
        """A notification; only a stream can carry one."""
        if self._stream:
            await self._write(_event(dumped({"jsonrpc": "2.0", "method": method, "params": params})))

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


def _event(text: str) -> bytes:
    return b"event: message\ndata: " + on_one_line(_bytes(text)) + b"\n\n"


def _bytes(text: str) -> bytes:
    # Half a surrogate pair, which JSON can name but UTF-8 cannot, stays the escape that it was.
    return text.encode(errors="backslashreplace")
