# ruff: noqa: PTH103, PTH104, PTH108, PTH116 (speaks to the kernel in its own terms)
"""Reads or writes one file of a box, as a command of the box: `read PATH LIMIT` or `write PATH MODE`.

Standard library only, for Python 3.8 and later; its text is handed to `python3 -c`. Exit code 44: no such file.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
from contextlib import suppress

MISSING = 44
FAILED = 45
_CHUNK = 1 << 18


def read(path: str, limit: int) -> None:
    """Print at most `limit` bytes of a regular file."""
    # Looked at before it is opened: a device might act.
    if not stat.S_ISREG(os.stat(path).st_mode):
        sys.exit(MISSING)
    # It may have become a pipe since.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        sys.exit(MISSING)
    while limit > 0:
        data = os.read(fd, min(limit, _CHUNK))
        if not data:
            break
        limit -= len(data)
        _put(1, data)


def write(path: str, mode: int) -> None:
    """Put what comes on standard input at `path`, whole or not at all, whatever stood there before."""
    folder, _, name = path.rstrip("/").rpartition("/")
    if not name or name in (".", ".."):
        raise OSError(errno.EISDIR, "not the path of a file")
    os.makedirs(folder or "/", 0o755, exist_ok=True)
    draft = f"{folder}/.{secrets.token_hex(8)}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while True:
            data = os.read(0, _CHUNK)
            if not data:
                break
            _put(fd, data)
        os.fchmod(fd, mode)
        os.rename(draft, path)
    except OSError:
        with suppress(OSError):
            os.unlink(draft)
        raise


def _put(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def main() -> None:
    """Do what the arguments say."""
    action, path, number = sys.argv[1:4]
    try:
        if action == "read":
            read(path, int(number))
        else:
            write(path, int(number))
    except OSError as error:
        if action == "read" and error.errno in (errno.ENOENT, errno.ENOTDIR):
            sys.exit(MISSING)
        sys.stderr.write(str(error.strerror))
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
