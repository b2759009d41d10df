"""What a command has whose streams are pipes that end in this process."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import suppress

import anyio
import anyio.lowlevel
from anyio.abc import ByteReceiveStream, ByteSendStream

from rollcage.errors import SandboxError, SandboxLost

_CHUNK = 1 << 16
_DEATH_TIMEOUT_S = 60


class _PipeEnd:
    """Our end of a pipe."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd

    def close(self) -> None:
        """Close it, waking whoever waits on it."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with suppress(OSError):
                anyio.notify_closing(fd)
            os.close(fd)

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise anyio.ClosedResourceError
        return self._fd


class PipeReader(_PipeEnd, ByteReceiveStream):
    """What the command prints."""

    async def receive(self, max_bytes: int = _CHUNK) -> bytes:
        """The next bytes."""
        await anyio.lowlevel.checkpoint()
        while True:
            fd = self._open_fd()
            try:
                data = os.read(fd, max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(fd)
                continue
            if not data:
                raise anyio.EndOfStream
            return data

    async def aclose(self) -> None:
        """No more is wanted."""
        self.close()


class PipeWriter(_PipeEnd, ByteSendStream):
    """What the command reads."""

    async def send(self, item: bytes) -> None:
        """Hand over all of it."""
        await anyio.lowlevel.checkpoint()
        view = memoryview(item)
        while view:
            fd = self._open_fd()
            try:
                view = view[os.write(fd, view) :]
            except BlockingIOError:
                await anyio.wait_writable(fd)
            except BrokenPipeError as error:
                raise anyio.BrokenResourceError from error

    async def aclose(self) -> None:
        """End of file."""
        self.close()


class Piped(ABC):
    """A command with three such streams. How it is killed, and how its end is heard of, is its backend's own."""

    def __init__(self, stdin: int, stdout: int, stderr: int) -> None:
        """Takes over our ends of the pipes."""
        self.stdin, self.stdout, self.stderr = PipeWriter(stdin), PipeReader(stdout), PipeReader(stderr)

    @abstractmethod
    async def wait(self) -> int:
        """Its exit code (128+n where signal n killed it), once it and every process it started are dead."""

    @abstractmethod
    def kill(self) -> None:
        """Kill it, and everything it started."""

    def let_go(self) -> None:
        """Close everything that is held of it here."""
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()

    async def end(self) -> None:
        """Kill what still runs, wait until it is dead, and let go of everything."""
        self.kill()
        try:
            with anyio.fail_after(_DEATH_TIMEOUT_S), suppress(SandboxLost):
                await self.wait()
        except TimeoutError as error:
            raise SandboxError("a command in the box cannot be killed: the kernel does not let go of it") from error
        finally:
            self.let_go()


def pipes() -> tuple[list[int], list[int]]:
    """Three pipes for a command's streams: our ends, and its own."""
    (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
    return [to_stdin, from_stdout, from_stderr], [stdin, stdout, stderr]
