"""Both sides of a listener in a box: ours answers each connection as a check wants it, theirs are small programs."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import anyio

from rollcage.sandboxes.base import Sandbox

PORT = 7000
"""Where the programs below connect to unless told otherwise."""
_CHUNK = 1 << 16

CONNECT = """
import hashlib, http.client, os, select, socket, sys, threading

def connect(port=7000):
    return socket.create_connection(("127.0.0.1", port), 50)

def rest(s):
    return b"".join(iter(lambda: s.recv(1 << 16), b""))
"""
"""How programs in the box begin."""

KNOCK = (
    CONNECT
    + """
try:
    s = connect(int(sys.argv[1]))
    s.settimeout(10)
    s.sendall(b"hello")
    print(s.recv(9))
except TimeoutError:
    print("hangs")
except OSError:
    print("refused")
"""
)
"""Says what it gets on the port it is given: `b'hello'`, `b''`, refused or hangs."""


class Peer:
    """One connection out of a box."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._ahead = b""
        self.sent = 0
        """Bytes that were taken off our hands so far."""

    async def receive(self) -> bytes:
        """The next bytes; none at the end."""
        if self._ahead:
            data, self._ahead = self._ahead, b""
            return data
        while True:
            try:
                return self._socket.recv(_CHUNK)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)

    async def exactly(self, count: int) -> bytes:
        """This many bytes, or all up to the end."""
        data = b""
        while len(data) < count and (more := await self.receive()):
            data += more
        self._ahead = data[count:]
        return data[:count]

    async def until(self, mark: bytes) -> bytes:
        """Everything up to a mark, and with it."""
        data = b""
        while mark not in data and (more := await self.receive()):
            data += more
        head, found, self._ahead = data.partition(mark)
        return head + found

    async def rest(self) -> bytes:
        """Everything up to the end."""
        chunks = []
        while chunk := await self.receive():
            chunks.append(chunk)
        return b"".join(chunks)

    async def send(self, data: bytes) -> None:
        """Hand over all of it."""
        view = memoryview(data)
        while view:
            try:
                count = self._socket.send(view)
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            else:
                view = view[count:]
                self.sent += count

    def finish(self) -> None:
        """Say that no more will come, and go on reading."""
        self._socket.shutdown(socket.SHUT_WR)


Handler = Callable[[Peer], Awaitable[None]]


async def serve(listener: socket.socket, handle: Handler) -> None:
    """Answer every connection, until cancelled."""

    async def answer(connection: socket.socket) -> None:
        with connection:
            await handle(Peer(connection))

    async with anyio.create_task_group() as tasks:
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                await anyio.wait_readable(listener)
            else:
                tasks.start_soon(answer, connection)


@asynccontextmanager
async def served(box: Sandbox, port: int, handle: Handler) -> AsyncIterator[None]:
    """A port in the box that is answered here while the block lasts."""
    async with box.listen(port) as listener, anyio.create_task_group() as tasks:
        listener.setblocking(False)
        tasks.start_soon(serve, listener, handle)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


async def echo(peer: Peer) -> None:
    """Give back what comes, as it comes."""
    with suppress(ConnectionError):
        while data := await peer.receive():
            await peer.send(data)
