"""Reads and writes files below a root folder as a process would whose root it is: nothing leads out of it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from itertools import islice

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside.atomic import NotAFile, replace_file, split_path

_ATTEMPTS = 16
"""A file that is replaced while it is opened is looked for again so often."""


def open_file(root: str, path: str) -> int:
    """A descriptor of a regular file. Opened only once known to be one: a FIFO would hang, a device might act."""
    above = _open_root(root)
    try:
        for _ in range(_ATTEMPTS):
            found = kernel.open_in(above, path, os.O_PATH)
            if not stat.S_ISREG(os.fstat(found).st_mode):
                raise NotAFile(0, "not a regular file")
            opened = kernel.open_in(above, path, os.O_RDONLY | os.O_NONBLOCK)
            if os.path.sameopenfile(found, opened):
                return opened
            os.close(found)
            os.close(opened)
    except kernel.KernelRefused as refused:
        if refused.errno != errno.EACCES:
            raise
        raise NotAFile(0, "not within reach of the box's user") from refused
    raise NotAFile(0, "it is replaced again and again")


def write_file(root: str, path: str, data: int, mode: int) -> None:
    """Put the content of the descriptor `data` at `path`, with the folders above it."""

    def copy(target: int) -> None:
        size, done = os.fstat(data).st_size, 0
        while done < size:
            done += os.sendfile(target, data, done, size - done)

    above, name = split_path(path)
    replace_file(_open_folder(_open_root(root), above), name, mode, copy)


def names_in(root: str, path: str, most: int) -> list[str] | None:
    """What is in a folder, which is made where there is none; None where that is more than so many."""
    folder = _open_folder(_open_root(root), path)
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, most + 1)]
    os.close(folder)
    return names if len(names) <= most else None


def is_folder(root: str, path: str) -> bool:
    """Whether a command could start in this folder."""
    above = _open_root(root)
    try:
        os.close(kernel.open_in(above, path, os.O_PATH | os.O_DIRECTORY))
    except OSError:
        return False
    finally:
        os.close(above)
    return True


def _open_root(root: str) -> int:
    return os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def _open_folder(root: int, path: str) -> int:
    """Open a folder for work in it, making it and those above it where they are missing."""
    try:
        return kernel.open_in(root, path, os.O_RDONLY | os.O_DIRECTORY)
    except kernel.KernelRefused as refused:
        above, _, name = path.rstrip("/").rpartition("/")
        if refused.errno != errno.ENOENT or not name:
            raise
        parent = _open_folder(root, above or "/")
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        return kernel.open_in(root, path, os.O_RDONLY | os.O_DIRECTORY)
