"""Lines that an agent prints, read as they come. A box may print anything: no line is longer than a bound."""

from __future__ import annotations

from collections.abc import AsyncIterator

from anyio.abc import ByteReceiveStream

MAX_LINE = 4 << 20
"""Bytes; a longer one is told in parts."""


async def lines(stream: ByteReceiveStream) -> AsyncIterator[bytes]:
    """Each line that is not blank, without its end."""
    buffer = bytearray()
    async for chunk in stream:
        buffer += chunk
        while (end := buffer.find(b"\n")) >= 0 or len(buffer) > MAX_LINE:
            end = end if end >= 0 else len(buffer)
            line = bytes(buffer[:end])
            del buffer[: end + 1]
            if line.strip():
                yield line
    if buffer.strip():
        yield bytes(buffer)
