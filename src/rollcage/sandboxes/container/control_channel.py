"""The control channel into a container: requests and descriptors go in, replies and descriptors come out.

Every request carries the socket its reply comes back on, so requests never wait for each other.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.box_rpc import BoxReply, MemoryFile, RequestRefused, hung_up, send_request
from rollcage.sandboxes.inside.kernel import receive_fds
from rollcage.sandboxes.inside.requests import AGAIN_S

_LONGEST = 1 << 16


class ControlChannel:
    """A connection to the first process of a container. That process ends, and the container, when it is closed."""

    def __init__(self, control: socket.socket) -> None:
        """Takes over the socket."""
        self._control = control
        self._sending = anyio.Lock()
        self._open = True

    @classmethod
    async def accept(cls, listener: socket.socket) -> ControlChannel:
        """Wait for the container to call. SandboxError where it says that it cannot be a box."""
        await anyio.wait_readable(listener)
        control, _ = listener.accept()
        return await cls.greeted(control)

    @classmethod
    async def greeted(cls, control: socket.socket) -> ControlChannel:
        """The same over a connection that is there already."""
        control.setblocking(False)
        channel = cls(control)
        try:
            await anyio.wait_readable(control)
            said = control.recv(4096)
            if said != b"ready":
                raise SandboxError(f"the container cannot be made a box: {said.decode() or 'it ended at once'}")
        except BaseException:
            channel.close()
            raise
        return channel

    @property
    def lost(self) -> bool:
        """Whether the container is gone, or this channel is closed."""
        if not self._open:
            return True
        return hung_up(self._control)

    def close(self) -> None:
        """Hang up, waking whoever waits on it."""
        if self._open:
            self._open = False
            with suppress(OSError):
                anyio.notify_closing(self._control)
            self._control.close()

    async def ask(self, action: str, request: Mapping[str, object], fds: Sequence[int] = ()) -> BoxReply:
        """Have something done; RequestRefused where it could not be, SandboxLost where the container is gone."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, MemoryFile(json.dumps(request).encode()) as body:
                async with self._sending:
                    while not self._send(action, [theirs.fileno(), body.fileno(), *fds]):
                        await anyio.wait_writable(self._control)
                        await anyio.sleep(AGAIN_S)
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
        reply = json.loads(data)
        if "error" in reply:
            raise RequestRefused(reply)
        return BoxReply(reply, passed)

    def _send(self, action: str, fds: Sequence[int]) -> bool:
        if not self._open:
            raise SandboxLost("the box is closed")
        return send_request(self._control, action, fds, gone="the container is gone")


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
