"""A command running in a local box: its streams, its end, and the certainty that all of it is dead."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import suppress

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.local.cgroups import Cgroup
from rollcage.sandboxes.local.fork_server import ForkServer
from rollcage.sandboxes.pipes import Piped

_CHUNK = 1 << 16
_KILLED = 128 + signal.SIGKILL
_START_TIMEOUT_S = 60


class _Watched:
    """A process, held by a descriptor: it can be killed, and its end is not missed."""

    def __init__(self, pid: int) -> None:
        self.gone = anyio.Event()
        self._loop = asyncio.get_running_loop()
        try:
            self._fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = -1
            self.gone.set()
        else:
            self._loop.add_reader(self._fd, self._on_end)

    def kill(self) -> None:
        """SIGKILL, if it still lives."""
        if self._fd >= 0 and not self.gone.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def killed(self) -> bool:
        """Whether a signal ended it, as far as the kernel tells."""
        return self._fd >= 0 and kernel.ended_by_signal(self._fd)

    def close(self) -> None:
        """Let go of it."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_end(self) -> None:
        self._loop.remove_reader(self._fd)
        self.gone.set()


class LocalProcess(Piped):
    """One bubblewrap and all that runs below it."""

    def __init__(
        self, stdin: int, stdout: int, stderr: int, status: int, *, fork_server: ForkServer, group: Cgroup
    ) -> None:
        """Takes over our ends of the pipes. `status` is where bubblewrap tells what it does."""
        super().__init__(stdin, stdout, stderr)
        self._fork_server, self._group = fork_server, group
        self._status = status
        self._said = b""
        self._watched: list[_Watched] = []
        self._loop = asyncio.get_running_loop()
        self._named, self._told_all, self._begun = anyio.Event(), anyio.Event(), anyio.Event()
        self._lost = self._stopped = False
        os.set_blocking(status, False)
        self._loop.add_reader(status, self._on_status)

    @property
    def first(self) -> int:
        """The first process of its pid namespace, as the host numbers it; 0 before there is one."""
        return self._told().get("child-pid", 0)

    async def wait(self) -> int:
        """Its exit code (128+n where signal n killed it), once it and every process it started are dead."""
        await self._begun.wait()
        await self._told_all.wait()
        # The monitor ends first and its pid namespace a little later: only with both gone is it over.
        for watched in self._watched:
            await watched.gone.wait()
        if self._lost:
            raise SandboxLost("the box was closed while the command ran")
        code = self._told().get("exit-code")
        if code is None and self._fork_server.gone:
            raise SandboxLost("the sandbox's fork server is gone, and the command with it")
        if code is None and not self._stopped and self._watched[0].killed():
            # Nothing in the box can reach its monitor. One that ends by itself and tells no code could not start the
            # command, in a folder that was closed to it, say: that is in the agent's hands, and no loss of the box.
            raise SandboxLost("the command was killed from outside its box (SIGKILL)")
        if code == _KILLED and not self._stopped and self._group.killed_by_machine():
            raise SandboxLost("the machine ran out of memory, and its kernel killed the command")
        return _KILLED if code is None else code

    async def begin(self, monitor: int, release: int) -> None:
        """Get hold of the command's pid namespace; then let it start, which it cannot before `release` is closed."""
        try:
            self._watched.append(_Watched(monitor))
            with anyio.move_on_after(_START_TIMEOUT_S):
                await self._named.wait()
            pid = self._told().get("child-pid")
            if pid is None:
                raise SandboxError(f"the command could not be started: {await self._complaint()}")
            self._watched.append(_Watched(pid))
            self._begun.set()
            if self._lost:
                self.kill()
        except BaseException:
            # It must not start unwatched: its monitor dies, and takes it along.
            self.kill()
            raise
        finally:
            os.close(release)

    def kill(self) -> None:
        """SIGKILL to the first process of its pid namespace, which takes all others with it, and to the monitor."""
        self._stopped = True
        self._kill()

    def _kill(self) -> None:
        for watched in reversed(self._watched):
            watched.kill()

    def lose(self) -> None:
        """The box goes away: kill it, and let `wait` say so."""
        self._lost = True
        self.kill()

    def abandon(self) -> None:
        """It never started."""
        for event in (self._named, self._told_all, self._begun):
            event.set()
        self.let_go()

    def let_go(self) -> None:
        """Close the streams, and let go of the processes."""
        super().let_go()
        for watched in self._watched:
            watched.close()
        if self._status >= 0:
            self._loop.remove_reader(self._status)
            os.close(self._status)
            self._status = -1

    def _told(self) -> dict[str, int]:
        told: dict[str, int] = {}
        for line in self._said.splitlines():
            with suppress(ValueError):
                told.update(json.loads(line))
        return told

    def _on_status(self) -> None:
        try:
            data = os.read(self._status, _CHUNK)
        except BlockingIOError:
            return
        self._said += data
        if not data:
            self._loop.remove_reader(self._status)
            self._told_all.set()
            # The command is over, and so is whatever it left running.
            self._kill()
        if not data or b"\n" in self._said:
            self._named.set()

    async def _complaint(self) -> str:
        with suppress(anyio.EndOfStream, anyio.ClosedResourceError):
            return (await self.stderr.receive()).decode("utf-8", "replace").strip()
        return "bubblewrap said nothing"
