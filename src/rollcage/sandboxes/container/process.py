"""A command running in a container: its streams, its end, and the certainty that all of it is dead."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress

import anyio

from rollcage.errors import SandboxLost
from rollcage.sandboxes.container.control_channel import ControlChannel
from rollcage.sandboxes.judged import null_streams
from rollcage.sandboxes.pipes import Piped, pipes

_KILLED = 128 + signal.SIGKILL


class ContainerProcess(Piped):
    """One command. Closing our end of its status socket kills it and everything below it."""

    def __init__(self, channel: ControlChannel, streams: Sequence[int] | None = None) -> None:
        """`theirs` are to be given to the container, and closed. `streams`: its own, where they do not end here."""
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours, given = pipes() if streams is None else (null_streams(), list(streams))
        self.theirs = [*given, status.detach()]
        super().__init__(ours[0], ours[1], ours[2])
        self._channel = channel
        self._said = b""
        self._over = anyio.Event()
        self._pulled = False
        self._loop = asyncio.get_running_loop()
        self._status.setblocking(False)
        self._loop.add_reader(self._status, self._on_status)

    async def wait(self) -> int:
        """Its exit code (128+n where signal n killed it), once it and every process it started are dead."""
        await self._over.wait()
        if self._said:
            code: int = json.loads(self._said)["exit"]
            return code
        if self._channel.lost:
            raise SandboxLost("the box went away while the command ran")
        # Its supervisor was killed, for want of memory; what it stood over must not live on.
        await self._channel.ask("sweep", {})
        return _KILLED

    def let_go(self) -> None:
        """Close everything; whoever waits is told that it is over."""
        super().let_go()
        if self._status.fileno() >= 0:
            self._loop.remove_reader(self._status)
            self._status.close()
        self._over.set()

    def kill(self) -> None:
        """Close our end of the status socket."""
        if not self._pulled and self._status.fileno() >= 0:
            self._pulled = True
            # Half closed: the supervisor sees the end of file, and can still tell how it ended.
            with suppress(OSError):
                self._status.shutdown(socket.SHUT_WR)

    def _on_status(self) -> None:
        try:
            self._said = self._status.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            self._said = b""
        self._loop.remove_reader(self._status)
        self._over.set()
