"""An MCP endpoint that nobody vouches for: it says whatever a test makes it say, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio

from rollcage.simulators.fleet.listener import LoopbackListener

JSON = {"content-type": "application/json"}
EVENTS = {"content-type": "text/event-stream"}
Write = Callable[[bytes], Awaitable[None]]
Body = Callable[[Write, dict[str, Any]], Awaitable[None]]


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class Hostile:
    """Shakes hands and lists tools as it should, unless told otherwise; `says` is what becomes of a call."""

    def __init__(self) -> None:
        self.port = 0
        self.tools: list[Any] = [{"name": "look", "inputSchema": schema()}]
        self.asked: list[dict[str, Any]] = []
        """Every message that came."""
        self.authorization: list[str] = []
        self.says: dict[str, tuple[int, dict[str, str], Body]] = {}
        """By method: status, headers and body instead of the usual answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/mcp"

    def answer(self, method: str, body: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """From now on this is the answer: text as it is; anything else is the result of a JSON-RPC answer."""

        async def write(send: Write, asked: dict[str, Any]) -> None:
            if isinstance(body, str | bytes):
                await send(body.encode() if isinstance(body, str) else body)
            else:
                await send(json.dumps({"jsonrpc": "2.0", "id": asked.get("id"), "result": body}).encode())

        self.says[method] = (status, headers or JSON, write)

    def stream(self, method: str, write: Body, headers: dict[str, str] | None = None) -> None:
        """From now on the answer is written by this."""
        self.says[method] = (200, headers or EVENTS, write)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        self.authorization.append(headers.get(b"authorization", b"").decode())
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        asked = json.loads(body) if body else {}
        self.asked.append(asked)
        status, said, write = self.says.get(asked.get("method", ""), (200, JSON, self._usual))
        raw = [(name.encode(), value.encode("latin-1")) for name, value in said.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

        async def more(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        await write(more, asked)
        await send({"type": "http.response.body", "body": b""})

    async def _usual(self, write: Write, asked: dict[str, Any]) -> None:
        results: dict[str, Any] = {
            "initialize": {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "hostile"}},
            "tools/list": {"tools": self.tools},
            "tools/call": {"content": [{"type": "text", "text": "fine"}]},
        }
        if "id" in asked:
            result = results.get(asked.get("method", ""), {})
            await write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode())


@asynccontextmanager
async def hostile() -> AsyncIterator[Hostile]:
    """It serves until the end of the block."""
    endpoint = Hostile()
    listener = LoopbackListener(endpoint)
    await listener.start()
    endpoint.port = listener.port
    try:
        yield endpoint
    finally:
        with anyio.CancelScope(shield=True):
            await listener.stop()
