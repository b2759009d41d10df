"""Reads a small folder whole, where all in it is plain: files and folders of one user's, with nothing that misleads."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside.atomic import write_all

MOST_ENTRIES, MOST_BYTES, MOST_DEPTH = 200, 2 << 20, 16
_UNUSUAL = (".git", "node_modules", ".venv")
"""Folders that are more than their files."""


class NotPlain(Exception):
    """It takes a command to look at it."""


def plain_contents(root: str, folder: str, empty: Sequence[str]) -> tuple[list[list[Any]], int] | None:
    """Name, mode, time and size of each entry (-1: a folder), itself without a name, and a file with what the files
    hold, one after the other; None where it takes a command. `empty`: folders that are made.
    """
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    content = os.memfd_create("contents")
    try:
        entries = _entries(kernel.open_plain(top, folder[1:], os.O_RDONLY | os.O_DIRECTORY), content)
        for path in empty:
            _make_empty(top, path)
    except (NotPlain, OSError, UnicodeError):
        os.close(content)
        return None
    os.lseek(content, 0, os.SEEK_SET)
    return entries, content


def _entries(top: int, content: int) -> list[list[Any]]:
    status = os.fstat(top)
    found: list[list[Any]] = [["", stat.S_IMODE(status.st_mode), int(status.st_mtime), -1]]
    waiting, left = [("", top)], MOST_BYTES
    while waiting:
        above, folder = waiting.pop()
        _check(above.count("/") < MOST_DEPTH)
        _check(os.fstat(folder).st_mode & 0o700 == 0o700)
        for name in os.listdir(folder):
            path, status = above + name, os.lstat(name, dir_fd=folder)
            path.encode()  # as what it is called can be told
            _check(len(found) < MOST_ENTRIES and name not in _UNUSUAL)
            if stat.S_ISDIR(status.st_mode):
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                waiting.append((f"{path}/", inner))
                size = -1
            else:
                # In here we may read what no command of the box may.
                _check(stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and bool(status.st_mode & 0o400))
                data = _read(name, folder, left)
                write_all(content, data)
                size = len(data)
                left -= size
            found.append([path, stat.S_IMODE(status.st_mode), int(status.st_mtime), size])
        os.close(folder)
    return found


def _read(name: str, folder: int, most: int) -> bytes:
    opened = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    data = bytearray()
    while chunk := os.read(opened, 1 << 20):
        data += chunk
        _check(len(data) <= most)
    os.close(opened)
    return bytes(data)


def _make_empty(top: int, path: str) -> None:
    with suppress(FileNotFoundError):
        os.close(_open(top, path))
        raise NotPlain
    parts = path[1:].split("/")
    for depth in range(1, len(parts) + 1):
        with suppress(FileExistsError):
            above = _open(top, "/".join(("", *parts[: depth - 1]))) if depth > 1 else os.dup(top)
            os.mkdir(parts[depth - 1], 0o755, dir_fd=above)
            os.close(above)


def _open(top: int, path: str) -> int:
    """A folder; FileNotFoundError where there is nothing, NotPlain where something else is."""
    try:
        return kernel.open_plain(top, path[1:], os.O_RDONLY | os.O_DIRECTORY)
    except kernel.KernelRefused as refused:
        if refused.errno == errno.ENOENT:
            raise FileNotFoundError from refused
        raise NotPlain from refused


def _check(usual: bool) -> None:
    if not usual:
        raise NotPlain
