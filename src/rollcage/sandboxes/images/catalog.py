"""Which images there are: one small file each, naming the parts that a box of that image is made of.

A part is a layer with up to two folders: `home`, laid below the home directory, and `system`, shown beside it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread
from pydantic import ValidationError

from rollcage.errors import SetupError, UsageError
from rollcage.locks import abandoned, claim, locked, try_lock
from rollcage.sandboxes.layers import LayerStore
from rollcage.types import Value

PART = "image"
"""The names of parts begin with it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OF_A_FOLDER = re.compile(r"harbor-[0-9a-f]{24}")
"""Images of task folders: nobody names them, they are the digest of what they are built from."""


class Image(Value):
    """A prebaked box: what lies below its home, what its system is, what its commands find in their environment."""

    name: str = ""
    """What `template` calls it; empty is the plain box."""
    parts: tuple[str, ...] = ()
    """Names of layers, topmost first."""
    whole: bool = False
    """Its parts hold a system of their own; the host's is not shown."""
    env: dict[str, str] = {}
    """Given to every command of its boxes, unless the command's caller says otherwise."""
    recipe: str = ""
    """Digest of what went into it."""
    source: str = ""
    """What it was made from, for people."""
    created_at: float = 0.0
    """Unix time."""


class ImageStore:
    """A folder of images. Any number of tasks and processes may share one."""

    def __init__(self, folder: Path, layers: LayerStore) -> None:
        """Records are kept in `folder`, which need not exist yet; parts in `layers`."""
        self.folder = folder
        """Where the records are."""
        self.layers = layers
        """Where the parts are."""

    def names(self) -> list[str]:
        """Every image there is, by name."""
        return sorted(path.stem for path in self.folder.glob("*.json") if _NAME.fullmatch(path.stem))

    def get(self, name: str) -> Image:
        """The image of that name; UsageError that lists the known ones where there is none."""
        if self.has(name):
            try:
                return Image.model_validate_json(self._record(name).read_bytes())
            except (ValidationError, OSError) as error:
                path = self._record(name)
                raise SetupError(
                    f"image {name!r}: {path} cannot be read", remedy="make it again: rollcage image build"
                ) from error
        if _OF_A_FOLDER.fullmatch(name):
            remedy = "run with --build, or make it first: rollcage image build TASK_FOLDER"
            raise UsageError(f"the image of this task's Dockerfile is not here: {name!r}", remedy=remedy)
        known = ", ".join(self.names()) or "none yet"
        remedy = f"known: {known}; make one: rollcage image build NAME_OR_TASK_FOLDER (or run with --build), "
        remedy += "or rollcage image import NAME DIR_OR_TAR"
        raise UsageError(f"there is no image {name!r}", argument="template", remedy=remedy)

    def has(self, name: str) -> bool:
        """Whether there is an image of that name."""
        return bool(_NAME.fullmatch(name)) and self._record(name).exists()

    def made_from(self, name: str, recipe: str) -> bool:
        """Whether there is a readable image of that name with this recipe."""
        try:
            return self._record(name).exists() and self.get(name).recipe == recipe
        except SetupError:
            return False

    def all(self) -> list[Image]:
        """Every image, by name."""
        return [self.get(name) for name in self.names()]

    def put(self, image: Image) -> None:
        """Keep an image, in place of one that had its name. Its parts must be held until this returns."""
        self._make_folder()
        draft = self.folder / f".{image.name}.{secrets.token_hex(4)}"
        try:
            with draft.open("w") as file:
                file.write(image.model_dump_json(indent=1))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._record(image.name))
        finally:
            draft.unlink(missing_ok=True)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[Image]:
        """The image, which nobody removes while the block lasts; it may be made anew, which changes other folders."""
        if not name:
            yield Image()
            return
        self.get(name)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(locked(self._lock(name), shared=True))
            for _ in range(5):
                image = self.get(name)
                async with AsyncExitStack() as parts:
                    try:
                        for part in image.parts:
                            await parts.enter_async_context(self.layers.hold(part))
                    except FileNotFoundError:
                        continue  # made anew between the two
                    stack.push_async_exit(parts.pop_all())
                    break
            else:
                raise SetupError(
                    f"image {name!r}: its files are gone", remedy=f"make it again: rollcage image build {name}"
                )
            yield image

    async def remove(self, name: str) -> None:
        """Remove an image, and those parts of it that no other image has; UsageError while a box of it is open."""
        if name not in self.names():
            self.get(name)
        lock = try_lock(self._lock(name))
        if lock is None:
            raise UsageError(
                f"image {name!r} is in use by an open box", remedy="wait for its rollouts to end, or abort them"
            )
        try:
            self._record(name).unlink(missing_ok=True)
            await self.prune()
        finally:
            os.close(lock)

    async def prune(self) -> int:
        """Remove parts that no image has and no box uses, and what killed builders left. Returns the bytes of parts."""
        freed = 0
        for path in self.layers.folder.glob(f"{PART}_*-*"):
            if self._wants(path.name):
                continue
            size = await anyio.to_thread.run_sync(_size, path, set())
            freed += size * await self.layers.remove(path.name, wanted=partial(self._wants, path.name))
        await self.layers.sweep()
        for left in abandoned(self.builds):
            await anyio.to_thread.run_sync(partial(shutil.rmtree, left, ignore_errors=True))
        return freed

    @contextmanager
    def build_folder(self) -> Iterator[Path]:
        """A folder for what a build puts aside. Should we be killed, the next `prune` removes it."""
        held = claim(self.builds, folder=True)
        try:
            yield held.path
        finally:
            held.release()

    @property
    def builds(self) -> Path:
        """Where builds put things aside."""
        return self.folder.with_name("builds")

    def size(self, image: Image) -> int:
        """Bytes on disk, of all its parts."""
        return sum(self.sizes([image])[image.name])

    def sizes(self, images: Sequence[Image]) -> dict[str, tuple[int, int]]:
        """`{name: (own, shared)}`: bytes on disk of the parts that one of these has alone, and of those that others of
        them have too. A file with names in several parts counts where it is met first."""
        named = Counter(part for image in images for part in image.parts)
        seen = set[tuple[int, int]]()
        # Lower parts first: a part that moves a folder has files of those below it.
        lowest_first = dict.fromkeys(part for image in images for part in reversed(image.parts))
        parts = {part: _size(self.layers.folder / part, seen) for part in lowest_first}
        return {
            image.name: (
                sum(parts[part] for part in image.parts if named[part] == 1),
                sum(parts[part] for part in image.parts if named[part] > 1),
            )
            for image in images
        }

    def folders(self, image: Image, kind: str) -> list[str]:
        """The `home` or `system` folders of its parts, topmost first, as paths in the layer folder."""
        places = [f"{part}/{kind}" for part in image.parts]
        # We make no symlinks here: one would be followed when it is mounted, out to the host.
        return [place for place in places if stat.S_ISDIR(_mode(self.layers.folder / place))]

    def _wants(self, part: str) -> bool:
        try:
            return any(part in image.parts for image in self.all())
        except SetupError:
            return True  # a record that cannot be read may name it

    def _record(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _lock(self, name: str) -> Path:
        return self.folder / f".{name}.lock"

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"cannot use {self.folder}: {error.strerror}", remedy="set ROLLCAGE_HOME") from error


def check_name(name: str) -> str:
    """The name, if it can be an image's."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"image name {name!r}: use at most 64 letters, digits, dots, dashes and underscores")
    return name


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _size(folder: Path, seen: set[tuple[int, int]]) -> int:
    total = 0
    for _, _, files, here in os.fwalk(folder, follow_symlinks=False):
        for name in files:
            found = os.lstat(name, dir_fd=here)
            if found.st_nlink > 1:
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512
    return total
