"""What goes into an agent's program and what comes out: its prompt, and lines that are bounded, since a box may print
anything."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
from anyio.abc import ByteReceiveStream

from rollcage.agent_events import AgentNote
from rollcage.agents.base import Emit
from rollcage.events import AgentEmitted
from rollcage.sandboxes.base import Process

MAX_LINE = 4 << 20
"""Bytes; a longer one is told in parts."""
MAX_EVENTS = 64 << 20
"""Bytes of what an agent prints that go into the log: a runaway cannot fill the disk."""


async def feed(process: Process, words: str) -> None:
    """Give it all of its input, and the end of that."""
    try:
        await process.stdin.send(words.encode())
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
        return  # it has died already, which its exit code shows
    finally:
        await process.stdin.aclose()


async def told(stream: ByteReceiveStream, emit: Emit) -> AsyncIterator[bytes]:
    """Its lines up to MAX_EVENTS; a note in the log says that the rest is left out."""
    read = 0
    async for line in lines(stream):
        over, read = read > MAX_EVENTS, read + len(line)
        if read <= MAX_EVENTS:
            yield line
        elif not over:
            await emit(AgentEmitted(event=AgentNote(text=f"after {MAX_EVENTS} bytes no more events are kept")))


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
