"""Serves an ASGI application on a listening socket within this process: no signals, no lifespan, no access log."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import anyio
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollcage.errors import SetupError


class QuietProtocol(HttpToolsProtocol):
    """Logs no requests. Config's own switch for that would silence every other uvicorn in the process too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False

    def connection_made(self, transport: Any) -> None:
        """Send small pieces at once, as asyncio does only for some sockets; else each answer waits for 40 ms."""
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        super().connection_made(transport)


def on_loopback(port: int, what: str) -> socket.socket:
    """A socket on this port of loopback, 0 for any that is free; `what` cannot listen, says the error."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        message = f"{what} cannot listen on 127.0.0.1:{port} ({error.strerror})"
        raise SetupError(f"{message}: choose another port, or 0 for any that is free") from error
    return listener


async def serve(app: Any, listener: socket.socket, *, connections: int | None = None) -> uvicorn.Server:
    """Begin to answer; `stop` ends it. `connections`: how many at once."""
    config = uvicorn.Config(
        app,
        interface="asgi3",
        http=QuietProtocol,
        lifespan="off",
        ws="none",
        log_config=None,
        server_header=False,
        limit_concurrency=connections,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Its startup alone: serve() would take over the process's signals and wake up ten times a second.
    await server.startup(sockets=[listener])
    return server


async def stop(server: uvicorn.Server, *, patience_s: float | None = None) -> None:
    """Stop listening, drop every connection, wait for what still runs; after `patience_s` it is cancelled.

    Dropped connections look to the application like clients that left: it mostly ends by itself.
    """
    with anyio.CancelScope(shield=True):
        for listener in server.servers:
            listener.close()
        until = None if patience_s is None else anyio.current_time() + patience_s
        state = server.server_state
        while state.connections or state.tasks:
            for connection in list(state.connections):
                connection.transport.abort()
            tasks = list(state.tasks)
            if until is not None and anyio.current_time() > until:
                for task in tasks:
                    task.cancel()
            await (asyncio.wait(tasks, timeout=0.05) if tasks else asyncio.sleep(0))
        for listener in server.servers:
            await listener.wait_closed()
