"""The line into a container: orders and descriptors go in, answers and descriptors come out.

Every order carries the socket its answer comes back on, so orders never wait for each other.
"""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.inside.kernel import receive_fds
from rollcage.sandboxes.keeper import Answer, InMemory, Refusal

_LONGEST = 1 << 16


class Line:
    """A connection to the first process of a container. That process ends, and the container, when it is closed."""

    def __init__(self, control: socket.socket) -> None:
        """Takes over the socket."""
        self._control = control
        self._sending = anyio.Lock()
        self._open = True

    @classmethod
    async def accept(cls, listener: socket.socket) -> Line:
        """Wait for the container to call. SandboxError where it says that it cannot be a box."""
        await anyio.wait_readable(listener)
        control, _ = listener.accept()
        control.setblocking(False)
        line = cls(control)
        try:
            await anyio.wait_readable(control)
            said = control.recv(4096)
            if said != b"ready":
                raise SandboxError(f"the container cannot be made a box: {said.decode() or 'it ended at once'}")
        except BaseException:
            line.close()
            raise
        return line

    @property
    def lost(self) -> bool:
        """Whether the container is gone, or this line is closed."""
        if not self._open:
            return True
        try:
            return self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Hang up, waking whoever waits on it."""
        if self._open:
            self._open = False
            with suppress(OSError):
                anyio.notify_closing(self._control)
            self._control.close()

    async def ask(self, action: str, order: Mapping[str, object], fds: Sequence[int] = ()) -> Answer:
        """Have something done; Refusal where it could not be, SandboxLost where the container is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, InMemory(json.dumps(order).encode()) as body:
                async with self._sending:
                    while not self._send(action, [theirs.fileno(), body.fileno(), *fds]):
                        await anyio.wait_writable(self._control)
            ours.setblocking(False)
            await anyio.wait_readable(ours)
            try:
                data, passed = receive_fds(ours, _LONGEST)
            except ConnectionError:
                data, passed = b"", []
        if not data:
            if self.lost:
                raise SandboxLost("the container is gone")
            raise SandboxError(f"{action}: it was killed before it had answered; the box may be out of memory")
        answer = json.loads(data)
        if "error" in answer:
            raise Refusal(answer)
        return Answer(answer, passed)

    def _send(self, action: str, fds: Sequence[int]) -> bool:
        if not self._open:
            raise SandboxLost("the box is closed")
        try:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            self._control.sendmsg([action.encode()], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SandboxLost("the container is gone") from error
        return True


def listener_at(path: Path) -> socket.socket:
    """A socket that a container can call by this path. The path may be longer than the kernel takes at once."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        # Whoever the container's root is on this machine; the folder above is closed to everybody else.
        path.chmod(0o666)
        listener.listen(1)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener
