"""Folders on a disk of the host that boxes write to, where memory disks will not do (Linux before 6.6).

Each provider has a folder with a lock that dies with it, and in it one for each box, which goes when the box is closed.
What a killed provider left goes when the next one starts.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from rollcage.errors import SandboxError, SetupError
from rollcage.layers import try_lock
from rollcage.sandboxes.keeper import Keeper

FOLDER = ".disks"
"""Beside the layers: a keeper's working directory is the only place of the host that its boxes are made from."""


class Disks:
    """The folders of one provider."""

    def __init__(self, layers: Path, uid: int | None) -> None:
        """Makes the provider's folder below `layers`, for boxes that run as `uid` (null: as whoever we are)."""
        self._all = layers / FOLDER
        try:
            self._all.mkdir(mode=0o755, exist_ok=True)
            self._owner, self._lock = _new_owner(self._all)
            self._own = self._all / self._owner
            self._own.mkdir(mode=0o700)
            if uid is not None:
                os.chown(self._own, uid, uid)
        except OSError as error:
            raise SetupError(
                f"cannot use {self._all}: {error.strerror}; set ROLLCAGE_HOME to a folder of yours"
            ) from error

    def place(self, box: str) -> str:
        """Where the disk of a box is to be, as the keeper names it."""
        return f"{FOLDER}/{self._owner}/{box}"

    async def sweep(self, keeper: Keeper) -> None:
        """Remove what killed providers left."""
        for path in self._all.glob("*.lock"):
            lock = try_lock(path)
            if lock is None:
                continue
            try:
                left = self._all / path.stem
                for box in list(left.iterdir()) if left.exists() else ():
                    await discard(keeper, f"{FOLDER}/{left.name}/{box.name}")
                # One that cannot be emptied yet, as something still dies in it, is left to the next who starts.
                with suppress(OSError):
                    if left.exists():
                        left.rmdir()
                    path.unlink()
            finally:
                os.close(lock)

    def close(self) -> None:
        """Let go of the folder. Boxes that could not be cleared away are left to the next provider."""
        with suppress(OSError):
            self._own.rmdir()
            (self._all / f"{self._owner}.lock").unlink()
        os.close(self._lock)


async def discard(keeper: Keeper, folder: str) -> None:
    """Remove what a box wrote. Where it cannot be done now, the next provider that starts will do it."""
    with suppress(SandboxError):
        await keeper.ask("discard", {"folder": folder})


def _new_owner(folder: Path) -> tuple[str, int]:
    """A name that nobody has, and the descriptor that holds its lock."""
    while True:
        name = f"{os.getpid()}-{secrets.token_hex(4)}"
        path = folder / f"{name}.lock"
        lock = try_lock(path)
        if lock is None:
            continue
        # Between making and locking it, somebody who sweeps may have taken it for a dead one's.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(lock).st_ino:
                return name, lock
        os.close(lock)
