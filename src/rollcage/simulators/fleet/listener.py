"""Serves ASGI applications on loopback within this process, and can be stopped as abruptly as a dying machine."""

from __future__ import annotations

import socket
from collections.abc import MutableMapping
from typing import Any

import uvicorn

from rollcage.asgi import on_loopback, serve, stop


class LoopbackListener:
    """One listening socket and what answers on it."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self._app, self.port = app, port
        self._server: uvicorn.Server | None = None

    async def start(self) -> None:
        """Listen; the port stays the same from then on."""
        listener = on_loopback(self.port, "the local Fleet")
        await self.start_on(listener)
        self.port = listener.getsockname()[1]

    async def start_on(self, listener: socket.socket) -> None:
        """Answer on a socket that is there already."""
        self._server = await serve(self._app, listener)

    async def stop(self) -> None:
        """Stop listening, drop every connection, wait for what still runs."""
        server, self._server = self._server, None
        if server is not None:
            await stop(server, patience_s=2)

    def hang_up(self, scope: MutableMapping[str, Any]) -> None:
        """Break the connection a request came on."""
        server = self._server
        for connection in list(server.server_state.connections) if server else ():
            if connection.transport.get_extra_info("peername") == tuple(scope["client"]):
                connection.transport.abort()
