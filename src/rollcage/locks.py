"""Locks on files and folders that the kernel lets go of when their holder dies; by them one sees whether it lives."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

_POLL_S = 0.05


def try_lock(path: Path, *, shared: bool = False) -> int | None:
    """A descriptor that holds the lock of a file until it is closed; None where somebody else has it.

    The file is made where it is missing.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    return fd if _take(fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX) else None


def hold(folder: Path) -> int | None:
    """A descriptor that holds a folder which is there, until it is closed; None where somebody else has it."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    return fd if _take(fd, fcntl.LOCK_EX) else None


@asynccontextmanager
async def locked(path: Path, *, shared: bool = False) -> AsyncIterator[None]:
    """Hold the lock of a file. It is asked for again and again: a thread that waits for it could not be cancelled."""
    while (fd := try_lock(path, shared=shared)) is None:  # noqa: ASYNC110 (another process tells nobody)
        await anyio.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(fd)


class Claim:
    """A file or folder of this process's own, locked as long as the process lives."""

    def __init__(self, path: Path, fd: int) -> None:
        """Made by `claim`."""
        self.path, self._fd = path, fd

    def release(self) -> None:
        """Remove it, with what is in it."""
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of it, and leave it to whoever looks for abandoned ones."""
        os.close(self._fd)


def claim(parent: Path, *, folder: bool = False) -> Claim:
    """Make a file (or a folder) with a new name below `parent`, and lock it for the life of this process."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        path = parent / secrets.token_hex(8)
        if folder:
            path.mkdir(mode=0o700)
        else:
            path.touch(mode=0o600, exist_ok=False)
        # Between making and locking it, somebody may take it for an abandoned one and remove it.
        with suppress(FileNotFoundError):
            fd = os.open(path, (os.O_RDONLY if folder else os.O_RDWR) | os.O_CLOEXEC)
            if _take(fd, fcntl.LOCK_EX) and _is_at(path, fd):
                return Claim(path, fd)


def is_claimed(path: Path) -> bool:
    """Whether a living process holds this file or folder; false where there is none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    # Shared: two who look at the same time must not take each other for its holder.
    if not _take(fd, fcntl.LOCK_SH):
        return True
    os.close(fd)
    return False


def abandoned(parent: Path) -> Iterator[Path]:
    """Every file and folder below `parent` whose holder is dead, each locked while the caller removes it."""
    for path in sorted(parent.iterdir()) if parent.is_dir() else ():
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue  # removed meanwhile, or nothing that can be held
        if _take(fd, fcntl.LOCK_EX):
            try:
                yield path
            finally:
                os.close(fd)


def _take(fd: int, kind: int) -> bool:
    """Lock a descriptor; it is closed where it cannot be."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return False
    except BaseException:
        os.close(fd)
        raise
    return True


def _is_at(path: Path, fd: int) -> bool:
    try:
        if path.stat().st_ino == os.fstat(fd).st_ino:
            return True
    except FileNotFoundError:
        pass
    os.close(fd)
    return False
