"""The images boxes are made of: this machine's own system, or one the user names, with an agent's layers baked in."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from rollcage.layers import Layer, LayerStore
from rollcage.sandboxes.containers.engine import Engine, archive_of, empty_system

LAYERS = "/opt/rollcage"
"""Where an image has its layers, one folder each."""
_PLACES = ("dev", "etc", "home/user", "opt/rollcage", "proc", "run/rollcage/inside", "run/rollcage/line", "sys", "tmp")
_REPOSITORY = "localhost/rollcage"
_OURS = ("HOME", "USER", "TMPDIR")
"""What an image does not decide: every box has the same home."""
_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives",
    "ca-certificates",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
)


class Image(NamedTuple):
    """Something containers can be made of."""

    name: str
    mounts: Mapping[str, str]
    """What of this machine it needs, by the place where it is seen."""
    layers: tuple[str, ...]
    """The folders in it that a home directory is made of, topmost first."""
    env: Mapping[str, str]
    """What it gives to every command beside the plain environment."""


class Images:
    """Finds and bakes images. What was baked once is found again, by its content."""

    def __init__(self, engine: Engine, layers: LayerStore, folder: Path) -> None:
        """`folder`: where archives may lie while they are sent to the engine."""
        self._engine, self._layers, self._folder = engine, layers, folder
        self._baking = anyio.Lock()

    async def ensure(self, template: str, layers: Sequence[Layer]) -> Image:
        """The image for a template (empty: this machine's own system) and layers, baked now if nobody has yet."""
        folders = {f"{LAYERS}/{folder.name}": folder for folder in [await self._layers.ensure(each) for each in layers]}
        async with self._baking:
            mounts = {} if template else _system_mounts()
            base = await self._engine.image(template) if template else await self._system()
            given = await self._engine.environment(base) if template else {}
            env = {name: value for name, value in given.items() if name not in _OURS}
            if not folders:
                return Image(base, mounts, (), env)
            digest = hashlib.sha256("\0".join((base, *folders)).encode()).hexdigest()[:20]
            stem = re.sub(r"[^a-z0-9]+", "-", (template or "system").lower()).strip("-")[-60:]
            name = f"{_REPOSITORY}/{stem}:{digest}"
            if not await self._engine.has_image(name):
                await self._bake(base, folders, name)
        return Image(name, mounts, tuple(folders), env)

    async def _bake(self, base: str, folders: Mapping[str, Path], name: str) -> None:
        with tempfile.TemporaryFile(dir=self._folder) as archive:
            await anyio.to_thread.run_sync(lambda: archive_of(folders, archive, owner=1000))
            archive.seek(0)
            await self._engine.bake(base, archive, name)

    async def _system(self) -> str:
        """An image without any file: all it has is mounted."""
        archive = _bare_system()
        name = f"{_REPOSITORY}/bare:{hashlib.sha256(archive).hexdigest()[:20]}"
        if not await self._engine.has_image(name):
            await self._engine.import_tree(archive, name)
        return name


def _bare_system() -> bytes:
    links = {name: str(Path("/", name).readlink()) for name in _SYSTEM if Path("/", name).is_symlink()}
    folders = [name for name in _SYSTEM if Path("/", name).is_dir() and name not in links]
    return empty_system([*_PLACES, *folders], links)


def _system_mounts() -> dict[str, str]:
    folders = [Path("/", name) for name in _SYSTEM if Path("/", name).is_dir() and not Path("/", name).is_symlink()]
    files = [Path("/etc", name) for name in _ETC if Path("/etc", name).exists()]
    return {str(path): str(path.resolve()) for path in (*folders, *files)}
