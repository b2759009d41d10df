"""Parts of a home directory, packed in one box and unpacked in another. Here they are bytes; nobody looks inside."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import PurePosixPath
from typing import IO

import anyio
from anyio import to_thread
from anyio.abc import ByteReceiveStream

from rollcage.errors import SandboxError
from rollcage.sandboxes.base import PATH, Sandbox, tail
from rollcage.types import HOME

_IN_MEMORY = 4 << 20
_CHUNK = 1 << 18


class HomeArchive:
    """An archive of (parts of) a home directory."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    async def unpack(self, box: Sandbox) -> None:
        """Put it into the home directory of another box, over what is there."""
        argv = ["tar", "--extract", "--no-same-owner", "--unlink-first", "--recursive-unlink", "--file=-"]
        async with (
            box.spawn(argv, env={"PATH": PATH}, inherit_image_env=False, cwd=HOME) as process,
            anyio.create_task_group() as tasks,
        ):
            said: list[str] = []
            tasks.start_soon(_listen, process.stderr, said)
            tasks.start_soon(_listen, process.stdout, said)
            self._file.seek(0)
            try:
                while chunk := await to_thread.run_sync(self._file.read, _CHUNK):
                    await process.stdin.send(chunk)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                pass  # its exit code tells why it ended early
            await process.stdin.aclose()
            code = await process.wait()
        if code:
            raise SandboxError(f"cannot put the saved home directory into the box: {' '.join(said).strip() or code}")


@asynccontextmanager
async def archived_home(
    box: Sandbox, *, only: Sequence[str] = (), without: Sequence[str] = (), limit: int
) -> AsyncIterator[HomeArchive]:
    """Pack the home directory of a box: `only` these paths (all where none is named), `without` those.

    SandboxError where it comes to more than `limit` bytes.
    """
    roots = [_relative(path) for path in only] or ["."]
    leave_out = [f"--exclude=./{_relative(path)}" for path in without]
    argv = ["tar", "--create", "--sparse", "--one-file-system", "--anchored", "--no-wildcards", *leave_out]
    argv += ["--ignore-failed-read", "--file=-", "--", *roots]
    with tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY) as file:
        size, said = 0, list[str]()
        async with box.spawn(argv, env={"PATH": PATH}, inherit_image_env=False, cwd=HOME) as process:
            await process.stdin.aclose()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_listen, process.stderr, said)
                async for chunk in process.stdout:
                    size += len(chunk)
                    if size > limit:
                        tasks.cancel_scope.cancel()
                        break
                    await to_thread.run_sync(file.write, chunk) if size > _IN_MEMORY else file.write(chunk)
            if size > limit:
                raise SandboxError(f"the home directory is larger than {limit >> 20} MB after setup")
            code = await process.wait()
        if code:
            raise SandboxError(f"cannot save the home directory: {' '.join(said).strip() or code}")
        yield HomeArchive(file)


async def _listen(stream: ByteReceiveStream, said: list[str]) -> None:
    said.append((await tail(stream, 2000)).text)


def _relative(path: str) -> str:
    return str(PurePosixPath(path).relative_to(HOME))
