"""Layers: prebaked pieces of a box, built once, named by their content, shared by all boxes."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from rollcage.errors import SetupError
from rollcage.locks import locked, try_lock
from rollcage.sandboxes.progress import tell

BOX_UID = 61234
"""The host user that layers belong to where we are root: nobody's, on any usual machine. Boxes run as it where they
cannot have users of their own."""
BOX_UIDS = range(0x70000000, 0x71000000)
"""Host users of which each box gets its own, where we are root: of a range that nothing else hands out."""


@dataclass(frozen=True)
class Layer:
    """A recipe for a piece of home directory: `build` fills an empty folder; `key` names what it will contain."""

    name: str
    """For people: `opencode`."""
    key: str
    """Changes whenever the content would: versions, hashes, seeded text."""
    build: Callable[[Path], Awaitable[None]]
    """Fills the folder it is given, as the caller of this process; ownership is settled afterwards."""


def box_uid() -> int | None:
    """BOX_UID where we are root; None where boxes run as whoever we are."""
    return BOX_UID if os.geteuid() == 0 else None


class LayerStore:
    """A folder of built layers. Any number of tasks and processes may share one."""

    def __init__(self, folder: Path, *, owner: int | None = None) -> None:
        """Layers will belong to the user `owner` (None: to us), as an overlay needs."""
        self.folder = folder
        """Where they are: one folder each, named by content."""
        self._owner = owner
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if folder.stat().st_mode & 0o777 != 0o755:
                folder.chmod(0o755)
        except OSError as error:
            raise SetupError(
                f"cannot use {folder}: {error.strerror}", remedy="set ROLLCAGE_HOME to a folder of yours"
            ) from error

    def has(self, layer: Layer) -> bool:
        """Whether somebody has built it."""
        return self.folder_of(layer).exists()

    def folder_of(self, layer: Layer) -> Path:
        """Where it is, or will be."""
        digest = hashlib.sha256(f"{layer.name}\0{layer.key}".encode()).hexdigest()[:20]
        return self.folder / f"{re.sub(r'[^A-Za-z0-9_.]', '_', layer.name)[:40]}-{digest}"

    async def ensure(self, layer: Layer) -> Path:
        """The layer's folder, built now if nobody has built it yet."""
        return await self.adopt(self.folder_of(layer).name, layer.build)

    async def adopt(self, name: str, build: Callable[[Path], Awaitable[None]]) -> Path:
        """The same for a layer whose folder's name is known: one that was built on another machine, say."""
        final = self.folder / name
        if final.exists():
            return final
        async with locked(self._lock(name)):
            if not final.exists():
                await self._build(build, final)
        return final

    async def ensure_all(self, layers: Iterable[Layer]) -> list[Path]:
        """The folders of layers that a box is about to be made of; whoever waits for the box is told what is built."""
        folders = []
        for layer in layers:
            if not self.has(layer):
                tell(f"preparing {layer.name} (once)")
            folders.append(await self.ensure(layer))
        return folders

    @asynccontextmanager
    async def held(self, layer: Layer) -> AsyncIterator[Path]:
        """The layer's folder, built now if need be, which nobody removes while the block lasts."""
        async with AsyncExitStack() as stack:
            while True:
                final = await self.ensure(layer)
                try:
                    await stack.enter_async_context(self.hold(final.name))
                except FileNotFoundError:
                    continue  # removed between the two
                break
            yield final

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[Path]:
        """Keep a built layer from being removed while the block lasts; FileNotFoundError where it is gone."""
        async with locked(self._lock(name), shared=True):
            folder = self.folder / name
            if not folder.exists():
                raise FileNotFoundError(name)
            yield folder

    async def remove(self, name: str, *, wanted: Callable[[], bool]) -> bool:
        """Remove a built layer; false where somebody holds it, or `wanted`, asked under its lock, says so."""
        lock = try_lock(self._lock(name))
        if lock is None:
            return False
        try:
            if wanted():
                return False
            draft = self._draft(name)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_remove, draft)
                if (self.folder / name).exists():
                    # Out of sight first: half a layer must never look like a whole one.
                    (self.folder / name).rename(draft)
                    await anyio.to_thread.run_sync(_remove, draft)
            return True
        finally:
            os.close(lock)

    async def sweep(self) -> None:
        """Remove what killed builders left."""
        for draft in self.folder.glob(".*.draft"):
            lock = try_lock(self._lock(draft.name[1 : -len(".draft")]))
            if lock is not None:
                try:
                    await anyio.to_thread.run_sync(_remove, draft)
                finally:
                    os.close(lock)

    def _lock(self, name: str) -> Path:
        return self.folder / f".{name}.lock"

    def _draft(self, name: str) -> Path:
        return self.folder / f".{name}.draft"

    async def _build(self, build: Callable[[Path], Awaitable[None]], final: Path) -> None:
        draft = self._draft(final.name)
        # We hold the lock: whoever left this was killed.
        await anyio.to_thread.run_sync(_remove, draft)
        draft.mkdir(mode=0o755)
        try:
            await build(draft)
            await anyio.to_thread.run_sync(_settle, draft, self._owner)
            draft.rename(final)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_remove, draft)
            raise


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _settle(folder: Path, owner: int | None) -> None:
    """Hand a tree to its owner, symlinks themselves and not what they lead to."""
    folder.chmod(0o755)
    if owner is None:
        return
    for _, folders, files, here in os.fwalk(folder, follow_symlinks=False):
        for name in (*folders, *files):
            os.chown(name, owner, owner, dir_fd=here, follow_symlinks=False)
        os.chown(here, owner, owner)
