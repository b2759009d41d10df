"""Requests to the program that makes a box: their replies, and the commands, files and listeners they are about.

The program is in the box (a container's first process) or beside it (the fork server of local boxes).
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from errno import EADDRINUSE, ENOENT, ENOSPC, ENOTDIR, EROFS, ETOOMANYREFS
from typing import NamedTuple

import anyio.lowlevel

from rollcage.errors import FileMissing, SandboxError, SandboxLost
from rollcage.sandboxes.base import PATH
from rollcage.types import HOME, JsonObject

ENVIRONMENT = {"PATH": PATH, "HOME": HOME, "USER": "user", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108
"""What every command gets, and nothing else unless its caller says so."""


class RequestRefused(SandboxError):
    """A request was not met: `kind`, `errno` and `about` for programs, the message for people."""

    def __init__(self, reply: JsonObject) -> None:
        step = reply["step"]
        super().__init__(f"{step}: {reply['text']}" if step else str(reply["text"]))
        self.kind: str = reply["error"]
        """The name of the error there."""
        self.errno: int = reply["errno"]
        """As the kernel gave it; 0 where it was not the kernel."""
        self.about: str = reply["about"]
        """What it concerns, where the remedy depends on that: `overlay`, `layer`, `attributes`, ..."""


class BoxReply(NamedTuple):
    """What came back."""

    body: JsonObject
    fds: list[int]


class MemoryFile:
    """A file in memory with this content, for the length of a block."""

    def __init__(self, data: bytes) -> None:
        self._fd = os.memfd_create("rollcage")
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def fileno(self) -> int:
        """Its descriptor."""
        return self._fd

    def __enter__(self) -> MemoryFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


Ask = Callable[[str, Mapping[str, object], Sequence[int]], Awaitable[BoxReply]]
"""Makes a request, with descriptors: `await ask(action, request, fds)`. Raises RequestRefused."""

_CHUNK = 1 << 20


def send_request(control: socket.socket, action: str, fds: Sequence[int], *, gone: str) -> bool:
    """Send a request with its descriptors; false where it has to wait. SandboxLost (`gone`) where nobody is there."""
    try:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        control.sendmsg([action.encode()], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == ETOOMANYREFS:
            return False  # for now: whoever shares our uid has many descriptors on their way
        raise SandboxLost(gone) from error
    return True


def hung_up(control: socket.socket) -> bool:
    """Whether the other end is gone."""
    try:
        return control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def environment_of(image: Mapping[str, str], env: Mapping[str, str] | None, *, inherit: bool) -> dict[str, str]:
    """What a command gets in a box whose image sets `image`, when its caller gives `env`."""
    return {**ENVIRONMENT, **(image if inherit else {}), **(env or {})}


def check_command(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
    """Raise SandboxError for what no system could run."""
    if not argv or not argv[0]:
        raise SandboxError("cannot run an empty command")
    if "=" in argv[0]:
        raise SandboxError(f"cannot run {argv[0]!r}: a program's name has no `=` in it")
    if any("\0" in word for word in (*argv, *env, *env.values(), cwd)):
        raise SandboxError(f"cannot run {argv[0]!r}: a NUL character in its arguments, environment or folder")
    if any(not name or "=" in name for name in env):
        raise SandboxError(f"cannot run {argv[0]!r}: an environment variable without a proper name")
    if not cwd.startswith("/"):
        raise SandboxError(f"cannot run {argv[0]!r} in {cwd!r}: an absolute path is needed")


def checked_path(path: str) -> str:
    """The path, if it can be one in a box."""
    if not path.startswith("/") or "\0" in path:
        raise SandboxError(f"{path!r} is not an absolute path in the box")
    return path


async def read_file(ask: Ask, path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file; FileMissing where there is none."""
    try:
        reply = await ask("read", {"path": checked_path(path)}, ())
    except RequestRefused as refused:
        if refused.kind == "NotAFile" or refused.errno in (ENOENT, ENOTDIR):
            raise FileMissing(f"no such file in the box: {path}") from refused
        raise SandboxError(f"cannot read {path} in the box: {refused}") from refused
    [fd] = reply.fds
    chunks: list[bytes] = []
    try:
        while limit > 0 and (chunk := os.read(fd, min(limit, _CHUNK))):
            chunks.append(chunk)
            limit -= len(chunk)
            await anyio.lowlevel.checkpoint()
    finally:
        os.close(fd)
    return b"".join(chunks)


async def write_file(ask: Ask, path: str, data: bytes, mode: int) -> None:
    """Make or replace a file, with the folders above it."""
    with MemoryFile(data) as content:
        try:
            await ask("write", {"path": checked_path(path), "mode": mode}, [content.fileno()])
        except RequestRefused as refused:
            why = {ENOSPC: "the box's disk is full", EROFS: "this part of the box is read-only"}
            reason = why.get(refused.errno, str(refused))
            raise SandboxError(f"cannot write {path} in the box: {reason}") from refused


@asynccontextmanager
async def listening(ask: Ask, port: int, known: set[socket.socket]) -> AsyncIterator[socket.socket]:
    """A listening socket of the box, closed with the block; `known` holds it meanwhile."""
    try:
        reply = await ask("listen", {"port": port}, ())
    except RequestRefused as refused:
        why = "it is already in use" if refused.errno == EADDRINUSE else str(refused)
        raise SandboxError(f"cannot listen on port {port} in the box: {why}") from refused
    listener = socket.socket(fileno=reply.fds[0])
    listener.setblocking(False)
    known.add(listener)
    try:
        yield listener
    finally:
        known.discard(listener)
        listener.close()
