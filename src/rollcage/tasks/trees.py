"""Files of any kind and size that a task refers to: looked at, and packed so that the same give the same bytes."""

from __future__ import annotations

import os
import stat
import tarfile
from collections.abc import AsyncGenerator, Iterator
from hashlib import blake2b
from pathlib import Path

from anyio import to_thread

from rollcage.errors import TaskError
from rollcage.types import FileTree

MOST_BYTES = 512 << 20
MOST_FILES = 50_000
"""Of one folder of a task: more belongs in its image."""
_CHUNK = 1 << 18
_BLOCK = tarfile.BLOCKSIZE


def tree_of(folder: Path, *, most_bytes: int = 0, remedy: str = "put what is large into the task's image") -> FileTree:
    """What lies in a folder, or one file; TaskError, before anything is read, where it cannot be taken as it is.

    `most_bytes`: instead of MOST_BYTES. `remedy`: for a folder with more.
    """
    most_bytes = most_bytes or MOST_BYTES
    size, count = 0, 0
    for path, found in _found(folder):
        if stat.S_ISREG(found.st_mode):
            size, count = size + found.st_size, count + 1
        if size > most_bytes or count > MOST_FILES:
            raise TaskError(f"{folder}: is more than {most_bytes >> 20} MB or {MOST_FILES} files", remedy=remedy)
        if stat.S_ISLNK(found.st_mode):
            _check_link(folder, path)
    digest = blake2b(digest_size=16)
    try:
        for chunk in _chunks(folder):
            digest.update(chunk)
    except OSError as error:
        raise TaskError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    return FileTree(digest=digest.hexdigest(), size=size, files=count, path=str(folder.absolute()))


async def packed(path: str) -> AsyncGenerator[bytes, None]:
    """The archive, a piece at a time. TaskError where the files are gone."""
    if not path:
        raise TaskError("a task's files are neither kept here nor known where they lie; read the task again")
    chunks = _chunks(Path(path))
    try:
        while (chunk := await to_thread.run_sync(next, chunks, None)) is not None:
            yield chunk
    except OSError as error:
        raise TaskError(f"{error.filename or path}: cannot be read: {error.strerror}") from error


def _found(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Everything below a folder, in order; a file is what it holds itself."""
    try:
        top = folder.lstat()
        if not stat.S_ISDIR(top.st_mode):
            yield folder, top
            return
        for above, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted((*folders, *files)):
                path = Path(above, name)
                found = path.lstat()
                if not any(kind(found.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)):
                    raise TaskError(f"{path}: is neither a file, a folder nor a link")
                yield path, found
    except OSError as error:
        raise TaskError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error


def _check_link(folder: Path, path: Path) -> None:
    """A link may lead to a place in the box, or within its folder; one that climbs out of that is a mistake."""
    target = path.readlink()
    place = os.path.normpath(path.parent.relative_to(folder) / target) if path != folder else os.pardir
    if not target.is_absolute() and Path(place).parts[0] == os.pardir:
        raise TaskError(f"{path}: is a link to {str(target)!r}, which leads out of {folder}")


def _chunks(folder: Path) -> Iterator[bytes]:
    """A tar archive without what differs from machine to machine: owners and times."""
    for path, found in _found(folder):
        name = str(path.relative_to(folder)) if path != folder else path.name
        entry = tarfile.TarInfo(name)
        entry.mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode):
            entry.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(found.st_mode):
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, str(path.readlink()), 0o777
        else:
            entry.size = found.st_size
        yield entry.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if stat.S_ISREG(found.st_mode):
            yield from _content(path, found.st_size)
    yield bytes(2 * _BLOCK)


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with path.open("rb") as file:
        while left and (chunk := file.read(min(left, _CHUNK))):
            left -= len(chunk)
            yield chunk
    if left:
        raise TaskError(f"{path}: became shorter while it was read")
    yield bytes(-size % _BLOCK)
