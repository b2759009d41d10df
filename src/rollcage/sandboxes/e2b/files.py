"""Files of boxes that offer nothing but commands: each is read or written by one, as the box's own user."""

from __future__ import annotations

from rollcage.errors import FileMissing, SandboxError
from rollcage.sandboxes.base import Exit, Sandbox, run
from rollcage.sandboxes.box_rpc import checked_path
from rollcage.sandboxes.bundle import bundle
from rollcage.sandboxes.inside import atomic, file_io

_PROGRAM = bundle(file_io, atomic)
_TIMEOUT_S = 300.0


async def read_by_command(box: Sandbox, path: str, limit: int) -> bytes:
    """At most `limit` bytes of a regular file; FileMissing where there is none. Never hangs."""
    ended = await _run(box, "read", path, limit, limit=limit + 1)
    if ended.code == file_io.MISSING:
        raise FileMissing(f"no such file in the box: {path}")
    if ended.code:
        raise SandboxError(f"cannot read {path[:200]} in the box: {ended.stderr.text or ended.code}")
    return ended.stdout.data


async def write_by_command(box: Sandbox, path: str, data: bytes, mode: int) -> None:
    """Make or replace a file, with the folders above it."""
    ended = await _run(box, "write", path, mode, stdin=data)
    if ended.code:
        raise SandboxError(f"cannot write {path[:200]} in the box: {ended.stderr.text or ended.code}")


async def _run(box: Sandbox, action: str, path: str, number: int, *, stdin: bytes = b"", limit: int = 2000) -> Exit:
    argv = ["python3", "-I", "-S", "-c", _PROGRAM, action, checked_path(path), str(number)]
    ended = await run(box, argv, stdin=stdin, cwd="/", timeout_s=_TIMEOUT_S, limit=limit)
    if ended.timed_out:
        raise SandboxError(f"cannot {action} {path[:200]} in the box: no end after {_TIMEOUT_S:g} s")
    return ended
