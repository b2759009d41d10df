"""Reads what may be compressed: gzip, bzip2, xz or zstd, told by its first bytes and not by its name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import zstandard

from rollcage.errors import UsageError

_ZSTD = b"\x28\xb5\x2f\xfd"
_MAGIC = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", _ZSTD)
_STEP = 1024
"""Bytes of zstd decompressed at a time: four of them may stand for 128 kB."""


def is_compressed(file: io.BufferedReader) -> bool:
    """Whether what comes next is compressed."""
    return file.peek(8).startswith(_MAGIC)


@contextmanager
def plain(file: io.BufferedReader) -> Iterator[io.BufferedIOBase]:
    """What the file holds, decompressed as it is read."""
    head = file.peek(8)
    stream: io.BufferedIOBase = file
    if head.startswith(_MAGIC[0]):
        stream = gzip.GzipFile(fileobj=file, mode="rb")
    elif head.startswith(_MAGIC[1]):
        stream = bz2.BZ2File(file)
    elif head.startswith(_MAGIC[2]):
        stream = lzma.LZMAFile(file)  # noqa: SIM115 (closed below)
    elif head.startswith(_ZSTD):
        stream = io.BufferedReader(_Zstd(file), 1 << 17)
    try:
        yield stream
    finally:
        if stream is not file:
            stream.close()


@contextmanager
def boundary() -> Iterator[None]:
    """Says of whatever a damaged or foreign archive raises that the archive cannot be used."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
        raise UsageError(f"this is no usable tar archive: {error}") from error
    except RecursionError as error:
        raise UsageError("this is no usable tar archive: headers follow headers without end") from error
    except OSError as error:
        if error.errno is None:  # said by a decompressor and not by the system
            raise UsageError(f"this is no usable tar archive: {error}") from error
        raise


class _Zstd(io.RawIOBase):
    """Decompresses frame after frame, and says so where the last is not whole."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._rest, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._ready:
            chunk = self._rest or self._file.read(_STEP)
            self._rest = b""
            if not chunk:
                if self._frame is not None:
                    raise EOFError("it ends before its end")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(chunk))
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
