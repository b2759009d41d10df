"""A small ASGI server on loopback, for models that are no models."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Self

import uvicorn

from rollcage.asgi import on_loopback, serve, stop
from rollcage.errors import UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Loopback:
    """`async with` it: it listens on loopback until the block ends."""

    def __init__(self, app: App, *, port: int = 0, what: str = "the recorded model") -> None:
        self._serves, self._port, self._what = app, port, what
        self._server: uvicorn.Server | None = None

    @property
    def base_url(self) -> str:
        """The address, up to and including `/v1`."""
        if self._server is None:
            raise UsageError(f"{self._what} is not running: use `async with {type(self).__name__}() as model`")
        return f"http://127.0.0.1:{self._port}/v1"

    async def __aenter__(self) -> Self:
        """Listen."""
        listener = on_loopback(self._port, self._what)
        self._server = await serve(self._serves, listener)
        self._port = listener.getsockname()[1]
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Stop listening, drop every connection, wait for what still runs."""
        server, self._server = self._server, None
        if server is not None:
            await stop(server)


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request; empty where the client left."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b""
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


async def start(send: Send, status: int, headers: list[tuple[bytes, bytes]]) -> None:
    """Begin an answer."""
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_json(send: Send, value: object, status: int = 200) -> None:
    """A whole answer."""
    await start(send, status, [(b"content-type", b"application/json")])
    await send({"type": "http.response.body", "body": json.dumps(value).encode()})
