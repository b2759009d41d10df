"""Serves ASGI applications on loopback within this process, and can be stopped as abruptly as a dying machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from typing import Any

import anyio
import uvicorn

from rollcage.errors import SetupError
from rollcage.simulators.quiet import QuietProtocol


class LoopbackListener:
    """One listening socket and what answers on it."""

    def __init__(self, app: Any, port: int = 0) -> None:
        self._app, self.port = app, port
        self._server: uvicorn.Server | None = None

    async def start(self) -> None:
        """Listen; the port stays the same from then on."""
        # Only where the protocol is named does asyncio send small pieces at once; else each answer waits for 40 ms.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
        except OSError as error:
            listener.close()
            message = f"the local Fleet cannot listen on 127.0.0.1:{self.port} ({error.strerror})"
            raise SetupError(f"{message}: choose another port, or 0 for any that is free") from error
        await self.start_on(listener)
        self.port = listener.getsockname()[1]

    async def start_on(self, listener: socket.socket) -> None:
        """Answer on a socket that is there already."""
        config = uvicorn.Config(
            self._app, http=QuietProtocol, lifespan="off", ws="none", log_config=None, server_header=False
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        # Its startup alone: serve() would take over the process's signals and wake up ten times a second.
        await server.startup(sockets=[listener])
        self._server = server

    async def stop(self) -> None:
        """Stop listening, drop every connection, wait for what still runs."""
        server, self._server = self._server, None
        if server is None:
            return
        with anyio.CancelScope(shield=True):
            for listener in server.servers:
                listener.close()
            patience = anyio.current_time() + 2.0
            while server.server_state.connections or server.server_state.tasks:
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
                tasks = list(server.server_state.tasks)
                if anyio.current_time() > patience:
                    for task in tasks:
                        task.cancel()
                await (asyncio.wait(tasks, timeout=0.05) if tasks else asyncio.sleep(0))
            for listener in server.servers:
                await listener.wait_closed()

    def hang_up(self, scope: MutableMapping[str, Any]) -> None:
        """Break the connection a request came on."""
        server = self._server
        for connection in list(server.server_state.connections) if server else ():
            if connection.transport.get_extra_info("peername") == tuple(scope["client"]):
                connection.transport.abort()
