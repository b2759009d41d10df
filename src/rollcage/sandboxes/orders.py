"""What boxes that take orders have in common: what an order may say, and the files and listeners that answers carry."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from errno import EADDRINUSE, ENOENT, ENOSPC, ENOTDIR, EROFS

import anyio.lowlevel

from rollcage.errors import FileMissing, SandboxError
from rollcage.sandboxes.base import PATH, Whole
from rollcage.sandboxes.keeper import Answer, InMemory, Refusal
from rollcage.types import HOME

ENVIRONMENT = {"PATH": PATH, "HOME": HOME, "USER": "user", "LANG": "C.UTF-8", "TMPDIR": "/tmp"}  # noqa: S108
"""What every command gets, and nothing else unless its caller says so."""

Ask = Callable[[str, Mapping[str, object], Sequence[int]], Awaitable[Answer]]
"""Gives an order to whoever obeys in the box, with descriptors: `await ask(action, order, fds)`. Raises Refusal."""

_CHUNK = 1 << 20


def environment_of(given: Mapping[str, str], env: Mapping[str, str] | None) -> dict[str, str]:
    """What a command gets in a box whose image gives `given`, when its caller gives `env`."""
    return {**ENVIRONMENT, **({} if isinstance(env, Whole) else given), **(env or {})}


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
        answer = await ask("read", {"path": checked_path(path)}, ())
    except Refusal as refusal:
        if refusal.kind == "NotAFile" or refusal.errno in (ENOENT, ENOTDIR):
            raise FileMissing(f"no such file in the box: {path}") from refusal
        raise SandboxError(f"cannot read {path} in the box: {refusal}") from refusal
    [fd] = answer.fds
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
    with InMemory(data) as content:
        try:
            await ask("write", {"path": checked_path(path), "mode": mode}, [content.fileno()])
        except Refusal as refusal:
            why = {ENOSPC: "the box's disk is full", EROFS: "this part of the box is read-only"}
            reason = why.get(refusal.errno, str(refusal))
            raise SandboxError(f"cannot write {path} in the box: {reason}") from refusal


@asynccontextmanager
async def listening(ask: Ask, port: int, known: set[socket.socket]) -> AsyncIterator[socket.socket]:
    """A listening socket of the box, closed with the block; `known` holds it meanwhile."""
    try:
        answer = await ask("listen", {"port": port}, ())
    except Refusal as refusal:
        why = "it is already in use" if refusal.errno == EADDRINUSE else str(refusal)
        raise SandboxError(f"cannot listen on port {port} in the box: {why}") from refusal
    listener = socket.socket(fileno=answer.fds[0])
    listener.setblocking(False)
    known.add(listener)
    try:
        yield listener
    finally:
        known.discard(listener)
        listener.close()
