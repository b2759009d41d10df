"""Packages of npm: pinned by version and hash, fetched once, kept, unpacked."""

from __future__ import annotations

import base64
import functools
import hashlib
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import anyio
import anyio.to_thread

from rollcage.agents.download import archive_name, download
from rollcage.errors import AgentError


class Package(NamedTuple):
    """One package of a registry: its name, exact version and SHA-512 in base64, as registries publish it."""

    name: str
    version: str
    sha512: str
    """Empty: nobody has pinned it, and whatever the registry sends is taken."""


async def fetch(package: Package, downloads: Path, registry: str = "") -> Path:
    """The package as the registry has it, downloaded once and checked against its pinned hash."""
    (archive,) = await fetch_all([package], downloads, registry)
    return archive


async def fetch_all(packages: Sequence[Package], downloads: Path, registry: str = "") -> list[Path]:
    """Packages as the registry has them, those that are not kept yet downloaded together."""
    await anyio.Path(downloads).mkdir(parents=True, exist_ok=True)
    kept = {package: downloads / archive_name(package.name, package.version) for package in packages}
    missing = [package for package, path in kept.items() if not await anyio.to_thread.run_sync(_fits, package, path)]
    if missing:
        with tempfile.TemporaryDirectory(dir=downloads) as folder:
            await download([(package.name, package.version) for package in missing], Path(folder), registry)
            for package in missing:
                archive = Path(folder, kept[package].name)
                if not await anyio.to_thread.run_sync(_fits, package, archive):
                    wanted = f"{package.name}@{package.version}"
                    raise AgentError(f"{wanted} is not what was pinned: its SHA-512 differs; it was thrown away")
                await anyio.Path(archive).replace(kept[package])
    return [kept[package] for package in packages]


def unpack(archive: Path, folder: Path, only: Sequence[str] = ()) -> None:
    """What a package holds, into a folder; `only`: these files, and folders (with a slash at the end)."""
    folder.mkdir(parents=True, exist_ok=True)
    folders = tuple(path for path in only if path.endswith("/"))
    with tarfile.open(archive) as tar:
        for member in tar:
            # The one folder that everything is in has no certain name.
            name = "/".join(PurePosixPath(member.name).parts[1:])
            if name and member.isreg() and (not only or name in only or name.startswith(folders)):
                tar.extract(member.replace(name=name, deep=False), folder, filter="data")


def sha512(path: Path) -> str:
    """Of a file; worked out once for as long as it does not change."""
    stat = path.stat()
    return _digest(path, stat.st_size, stat.st_mtime_ns)


@functools.cache
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return base64.b64encode(hashlib.file_digest(file, "sha512").digest()).decode()


def _fits(package: Package, archive: Path) -> bool:
    return archive.exists() and package.sha512 in ("", sha512(archive))
