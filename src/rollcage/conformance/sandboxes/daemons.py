"""Processes that try to outlive the command that started them, and how to tell that they did not.

They are found out by what they do, not by looking for them: a virtual machine's processes cannot be seen from outside.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from rollcage.conformance.sandboxes.values import Failed, expect
from rollcage.errors import FileMissing
from rollcage.sandboxes.base import Process, Sandbox
from rollcage.types import HOME

KINDS = ("plain", "session", "orphan", "closed", "restless")
"""A child; one in a session of its own; one whose parents are gone; one with no stream left; one that is ever new."""

_SCRIPT = r"""
import os, signal, sys, time
name, then = sys.argv[1:]
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)

def beat(kind):
    with open(f"/home/user/{name}-{kind}", "a") as file:
        file.write("x")

def go_on(kind):
    while True:
        beat(kind)
        time.sleep(0.05)

def plain(): go_on("plain")

def session():
    os.setsid()
    go_on("session")

def orphan():
    os.setsid()
    if os.fork(): os._exit(0)
    os.chdir("/")
    go_on("orphan")

def closed():
    os.setsid()
    if os.fork(): os._exit(0)
    os.closerange(0, 64)
    go_on("closed")

def restless():
    os.setsid()
    os.closerange(0, 64)
    while True:
        beat("restless")
        if os.fork(): os._exit(0)
        time.sleep(0.02)

kinds = [plain, session, orphan, closed, restless]
for kind in kinds:
    if os.fork() == 0:
        try: kind()
        finally: os._exit(1)
while not all(os.path.exists(f"/home/user/{name}-{kind.__name__}") for kind in kinds):
    time.sleep(0.02)
print("up", flush=True)
if then == "exit":
    os._exit(3)
while True:
    time.sleep(60)
"""


class Swarm:
    """One of every kind, started by one command."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._name = f"beat-{secrets.token_hex(6)}"

    def argv(self, then: str = "stay") -> list[str]:
        """The command that starts them; then it stays, or ends with exit code 3."""
        return ["python3", "-I", "-c", _SCRIPT, self._name, then]

    @asynccontextmanager
    async def started(self, then: str = "stay") -> AsyncIterator[Process]:
        """All of them run."""
        async with self._box.spawn(self.argv(then)) as process:
            await until(process, b"up\n")
            yield process

    async def all_dead(self, box: Sandbox | None = None) -> None:
        """Fail unless none of them does anything any more."""
        expect(not living(self._name), f"processes of the command still live on this machine: {living(self._name)}")
        before = await self._beats(box or self._box)
        await anyio.sleep(0.5)
        after = await self._beats(box or self._box)
        alive = [kind for kind in KINDS if before[kind] != after[kind]]
        expect(not alive, f"still at work after their command was over: {', '.join(alive)}")

    def none_on_this_machine(self) -> None:
        """Fail where this machine still has one of them, as far as it can see them."""
        expect(not living(self._name), "a process of a box that was closed still lives on this machine")

    async def _beats(self, box: Sandbox) -> dict[str, int]:
        return {kind: await _size(box, f"{HOME}/{self._name}-{kind}") for kind in KINDS}

    async def running(self) -> None:
        """Wait until all of them have been started."""
        for kind in KINDS:
            while True:
                with suppress(FileMissing):
                    await self._box.read(f"{HOME}/{self._name}-{kind}")
                    break
                await anyio.sleep(0.05)


async def _size(box: Sandbox, path: str) -> int:
    try:
        return len(await box.read(path))
    except FileMissing:
        # A command that ran into its time limit may not have come that far.
        return 0


async def until(process: Process, wanted: bytes) -> bytes:
    """Read what a command prints until these bytes are in it."""
    seen = b""
    while wanted not in seen:
        try:
            seen += await process.stdout.receive()
        except anyio.EndOfStream:
            told = b""
            with suppress(anyio.EndOfStream):
                told = await process.stderr.receive()
            raise Failed(f"a command ended before it printed {wanted!r}: {seen!r} {told[-300:]!r}") from None
    return seen


def living(marker: str) -> list[int]:
    """Processes on this machine that have the marker in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit() and marker.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
