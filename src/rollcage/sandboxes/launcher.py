"""Serves the launcher `untrusted`: takes orders at a socket of the judge's and has them run on the judged's side.

Whoever connects is in the box, and as hostile as all that is. An order is data in a file, with three descriptors of the
asker's own; nothing here waits for it to be well-behaved.
"""

from __future__ import annotations
import __future__

import marshal
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.base import Process, Separation
from rollcage.sandboxes.inside import kernel, untrusted
from rollcage.sandboxes.inside.orders import ASK_S, MOST_AT_ONCE, TOOLS, LaunchOrder, OrderTerms, take_order

_LAUNCHER = f"""#!
import posix, sys
sys.path.insert(0, {TOOLS!r})
from untrusted import main
posix._exit(main(sys.argv[1:]))
"""
_ANNOTATIONS = "from __future__ import annotations\n"


class Launching(Protocol):
    """The judged's side of a box, as the launcher needs it."""

    launched: int

    def launch(self, order: LaunchOrder, streams: Sequence[int]) -> AbstractAsyncContextManager[Process]:
        """Run the order with these descriptors as its streams; they are closed here as soon as it has them."""


_Judged = TypeVar("_Judged", bound=Launching)


@cache
def tools(max_output: int) -> dict[str, str]:
    """The files that the judge is given: the launcher, and the same as a Python module."""
    text = Path(untrusted.__file__).read_text()
    before = f"MAX_OUTPUT = {untrusted.MAX_OUTPUT >> 20} << 20\n"
    assert before in text
    text = text.replace(before, f"MAX_OUTPUT = {max_output}\n")
    return {"untrusted": _LAUNCHER, "untrusted.py": text}


@cache
def compiled(max_output: int) -> dict[str, str]:
    """The module as Python keeps it, in hexadecimal digits: compiling takes longer than all else it does at its start.

    A Python of another version, which has another name for it, compiles the module for itself.
    """
    text = tools(max_output)["untrusted.py"]
    text = text.replace(_ANNOTATIONS, "\n")  # told to the compiler, and not looked for at each start
    flags = __future__.annotations.compiler_flag
    code = marshal.dumps(compile(text, f"{TOOLS}/untrusted.py", "exec", flags, dont_inherit=True))
    unchecked = (1).to_bytes(4, "little") + bytes(8)
    name = f"__pycache__/untrusted.{sys.implementation.cache_tag}.pyc"
    return {name: (MAGIC_NUMBER + unchecked + code).hex()}


@asynccontextmanager
async def serving(listener: socket.socket, judged: _Judged, separation: Separation) -> AsyncIterator[_Judged]:
    """Take orders for the length of the block; what still runs at its end is killed."""
    listener.setblocking(False)
    raised: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_accept, listener, judged, separation, tasks)
        try:
            yield judged
        except Exception as error:  # noqa: BLE001 (raised again outside the group, as itself)
            raised = error
        tasks.cancel_scope.cancel()
    if raised is not None:
        raise raised


async def _accept(listener: socket.socket, judged: Launching, separation: Separation, tasks: TaskGroup) -> None:
    places = anyio.Semaphore(MOST_AT_ONCE)
    while True:
        await places.acquire()
        await anyio.wait_readable(listener)
        with suppress(OSError):
            connection, _ = listener.accept()
            tasks.start_soon(_serve, connection, judged, separation, places.release)
            continue
        places.release()
        await anyio.sleep(0.01)  # out of descriptors, say


async def _serve(
    connection: socket.socket, judged: Launching, separation: Separation, done: Callable[[], object]
) -> None:
    fds: list[int] = []
    try:
        connection.setblocking(False)
        with anyio.move_on_after(ASK_S):
            await anyio.wait_readable(connection)
            _, fds = kernel.receive_fds(connection, 64)
        if not fds:
            return
        try:
            answer = await _launch(connection, fds, judged, separation)
        except SandboxLost:
            raise
        except (SandboxError, ValueError, OSError) as error:
            answer = f"refused {error}"
        with suppress(OSError):
            connection.send(answer.encode("utf-8", "replace")[:4000])
    except (OSError, SandboxLost):
        pass  # whoever asked is gone, or the box is
    finally:
        connection.close()
        for fd in fds:
            os.close(fd)
        done()


async def _launch(connection: socket.socket, fds: list[int], judged: Launching, separation: Separation) -> str:
    """Run what is asked for; the answer is its exit code, and why it was ended where it was."""
    order = take_order(fds, OrderTerms(separation.timeout_s, separation.withheld))
    judged.launched += 1
    streams = [fds.pop() for _ in range(3)][::-1]
    code, why = 128 + 9, ""
    async with judged.launch(order, streams) as process, anyio.create_task_group() as tasks:

        async def end_with_asker() -> None:
            await anyio.wait_readable(connection)
            tasks.cancel_scope.cancel()

        tasks.start_soon(end_with_asker)
        with anyio.move_on_after(order.timeout_s) as scope:
            code = await process.wait()
        if scope.cancelled_caught:
            code, why = untrusted.TIMED_OUT, "timeout"
        tasks.cancel_scope.cancel()
    return f"{code} {why}"
