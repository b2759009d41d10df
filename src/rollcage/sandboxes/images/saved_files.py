"""The files of a saved image: in a folder, or in an archive; and how much may be read of them."""

from __future__ import annotations

import hashlib
import io
import os
import posixpath
import stat
from typing import BinaryIO, NoReturn, Protocol

from rollcage.errors import UsageError
from rollcage.sandboxes.images.archives import entries
from rollcage.sandboxes.images.tree import parts_of
from rollcage.sandboxes.inside.kernel import open_in

MOST_FILES = 10_000
"""And folders, in the archive of an image: it has one or two for each layer."""
_MOST_LINKS = 8
_CHUNK = 1 << 20


class ImageFiles(Protocol):
    """The files of a saved image, by name."""

    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    def open(self, name: str) -> io.BufferedReader:
        """That file; UsageError where there is none."""


def refuse(why: str) -> NoReturn:
    """This image cannot be taken."""
    raise UsageError(
        f"cannot take this saved image: {why}", remedy="`docker export` of a container gives one tree of files"
    )


class Counted(io.BufferedIOBase):
    """A stream that knows how much was read, ends at too much, and knows what it was."""

    def __init__(self, stream: io.BufferedIOBase, limit: int) -> None:
        self._stream, self._limit, self._hash = stream, limit, hashlib.sha256()
        self.count = 0

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = self._stream.read(size)
        self.count += len(chunk)
        if self.count > self._limit:
            refuse("its layers come to more than --max-gb allows, decompressed; raise it")
        self._hash.update(chunk)
        return chunk

    def digest(self) -> str:
        """Of what was read, as images write it."""
        return f"sha256:{self._hash.hexdigest()}"


class Folder:
    """The files in a folder; links in it lead into it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def has(self, name: str) -> bool:
        try:
            self.open(name).close()
        except UsageError:
            return False
        return True

    def open(self, name: str) -> io.BufferedReader:
        try:
            fd = open_in(self._fd, f"/{name}", os.O_RDONLY | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot take this saved image: {name[:200]!r} is missing") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            refuse(f"{name[:200]!r} is no file")
        return os.fdopen(fd, "rb")


class Archive:
    """The files in a tar archive that can be read anywhere; links in it lead to others of them."""

    def __init__(self, file: BinaryIO) -> None:
        self._fd = file.fileno()
        self._places: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with entries(file, "r:") as found:
            for number, member in enumerate(found):
                if number >= MOST_FILES:
                    refuse("it has more files than any image has layers")
                name = "/".join(parts_of(member.name))
                if member.isreg() and not member.issparse():
                    self._places[name] = (member.offset_data, member.size)
                elif member.issym():
                    self._links[name] = posixpath.join(posixpath.dirname(name), member.linkname)
                elif member.islnk():
                    self._links[name] = member.linkname

    def has(self, name: str) -> bool:
        return self._resolved(name) is not None

    def open(self, name: str) -> io.BufferedReader:
        place = self._resolved(name)
        if place is None:
            refuse(f"{name[:200]!r} is missing")
        return io.BufferedReader(_Window(self._fd, *place), _CHUNK)

    def _resolved(self, name: str) -> tuple[int, int] | None:
        for _ in range(_MOST_LINKS):
            name = posixpath.normpath(name)
            if name in self._places:
                return self._places[name]
            if name not in self._links:
                return None
            name = self._links[name]
        return None


class _Window(io.RawIOBase):
    """A part of a file, read without moving the file's own place."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self._fd, self._at, self._end = fd, start, start + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        count = os.preadv(self._fd, [memoryview(buffer)[: max(0, self._end - self._at)]], self._at)
        self._at += count
        return count
