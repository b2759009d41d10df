"""Lets any process hear what a model says while it says it: a socket of the process that runs the rollout.

The log has every turn once it is whole; this is for those who want to see it grow. Nothing here is kept, and nobody
waits for a listener.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path

import anyio
from anyio.abc import SocketStream, TaskStatus
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import ValidationError

from rollcage.gateway.live import Delta

Watch = Callable[[str], AsyncIterator[Delta]]
"""What the models say to a rollout, by its id."""

_LINE = 1 << 20
_BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, anyio.IncompleteRead)


async def serve(path: Path, watch: Watch, *, task_status: TaskStatus[None]) -> None:
    """Tell whoever connects to `path`, and names a rollout, what is said to it. Only this user may connect."""

    async def tell(client: SocketStream) -> None:
        with suppress(*_BROKEN, anyio.DelimiterNotFound, UnicodeDecodeError):
            async with client:
                name = await BufferedByteReceiveStream(client).receive_until(b"\n", 200)
                async with aclosing(watch(name.decode())) as deltas:  # type: ignore[type-var]
                    async for delta in deltas:
                        await client.send(delta.model_dump_json(exclude_defaults=True).encode() + b"\n")

    with _short(path) as address:
        listener = await anyio.create_unix_listener(address, mode=0o600)
    try:
        async with listener:
            task_status.started()
            await listener.serve(tell)
    finally:
        with suppress(OSError):
            os.unlink(path)  # noqa: PTH108 - one name in one folder: nothing to wait for


async def subscribe(path: Path, rollout_id: str) -> AsyncIterator[Delta]:
    """What is said to a rollout from now on, until its agent is done; nothing where nobody runs it."""
    try:
        with _short(path) as address:
            stream = await anyio.connect_unix(address)
    except OSError:
        return
    async with stream:
        await stream.send(rollout_id.encode() + b"\n")
        lines = BufferedByteReceiveStream(stream)
        while True:
            try:
                yield Delta.model_validate_json(await lines.receive_until(b"\n", _LINE))
            except (*_BROKEN, anyio.DelimiterNotFound, ValidationError):
                return


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """The same path in few enough characters for a socket's address, however deep its folder lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
