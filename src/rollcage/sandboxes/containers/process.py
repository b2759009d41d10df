"""A command running in a container: its streams, its end, and the certainty that all of it is dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from contextlib import suppress

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.containers.line import Line
from rollcage.sandboxes.process import Reader, Writer

_KILLED = 128 + signal.SIGKILL
_DEATH_TIMEOUT_S = 60


class ContainerProcess:
    """One command, held by a leash: letting go of it kills the command and everything below it."""

    def __init__(self, line: Line) -> None:
        """`theirs` are to be given to the container, and closed."""
        self._line = line
        self._leash, leash = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        self.theirs = [stdin, stdout, stderr, leash.detach()]
        self._stdin, self._stdout, self._stderr = Writer(to_stdin), Reader(from_stdout), Reader(from_stderr)
        self._said = b""
        self._over = anyio.Event()
        self._pulled = False
        self._loop = asyncio.get_running_loop()
        self._leash.setblocking(False)
        self._loop.add_reader(self._leash, self._on_leash)

    @property
    def stdin(self) -> Writer:
        """Its standard input; `aclose()` is end of file."""
        return self._stdin

    @property
    def stdout(self) -> Reader:
        """Its standard output."""
        return self._stdout

    @property
    def stderr(self) -> Reader:
        """Its standard error."""
        return self._stderr

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

    async def end(self) -> None:
        """Kill what still runs, wait until it is dead, and let go of everything."""
        self._kill()
        try:
            with anyio.fail_after(_DEATH_TIMEOUT_S), suppress(SandboxLost):
                await self.wait()
        except TimeoutError as error:
            raise SandboxError("a command in the box cannot be killed: the kernel does not let go of it") from error
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close everything; whoever waits is told that it is over."""
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()
        if self._leash.fileno() >= 0:
            self._loop.remove_reader(self._leash)
            self._leash.close()
        self._over.set()

    def _kill(self) -> None:
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
