"""Folders on a disk of the host that boxes write to, where memory disks will not do (Linux before 6.6).

Each provider claims a folder, and makes one in it for each box, which is removed when the box is closed. What a killed
provider left is removed when the next one starts.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from rollcage.errors import SandboxError, SetupError
from rollcage.locks import abandoned, claim
from rollcage.sandboxes.local.fork_server import ForkServer

FOLDER = ".disks"
"""Beside the layers: a fork server's working directory is the only place of the host that its boxes are made from."""


class Disks:
    """The folders of one provider."""

    def __init__(self, layers: Path, uid: int | None) -> None:
        """Makes the provider's folder below `layers`, for boxes that run as `uid` (None: as whoever we are)."""
        self._all = layers / FOLDER
        try:
            self._all.mkdir(mode=0o755, exist_ok=True)
            self._own = claim(self._all, folder=True)
            if uid is not None:
                os.chown(self._own.path, uid, uid)
        except OSError as error:
            raise SetupError(
                f"cannot use {self._all}: {error.strerror}", remedy="set ROLLCAGE_HOME to a folder of yours"
            ) from error

    def place(self, box: str) -> str:
        """Where the disk of a box is to be, as the fork server names it."""
        return f"{FOLDER}/{self._own.path.name}/{box}"

    async def sweep(self, fork_server: ForkServer) -> None:
        """Remove what killed providers left."""
        for left in abandoned(self._all):
            for box in list(left.iterdir()) if left.is_dir() else ():
                await discard(fork_server, f"{FOLDER}/{left.name}/{box.name}")
            # One that cannot be emptied yet, as something still dies in it, is left to the next who starts.
            with suppress(OSError):
                left.rmdir()

    def close(self) -> None:
        """Let go of the folder. Boxes that could not be cleared away are left to the next provider."""
        with suppress(OSError):
            self._own.path.rmdir()
        self._own.close()


async def discard(fork_server: ForkServer, folder: str) -> None:
    """Remove what a box wrote. Where it cannot be done now, the next provider that starts will do it."""
    with suppress(SandboxError):
        await fork_server.ask("discard", {"folder": folder})
