"""Puts a file in place whole or not at all. Standard library only, for Python 3.8 and later."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress


class NotAFile(OSError):
    """There is something, but no regular file; or the path cannot be one's."""


def split_path(path: str) -> tuple[str, str]:
    """The folder and the name of a file that is to be written."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if not name or name in (".", ".."):
        raise NotAFile(errno.EISDIR, "not the path of a file")
    return folder or "/", name


def replace_file(folder: int, name: str, mode: int, fill: Callable[[int], None]) -> None:
    """Make or replace a file in an open folder, whatever stood there before. `fill` writes to a descriptor."""
    draft = f".{os.urandom(8).hex()}"
    target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        fill(target)
        os.fchmod(target, mode)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise
    finally:
        os.close(target)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
