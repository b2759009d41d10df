"""One box at E2B: a virtual machine in the cloud, used through nothing but commands in it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio

from rollcage.errors import SandboxError, SandboxLost
from rollcage.sandboxes import launcher
from rollcage.sandboxes.base import Separation
from rollcage.sandboxes.box import BackendBox
from rollcage.sandboxes.e2b.cloud import BoxGone, Cloud
from rollcage.sandboxes.e2b.files import read_by_command, write_by_command
from rollcage.sandboxes.e2b.process import DIVIDED, DOOR, PROGRAM, E2BProcess
from rollcage.sandboxes.judged import JudgedSide, Side
from rollcage.sandboxes.relay import relayed
from rollcage.types import HOME, SandboxSpec

if TYPE_CHECKING:
    from e2b import AsyncSandbox

TTL_S = 300
"""A box that nobody renews ends by itself after this long."""
_WHO = {"uid": 1000, "gid": 1000}
"""The box's user, where the template does not name one."""


class E2BBox(BackendBox[E2BProcess]):
    """One box. It is renewed as long as it is open."""

    def __init__(self, cloud: Cloud, sandbox: AsyncSandbox, spec: SandboxSpec, *, ttl_s: int = TTL_S) -> None:
        super().__init__(sandbox.sandbox_id)
        self.cloud = cloud
        """The account it belongs to."""
        self.sandbox = sandbox
        """The SDK's own view of it."""
        self._spec, self._ttl_s = spec, ttl_s
        self._lost = ""
        self._door: E2BProcess | None = None
        """What divides the box, where it is divided."""
        self._live: list[str] = []
        """Where the judge's commands leave something to each other, in a divided box."""
        self.notes = (
            "memory: all processes together are held to what the template gives, not to memory_mb",
            "disk: it is as large as the template's, not disk_mb",
            "tmp: /tmp and /dev/shm are as large as the template's, not tmp_mb",
        )
        if spec.cpus is not None:
            self.notes += (f"cpus: {spec.cpus:g} is not enforced; a template has its own number",)
        self._renewing = asyncio.create_task(self._renew())

    @property
    def lost(self) -> str:
        """Why nothing more can be done in it; empty while it is there."""
        return self._lost

    async def _begin(self, argv: Sequence[str], env: Mapping[str, str], cwd: str, side: Side) -> E2BProcess:
        self._check_open()
        request = {
            "argv": list(argv),
            "env": dict(env),
            "cwd": cwd,
            "limits": _limits(self._spec, judged=side.judged),
            "side": self._side(side),
            **_WHO,
        }
        process = E2BProcess(DIVIDED if self._door else PROGRAM)
        self._running.add(process)
        try:
            self._note(await process.begin(self.sandbox, request))
            self.indivisible = "" if process.told.get("apart") else "the machine gives us no root that may mount"
        except BaseException:
            await process.end()
            self._running.discard(process)
            raise
        return process

    @asynccontextmanager
    async def separate(self, separation: Separation) -> AsyncIterator[JudgedSide]:
        """Divide the box: what the judge launches by `untrusted` in the block runs as the judged, without our help."""
        if self._running or self._door is not None:
            why = "it is divided already" if self._door is not None else "a command is running in it"
            raise SandboxError(f"cannot divide the box: {why}")
        request = {**separation._asdict(), **self._sizes, "guards": None, "sizes": self._sizes}
        request["tools"] = {**launcher.tools(separation.max_output), **separation.guards}
        door = E2BProcess(DOOR)
        try:
            with anyio.CancelScope(shield=True):
                await door.begin(self.sandbox, {**request, "limits": _limits(self._spec, judged=True), **_WHO})
        except SandboxLost:
            raise
        except SandboxError as error:
            await door.end()
            raise SandboxError(
                f"cannot divide the box: {error}", remedy="use a template whose root may mount"
            ) from error
        self._door, self._live = door, list(separation.live)
        judged = JudgedSide(self.running, separation)
        counting = asyncio.create_task(_count(door, judged))
        try:
            yield judged
        finally:
            with anyio.CancelScope(shield=True):
                await door.stdin.aclose()  # it kills what it launched
                counting.cancel()
                await asyncio.gather(counting, return_exceptions=True)

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """At most `limit` bytes of a regular file; FileMissing where there is none. Never hangs."""
        # By a command and not by E2B's own way, which runs as root: there, an agent's link would lead anywhere.
        return await read_by_command(self, path, limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Make or replace a file, with the folders above it."""
        await write_by_command(self, path, data, mode)

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """A listening socket that is 127.0.0.1:port in the box and is served by this process; closed with the block."""
        return relayed(self, port)

    async def close(self) -> None:
        """Give the box back. Whatever is asked of it from now on raises SandboxLost."""
        self._lose(f"the box {self.id} is closed")
        if self._door is not None:
            self._door.lose(self._lost)
            await self._door.end()
        self._renewing.cancel()
        await asyncio.gather(self._renewing, return_exceptions=True)
        # If the cloud does not answer, the box ends by itself when its time is up.
        with suppress(SandboxError):
            await self.cloud.kill(self.id)

    async def _renew(self) -> None:
        ends = time.monotonic() + self._ttl_s
        while True:
            await asyncio.sleep(min(self._ttl_s / 5, max(1.0, (ends - time.monotonic()) / 3)))
            try:
                asked = time.monotonic()
                await self.cloud.renew(self.id, self._ttl_s)
                ends = asked + self._ttl_s
            except SandboxError as error:
                # What cannot be reached may come back, until its time is up; what is not there does not.
                if time.monotonic() > ends or isinstance(error, BoxGone):
                    self._lose(str(error))
                    return

    @property
    def _sizes(self) -> dict[str, object]:
        return {"tmp": self._spec.tmp_mb << 20, "disk": self._spec.disk_mb << 20, "home": HOME}

    def _side(self, side: Side) -> dict[str, object] | None:
        """Where a command runs, as the launcher is told; None in a box that is not divided."""
        if self._door is None:
            return None
        holder = self._door.told["judged" if side.judged else "judge"]
        return {
            **self._sizes,
            "mounts": f"/proc/{int(holder)}/ns/mnt",
            "network": side.network,
            "judged": side.judged,
            "scratch": list(side.scratch),
            "live": None if side.judged else self._live,
        }

    def _check_open(self) -> None:
        if self._lost:
            raise SandboxLost(self._lost)

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for process in self._running:
            process.lose(self._lost)

    def _note(self, missing: Sequence[str]) -> None:
        self.notes += tuple(note for note in missing if note not in self.notes)


async def _count(door: E2BProcess, judged: JudgedSide) -> None:
    """It says something for each command that it launches."""
    async for said in door.stdout:
        judged.launched += len(said)


def _limits(spec: SandboxSpec, *, judged: bool) -> dict[str, int]:
    return {
        # Processes are counted for both sides together: the judge can start some whatever the judged does.
        "NPROC": (spec.pids // 2 if judged else spec.pids) + 8,
        "DATA": spec.memory_mb << 20,
        "FSIZE": spec.file_mb << 20,
        "NOFILE": 4096,
        "CORE": 0,
    }
