"""Reads tar archives that somebody else made, within bounds: what stands before a file's content can be made to come to
gigabytes, in an archive of a few kB, and all of it would be read into memory."""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, Literal

from rollcage.errors import UsageError

_MOST_HEADERS = 1 << 20
"""Bytes before a file's content: its header, and what continues that (long names, attributes, where holes are)."""
_MOST_SHARED = 1 << 16
"""Of attributes that hold for all that follows in the archive."""
_MOST_NAME = 4096
"""As the kernel has it."""
_RECORD = tarfile.RECORDSIZE
"""A stream is read so many bytes at a time."""


class Entries:
    """What an archive holds, in its order. It remembers none of it."""

    def __init__(self, tar: tarfile.TarFile, source: _Bounded) -> None:
        self._tar, self._source = tar, source

    def __iter__(self) -> Iterator[tarfile.TarInfo]:
        members = iter(self._tar)
        while True:
            self._source.end = self._tar.offset + _MOST_HEADERS + _RECORD
            member = next(members, None)
            if member is None:
                return
            self._source.end = math.inf
            vars(self._tar)["members"] = []
            self._check(member)
            yield member

    def content(self, member: tarfile.TarInfo) -> BinaryIO | None:
        """Of the member that came last, if it is a file."""
        return self._tar.extractfile(member)  # type: ignore[return-value]

    def _check(self, member: tarfile.TarInfo) -> None:
        if max(len(member.name), len(member.linkname)) > _MOST_NAME:
            raise UsageError(f"cannot take {member.name[:100]!r}...: a name or a link in it is too long for any system")
        if sum(len(key) + len(value) for key, value in self._tar.pax_headers.items()) > _MOST_SHARED:
            raise _too_much()


@contextmanager
def entries(stream: BinaryIO | io.BufferedIOBase, mode: Literal["r|", "r:"] = "r|") -> Iterator[Entries]:
    """What a tar archive holds that is not compressed. Mode `r:` is for files that can be read anywhere."""
    source = _Bounded(stream)
    with tarfile.open(fileobj=source, mode=mode) as tar:
        yield Entries(tar, source)


class _Bounded(io.BufferedIOBase):
    """A stream that must not be read beyond a point, for now."""

    def __init__(self, stream: BinaryIO | io.BufferedIOBase) -> None:
        self._stream, self._at = stream, 0
        self.end: float = _MOST_HEADERS + _RECORD

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or self._at + size > self.end:
            raise _too_much()
        data = self._stream.read(size)
        self._at += len(data)
        return data

    def seek(self, place: int, whence: int = io.SEEK_SET, /) -> int:
        self._at = self._stream.seek(place, whence)
        return self._at

    def tell(self) -> int:
        return self._at


def _too_much() -> UsageError:
    return UsageError("this is no usable tar archive: what stands before the content of a file has no end")
