"""Reads and writes files of a box as the box itself would see them, and nothing beside the box."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress

from . import kernel
from .world import ROOT


class NotAFile(OSError):
    """There is something, but no regular file."""


def open_file(path: str) -> int:
    """A descriptor of a regular file. Opened only once known to be one: a FIFO would hang, a device might act."""
    root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    found = kernel.open_in(root, path, os.O_PATH)
    if not stat.S_ISREG(os.fstat(found).st_mode):
        raise NotAFile(0, "not a regular file")
    return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def write_file(path: str, data: int, mode: int) -> None:
    """Put the content of the descriptor `data` at `path`, whole or not at all, whatever stood there before."""
    folder_path, _, name = path.rstrip("/").rpartition("/")
    if not name or name in (".", ".."):
        raise NotAFile(0, "not the path of a file")
    root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    folder = _open_folder(root, folder_path or "/")
    draft = f".{secrets.token_hex(8)}"
    target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        size, done = os.fstat(data).st_size, 0
        while done < size:
            done += os.sendfile(target, data, done, size - done)
        os.fchmod(target, mode)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


def is_folder(path: str) -> bool:
    """Whether a command could start in this folder."""
    root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.close(kernel.open_in(root, path, os.O_PATH | os.O_DIRECTORY))
    except OSError:
        return False
    finally:
        os.close(root)
    return True


def _open_folder(root: int, path: str) -> int:
    """Open a folder for work in it, making it and those above it where they are missing."""
    try:
        return kernel.open_in(root, path, os.O_RDONLY | os.O_DIRECTORY)
    except kernel.Refused as refused:
        above, _, name = path.rstrip("/").rpartition("/")
        if refused.errno != errno.ENOENT or not name:
            raise
        parent = _open_folder(root, above or "/")
        os.mkdir(name, 0o755, dir_fd=parent)
        return kernel.open_in(root, path, os.O_RDONLY | os.O_DIRECTORY)
