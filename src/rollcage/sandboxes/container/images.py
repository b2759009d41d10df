"""The images boxes are made of: this machine's own system, or one the user names, with an agent's layers baked in."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio.to_thread

from rollcage.sandboxes.container.engine import ContainerEngine, archive_of, empty_system
from rollcage.sandboxes.images.catalog import ImageStore
from rollcage.sandboxes.inside import system as shown
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.progress import SharedWork, tell
from rollcage.types import BASE, System

LAYERS = "/opt/rollcage"
"""Where an image has its layers, one folder each."""
_PLACES = (
    "dev",
    "etc",
    "home/user",
    "opt/rollcage",
    "proc",
    "run/rollcage/inside",
    "run/rollcage/control",
    "sys",
    "tmp",
)
_REPOSITORY = "localhost/rollcage"
_OURS = ("HOME", "USER", "TMPDIR")
"""What an image does not decide: every box has the same home."""


class BakedImage(NamedTuple):
    """Something containers can be made of."""

    name: str
    mounts: Mapping[str, str]
    """What of this machine it needs, by the place where it is seen."""
    layers: tuple[str, ...]
    """The folders in it that a home directory is made of, topmost first."""
    env: Mapping[str, str]
    """What it gives to every command beside the plain environment."""


class ImageBaker:
    """Finds and bakes images. What was baked once is found again, by its content."""

    def __init__(self, engine: ContainerEngine, images: ImageStore, folder: Path) -> None:
        """`images`: where the base system is. `folder`: where archives may lie while they are sent to the engine."""
        self._engine, self._images, self._layers, self._folder = engine, images, images.layers, folder
        self._baking = SharedWork()

    def has_base(self) -> bool:
        """Whether the base system was made on this machine."""
        return self._images.has(BASE)

    async def ensure(self, template: str, layers: Sequence[Layer], system: System | None = None) -> BakedImage:
        """The image for a template, or else a system, and layers, baked now if nobody has yet."""
        folders = {f"{LAYERS}/{folder.name}": folder for folder in await self._layers.ensure_all(layers)}
        async with self._baking.alone():
            template = template or (await self._base() if system == BASE else "")
            mounts = {} if template else _system_mounts()
            base = await self._engine.image(template) if template else await self._system()
            given = await self._engine.environment(base) if template else {}
            env = {name: value for name, value in given.items() if name not in _OURS}
            if not folders:
                return BakedImage(base, mounts, (), env)
            digest = hashlib.sha256("\0".join((base, *folders)).encode()).hexdigest()[:20]
            stem = re.sub(r"[^a-z0-9]+", "-", (template or "system").lower()).strip("-")[-60:]
            name = f"{_REPOSITORY}/{stem}:{digest}"
            if not await self._engine.has_image(name):
                tell(f"making an image for containers of {', '.join(layer.name for layer in layers)} (once)")
                await self._bake(base, folders, name)
        return BakedImage(name, mounts, tuple(folders), env)

    async def _bake(self, base: str, folders: Mapping[str, Path], name: str, *, owner: int = 1000) -> None:
        with tempfile.TemporaryFile(dir=self._folder) as archive:
            await anyio.to_thread.run_sync(lambda: archive_of(folders, archive, owner=owner))
            archive.seek(0)
            await self._engine.bake(base, archive, name)

    async def _base(self) -> str:
        """The base system as an image of the engine, made of the same files as that of local boxes."""
        async with self._images.use(BASE) as image:
            name = f"{_REPOSITORY}/{BASE}:{image.recipe[:20]}"
            if await self._engine.has_image(name):
                return name
            tell("making an image for containers of the base system (once)")
            made = f"{_REPOSITORY}/empty:{BASE}"
            await self._engine.import_tree(empty_system(_PLACES, {}), made)
            *above, last = [self._layers.folder / part for part in self._images.folders(image, "system")]
            for place in (last, *reversed(above)):
                # The topmost gives it the name that says it is whole.
                target = name if place == (above or [last])[0] else f"{_REPOSITORY}/part:{place.parent.name[-20:]}"
                await self._bake(made, {".": place}, target, owner=0)
                made = target
        return name

    async def _system(self) -> str:
        """An image without any file: all it has is mounted."""
        archive = _bare_system()
        name = f"{_REPOSITORY}/bare:{hashlib.sha256(archive).hexdigest()[:20]}"
        if not await self._engine.has_image(name):
            await self._engine.import_tree(archive, name)
        return name


def _bare_system() -> bytes:
    links = {name: str(Path("/", name).readlink()) for name in shown.FOLDERS if Path("/", name).is_symlink()}
    folders = [name for name in shown.FOLDERS if Path("/", name).is_dir() and name not in links]
    return empty_system([*_PLACES, *folders], links)


def _system_mounts() -> dict[str, str]:
    places = [Path("/", name) for name in shown.FOLDERS]
    folders = [path for path in places if path.is_dir() and not path.is_symlink()]
    files = [Path("/etc", name) for name in shown.ETC if Path("/etc", name).exists()]
    return {str(path): str(path.resolve()) for path in (*folders, *files)}
