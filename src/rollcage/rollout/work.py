"""Keeps what verification is about to see of an agent's work, so that it can be judged again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Sequence
from contextlib import aclosing
from pathlib import PurePosixPath
from typing import Protocol

import anyio

from rollcage.errors import SandboxError, StoreError
from rollcage.events import WorkStored
from rollcage.sandboxes.base import PATH, SHELL, Sandbox, tail
from rollcage.types import HOME

TIMEOUT_S = 30.0


class WorkKeeper(Protocol):
    """Where archives are kept."""

    @property
    def limit(self) -> int:
        """The most bytes of one; 0 where none is wanted."""

    def put(self, chunks: AsyncIterable[bytes]) -> Awaitable[tuple[str, int]]:
        """Keep one; its name and its size. StoreError where it cannot be kept."""


async def store_work(
    paths: Sequence[str], keeper: WorkKeeper, packed: AsyncGenerator[bytes, None], *, timeout_s: float = TIMEOUT_S
) -> WorkStored:
    """Keep these paths, packed. Where that fails the event says why: it is no error."""
    if not keeper.limit:
        return WorkStored(why_not="this machine keeps no work: ROLLCAGE_KEEP_WORK_MB is 0")
    try:
        with anyio.fail_after(timeout_s):
            async with aclosing(packed) as chunks:
                digest, size = await keeper.put(chunks)
    except TimeoutError:
        return WorkStored(why_not=f"packing it took more than {timeout_s:g} s")
    except (SandboxError, StoreError) as error:
        return WorkStored(why_not=str(error))
    return WorkStored(digest=digest, size=size, paths=tuple(paths))


async def packed_in_box(box: Sandbox, paths: Sequence[str], after: anyio.Event) -> AsyncGenerator[bytes, None]:
    """The archive of these paths below home, as they are `after` that; SandboxError at its end where something could
    not be read: half of the work must not be judged."""
    # Of many complaints the first are enough: nobody reads the others, and a full pipe would stop the packing.
    script = """read -r
    for name; do shift; [ ! -e "$name" ] || set -- "$@" "$name"; done
    exec tar --create --sparse --one-file-system --sort=name --file=- --files-from=/dev/null -- "$@" \\
      2> >(head --bytes=300 >&2; cat >/dev/null)"""
    names = [str(PurePosixPath(path).relative_to(HOME)) for path in paths]
    argv = [*SHELL, script, "pack", *names]
    async with box.spawn(argv, env={"PATH": PATH}, inherit_image_env=False, cwd=HOME) as process:
        await after.wait()
        await process.stdin.aclose()
        async for chunk in process.stdout:
            yield chunk
        said = (await tail(process.stderr, 300)).text.strip()
        if code := await process.wait():
            raise SandboxError(f"it could not be read whole: {said or code}")
