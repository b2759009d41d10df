"""What a proxy in this language costs at least: bytes go through unread on uvloop, the model's also to a file.

python bench/tee.py PORT UPSTREAM_PORT RECORD_FILE
"""

from __future__ import annotations

import asyncio
import sys
from typing import BinaryIO

import uvloop

FLUSHED_AT = 1 << 20


class Record:
    """The file that gets a copy; written a megabyte at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        """Keep a piece."""
        self._pieces.append(data)
        self._size += len(data)
        if self._size > FLUSHED_AT:
            self._file.write(b"".join(self._pieces))
            self._pieces, self._size = [], 0


class Side(asyncio.Protocol):
    """One end of a connection; what it receives, the other end sends."""

    transport: asyncio.Transport

    def __init__(self, record: Record | None = None) -> None:
        self._record = record
        self._early: list[bytes] = []
        self.other: asyncio.Transport | None = None

    def join(self, other: Side) -> None:
        """Where this end's bytes go from now on."""
        self.other = other.transport
        if self._early:
            self.other.writelines(self._early)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._record is not None:
            self._record.add(data)
        if self.other is not None:
            self.other.write(data)
        else:
            self._early.append(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        if self.other is not None:
            self.other.abort()


class Client(Side):
    """The end the client is at; with it the way to the model is opened."""

    def __init__(self, port: int, record: Record) -> None:
        super().__init__()
        self._port, self._copy = port, record

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._task = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        _, model = await loop.create_connection(lambda: Side(self._copy), "127.0.0.1", self._port)
        if self.transport.is_closing():
            model.transport.abort()
            return
        model.join(self)
        self.join(model)


async def serve(port: int, upstream_port: int, record: Record) -> None:
    """Forward until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Client(upstream_port, record), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    own, upstream, path = sys.argv[1:]
    with open(path, "ab", buffering=0) as copy:
        uvloop.run(serve(int(own), int(upstream), Record(copy)))
