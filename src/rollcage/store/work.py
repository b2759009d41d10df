"""Agents' work, kept beside the log so that it can be judged again: one compressed archive per content, named by it.

An archive is bytes here; nobody looks inside. What an agent made is opened in boxes only.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import zstandard
from anyio import to_thread

from rollcage.errors import StoreError

_CHUNK = 1 << 18
_NAME = re.compile(r"[0-9a-f]{32}")


class WorkTooLarge(StoreError):
    """It is more than is kept."""


class WorkStore:
    """A folder of archives."""

    def __init__(self, folder: Path, limit: int) -> None:
        """`limit`: no archive is larger than so many bytes, uncompressed; 0: none is kept."""
        self._folder, self.limit = folder, limit

    async def put(self, chunks: AsyncIterable[bytes]) -> tuple[str, int]:
        """Keep an archive; its name, and how many bytes it has. TooLarge where it has too many."""
        digest, size = blake2b(digest_size=16), 0
        part = self._folder / f"{secrets.token_hex(8)}.part"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with part.open("xb") as file, zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False) as sink:
                async for chunk in chunks:
                    size += len(chunk)
                    if size > self.limit:
                        raise WorkTooLarge(f"it is larger than {self.limit >> 20} MB")
                    digest.update(chunk)
                    await to_thread.run_sync(sink.write, chunk)
            name = digest.hexdigest()
            target = self._path(name)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            part.replace(target)
        except OSError as error:
            raise StoreError(f"cannot keep the agent's work in {self._folder}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                part.unlink()
        return name, size

    async def get(self, name: str) -> AsyncGenerator[bytes, None]:
        """The archive of this name; StoreError where it is not there, or not what it was."""
        digest = blake2b(digest_size=16)
        try:
            with self._path(name).open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as source:
                while chunk := await to_thread.run_sync(source.read, _CHUNK):
                    digest.update(chunk)
                    yield chunk
        except OSError as error:
            raise StoreError(f"the work {name} is not in {self._folder} any more: {error.strerror}") from error
        except zstandard.ZstdError as error:
            raise StoreError(f"the work {name} is damaged: {error}") from error
        if digest.hexdigest() != name:
            raise StoreError(f"the work {name} is damaged: it is not what its name says")

    def __contains__(self, name: str) -> bool:
        """Whether it is still there."""
        return self._path(name).exists()

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise StoreError(f"{name!r} names no work")
        return self._folder / name[:2] / f"{name}.tar.zst"
