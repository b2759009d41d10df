"""Machines of the small E2B in which commands are root, as in the cloud: a user namespace with processes, mounts and a
network of its own, whose root is nobody on this machine."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Unpack

import anyio
import pytest
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from rollcage.sandboxes.base import SpawnOptions
from rollcage.types import HOME

_FIRST = 1_900_000_000
_HOLD = f"""
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
libc.prctl(1, 9)
ready, go = os.pipe(), os.pipe()
pid = os.fork()
if pid == 0:
    libc.prctl(1, 9)
    assert libc.unshare(0x10000000 | 0x20000 | 0x8000000 | 0x20000000 | 0x40000000) == 0
    os.write(ready[1], b"x"), os.read(go[0], 1)
    os.setgroups([]), os.setresgid(0, 0, 0), os.setresuid(0, 0, 0)
    libc.prctl(4, 1)
    init = os.fork()
    if init == 0:
        libc.prctl(1, 9)
        def mount(source, target, kind, flags=0, options=None):
            if libc.mount(source, target, kind, flags, options):
                raise OSError(ctypes.get_errno(), target)
        try:
            mount(b"none", b"/", None, 0x4000 | 0x40000)
            mount(b"proc", b"/proc", b"proc")
            for place in (b"/home", b"/run"):
                mount(b"tmpfs", place, b"tmpfs", 6, b"mode=0755")
            for place in (b"/tmp", b"/var/tmp", b"/dev/shm"):
                mount(b"tmpfs", place, b"tmpfs", 6, b"mode=1777")
            os.mkdir({HOME!r})
            os.chown({HOME!r}, 1000, 1000)
        except OSError as error:
            print("refused", error, flush=True)
            os._exit(1)
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)
    os.write(ready[1], b"y")
    os.waitpid(init, 0)
    os._exit(0)
os.read(ready[0], 1)
for ids in ("uid_map", "gid_map"):
    with open(f"/proc/{{pid}}/{{ids}}", "w") as file:
        file.write("0 {_FIRST} 65536")
os.write(go[1], b"x"), os.read(ready[0], 1)
with open(f"/proc/{{pid}}/task/{{pid}}/children") as file:
    print(file.read().split()[0], flush=True)
os.waitpid(pid, 0)
"""


class RootedProcess:
    """A command of such a machine."""

    def __init__(self, process: Process) -> None:
        assert process.stdin and process.stdout and process.stderr
        self._process = process
        self.stdin: ByteSendStream = process.stdin
        self.stdout: ByteReceiveStream = process.stdout
        self.stderr: ByteReceiveStream = process.stderr

    async def wait(self) -> int:
        """Its exit code."""
        code = await self._process.wait()
        return 128 - code if code < 0 else code

    def kill(self) -> None:
        """SIGKILL to it and to what entered the machine for it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


class RootedBox:
    """One such machine, as far as the small E2B uses it."""

    id, notes = "rooted", ()

    def __init__(self, first: int) -> None:
        self._first = first

    @asynccontextmanager
    async def spawn(self, argv: Sequence[str], **options: Unpack[SpawnOptions]) -> AsyncIterator[RootedProcess]:
        """Start a command as its root."""
        given = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", **(options.get("env") or {})}
        enter = ["nsenter", f"--target={self._first}", "-U", "-m", "-p", "-i", "-n", "-S0", "-G0"]
        enter += [f"--wd={options.get('cwd', HOME)}", "--"]
        process = RootedProcess(await anyio.open_process([*enter, *argv], env=given, start_new_session=True))
        try:
            yield process
        finally:
            process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()

    async def read(self, path: str, *, limit: int = 16 << 20) -> bytes:
        """Not needed."""
        raise NotImplementedError

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Not needed."""
        raise NotImplementedError

    def listen(self, port: int) -> AbstractAsyncContextManager[socket.socket]:
        """Not needed."""
        raise NotImplementedError


@asynccontextmanager
async def rooted_box() -> AsyncIterator[RootedBox]:
    """A machine that ends with the block; skips where this machine allows none."""
    async with await anyio.open_process([sys.executable, "-I", "-S", "-c", _HOLD], stderr=None) as holder:
        assert holder.stdout and holder.stdin
        said = b""
        while said.count(b"\n") < 2:
            try:
                said += await holder.stdout.receive()
            except anyio.EndOfStream:
                pytest.skip(f"no machine with a root of its own can be made here: {said.decode()}")
        first = next(int(line) for line in said.split() if line.isdigit())
        if b"refused" in said:
            pytest.skip(f"no machine with a root of its own can be made here: {said.decode()}")
        try:
            yield RootedBox(first)
        finally:
            await holder.stdin.aclose()
            holder.kill()
