"""A command running in a container: its streams, its end, and the certainty that all of it is dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import suppress

import anyio

from rollcage.errors import SandboxLost
from rollcage.sandboxes.containers.line import Line
from rollcage.sandboxes.pipes import Piped

_KILLED = 128 + signal.SIGKILL


class ContainerProcess(Piped):
    """One command, held by a leash: letting go of it kills the command and everything below it."""

    def __init__(self, line: Line) -> None:
        """`theirs` are to be given to the container, and closed."""
        self._leash, leash = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.theirs = [stdin, stdout, stderr, leash.detach()]
        super().__init__(to_stdin, from_stdout, from_stderr)
        self._line = line
        self._said = b""
        self._over = anyio.Event()
        self._pulled = False
        self._loop = asyncio.get_running_loop()
        self._leash.setblocking(False)
        self._loop.add_reader(self._leash, self._on_leash)

    async def wait(self) -> int:
        """Its exit code (128+n where signal n killed it), once it and every process it started are dead."""
        await self._over.wait()
        if self._said:
            code: int = json.loads(self._said)["exit"]
            return code
        if self._line.lost:
            raise SandboxLost("the box went away while the command ran")
        # Its supervisor was killed, for want of memory; what it stood over must not live on.
        await self._line.ask("sweep", {})
        return _KILLED

    def let_go(self) -> None:
        """Close everything; whoever waits is told that it is over."""
        super().let_go()
        if self._leash.fileno() >= 0:
            self._loop.remove_reader(self._leash)
            self._leash.close()
        self._over.set()

    def kill(self) -> None:
        """Let go of the leash."""
        if not self._pulled and self._leash.fileno() >= 0:
            self._pulled = True
            # Half closed: the supervisor sees the end of file, and can still tell how it ended.
            with suppress(OSError):
                self._leash.shutdown(socket.SHUT_WR)

    def _on_leash(self) -> None:
        try:
            self._said = self._leash.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            self._said = b""
        self._loop.remove_reader(self._leash)
        self._over.set()
