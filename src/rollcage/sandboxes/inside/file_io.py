"""Reads or writes one file of a box, as a command of the box: `read PATH LIMIT` or `write PATH MODE`.

Standard library only, for Python 3.8 and later; its text, with that of the module it uses, is handed to `python3 -c`.
Exit code 44: no such file.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

from rollcage.sandboxes.inside.atomic import replace_file, split_path, write_all

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
        write_all(1, data)


def write(path: str, mode: int) -> None:
    """Put what comes on standard input at `path`, whole or not at all, whatever stood there before."""

    def copy(target: int) -> None:
        while True:
            data = os.read(0, _CHUNK)
            if not data:
                return
            write_all(target, data)

    above, name = split_path(path)
    os.makedirs(above, 0o755, exist_ok=True)
    folder = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    replace_file(folder, name, mode, copy)


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
