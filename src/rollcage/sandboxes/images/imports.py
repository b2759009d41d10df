"""Makes an image from a root file system: a folder or a tar archive, as `docker export` or `docker save` write them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import anyio
import anyio.to_thread
from pydantic import Field

from rollcage.errors import SandboxError, SetupError, UsageError
from rollcage.sandboxes.base import PATH, run
from rollcage.sandboxes.images.build import FORMAT, Built, LayeredProvider, Say, merged
from rollcage.sandboxes.images.catalog import PART, Image, check_name
from rollcage.sandboxes.images.foresight import foresee_saved, foresee_system
from rollcage.sandboxes.images.saved import CommandSettings, SavedImage, is_saved, opened, variables
from rollcage.sandboxes.images.stacked import LayerTree, Stacked, move_out
from rollcage.sandboxes.images.tree import Tree, copy, parts_of, unpack
from rollcage.sandboxes.layers import Layer
from rollcage.types import HOME, SandboxSpec, Value

WORKDIR = f"{HOME}/workdir"
MOVED = ".image"
"""Below home: what was asked to be writable, by its path in the image."""

_LEFT_OUT = frozenset(f"etc/{name}{end}" for name in ("shadow", "gshadow") for end in ("", "-"))
_OURS = frozenset(("dev", "proc", "sys", "tmp", "run"))
_WORK = PurePosixPath(WORKDIR).name
_PROGRAMS = ("bin", "etc", "lib", "lib64", "sbin", "usr/bin", "usr/lib", "usr/local/bin", "usr/local/lib", "usr/sbin")
"""What judges an agent's work is started from here: it cannot be a part of what the agent writes."""
"""A box has its own; what an image has in them is not taken."""
_SYSTEM = "system"
_SPENT = "spent"
"""In a layer, beside its system: what it came to, unpacked."""
_LAYERS_FORMAT = "layers 1"
"""Changes whenever the same layer would give something else."""
_NEEDED = {
    "/usr/bin/env": ["/usr/bin/env", "true"],
    "bash": ["bash", "-c", "true"],
    "coreutils, find and tar": [
        "sh",
        "-c",
        "for name in mkdir rm chmod cat find tar; do command -v $name || exit 1; done",
    ],
}


class ImageSource(Value):
    """What is imported, and how it is to be used."""

    path: Path
    """A folder or a tar archive, plain or compressed with gzip, bzip2, xz or zstd: a root file system, or an image that
    a container engine saved."""
    workdir: str = ""
    """The folder in it that agents work on, such as `/testbed`: it becomes the box's workdir, and a link to it stands
    where it was."""
    writable: tuple[str, ...] = ()
    """Further folders that must be written to: they move below home, with links where they were."""
    env: dict[str, str] = {}
    """For every command of its boxes, over what a saved image sets itself; `$PATH` in a value is the PATH so far."""
    max_gb: float = Field(default=20, gt=0)
    """What it may come to, unpacked, with holes counted as if they were full; more is refused."""


async def import_image(
    provider: LayeredProvider,
    name: str,
    source: ImageSource,
    say: Say,
    *,
    rebuild: bool = False,
    own_paths: bool = False,
    origin: str = "",
) -> Built:
    """The image of that name, imported now unless it is there already, from the same source. Layers of a saved image
    are kept one by one: what another image has is not unpacked again.

    `own_paths`: its boxes have the paths that it has, so that nobody is told of `--workdir`. `origin`: what people
    are told that it is made from, where that is not the name of the file.
    """
    check_name(name)
    moves = moves_of(source)
    say(f"looking at {source.path}")
    with ExitStack() as files:
        saved = await anyio.to_thread.run_sync(_opened, source, files, provider.layers.folder)
        digest = await anyio.to_thread.run_sync(_digest, source, moves, saved)
        if not rebuild and provider.images.made_from(name, digest):
            async with provider.images.use(name) as image:
                if image.recipe == digest:
                    return Built(image, False)
        importing = _Importing(provider, source, moves, say)
        async with AsyncExitStack() as stack:
            try:
                if saved:
                    parts = await importing.layers(stack, saved)
                    settings = saved.settings
                else:
                    parts = await importing.system(stack, f"{digest}{time.time_ns() if rebuild else ''}")
                    settings = CommandSettings.model_validate({})
                if settings.workdir not in (None, "", "/") and not source.workdir and not own_paths:
                    start = f"commands of this image start in {settings.workdir}"
                    say(f"{start}; --workdir makes that folder the workdir of tasks")
                image = Image(
                    name=name,
                    parts=parts,
                    whole=True,
                    env=merged(variables(settings), source.env),
                    recipe=digest,
                    source=origin or f"imported {source.path.name}",
                    created_at=time.time(),
                )
                await try_out(provider, image)
                provider.images.put(image)
            finally:
                await stack.aclose()
                with anyio.CancelScope(shield=True):
                    await provider.images.prune()
    return Built(image, True)


class _Importing(NamedTuple):
    """One import: makes the parts of an image, and has them held by a stack."""

    provider: LayeredProvider
    source: ImageSource
    moves: dict[str, str]
    say: Say

    async def system(self, stack: AsyncExitStack, key: str) -> tuple[str, ...]:
        """One tree of files is one part."""

        async def build(folder: Path) -> None:
            await anyio.to_thread.run_sync(foresee_system, self.source.path, self.moves)
            self.say(f"copying {self.source.path}")
            await anyio.to_thread.run_sync(_fill, folder, self.source, self.moves)

        folder = await stack.enter_async_context(self.provider.layers.held(Layer(f"{PART}_import", key, build)))
        return (folder.name,)

    async def layers(self, stack: AsyncExitStack, saved: SavedImage) -> tuple[str, ...]:
        """A part for every layer, and one for what moves; topmost first, without those that hold nothing."""
        left, layers = int(self.source.max_gb * (1 << 30)), self.provider.layers
        wanted = self._named(saved)
        there: list[Path] = []
        with suppress(FileNotFoundError):
            for layer in takewhile(layers.has, wanted):
                there.append(await stack.enter_async_context(layers.hold(layers.folder_of(layer).name)) / _SYSTEM)
        await anyio.to_thread.run_sync(foresee_saved, saved, there[::-1], self.moves)
        below: list[Path] = []
        for number, layer in enumerate(wanted):

            async def build(folder: Path, number: int = number, limit: int = left) -> None:
                self.say(f"unpacking layer {number + 1} of {len(wanted)}")
                await anyio.to_thread.run_sync(_fill_layer, folder, saved, number, below, limit)

            folder = await stack.enter_async_context(layers.held(replace(layer, build=build)))
            left -= int((folder / _SPENT).read_text())
            if left < 0:
                raise UsageError(
                    f"the layers of {self.source.path} come to more than --max-gb allows", remedy="raise it"
                )
            below.insert(0, folder / _SYSTEM)
        systems = [each for each in below if any(each.iterdir())] or below[:1]
        parts = tuple(each.parent.name for each in systems)
        return (*await self._moved(stack, systems, wanted[-1].key if wanted else ""), *parts)

    def _named(self, saved: SavedImage) -> list[Layer]:
        """What a layer holds here depends on those below it, so they are part of its name."""

        async def nothing(folder: Path) -> None:
            raise AssertionError(f"{folder}: nobody said how to build it")

        named, key = [], _LAYERS_FORMAT
        for digest in saved.digests:
            key = hashlib.sha256(f"{key}\0{digest}".encode()).hexdigest()
            named.append(Layer(f"{PART}_layer", key, nothing))
        return named

    async def _moved(self, stack: AsyncExitStack, systems: Sequence[Path], key: str) -> tuple[str, ...]:
        if not self.moves:
            return ()

        def fill(folder: Path) -> None:
            (folder / _SYSTEM).mkdir()
            for path, target in self.moves.items():
                move_out(Stacked(systems), path, folder, target, f"{HOME}/{target}")

        async def build(folder: Path) -> None:
            await anyio.to_thread.run_sync(fill, folder)

        layer = Layer(f"{PART}_moved", json.dumps([key, self.moves], sort_keys=True), build)
        folder = await stack.enter_async_context(self.provider.layers.held(layer))
        return (folder.name,)


async def try_out(provider: LayeredProvider, image: Image) -> None:
    """A system that cannot run what every rollout needs is refused now and not in the middle of one."""
    async with provider.open_image(image, SandboxSpec()) as box:
        for what, command in _NEEDED.items():
            try:
                tried = await run(box, command, env={"PATH": PATH}, cwd="/")
                said = "" if tried.code == 0 else tried.stderr.text.strip().rpartition("\n")[2] or f"exit {tried.code}"
            except SandboxError as error:
                said = str(error)
            if said:
                raise UsageError(f"this system cannot run a box: it needs {what} for this machine ({said})")


def moves_of(source: ImageSource) -> dict[str, str]:
    """`{path in the image: path below home}` of what moves."""
    wanted = [(path, f"{MOVED}/{'/'.join(parts_of(path))}") for path in source.writable]
    if source.workdir:
        wanted.append((source.workdir, _WORK))
    moves = {"/".join(parts_of(path)): target for path, target in wanted}
    for path in moves:
        first = path.partition("/")[0]
        if not path or first in _OURS or path == "home" or path.startswith("home/user"):
            raise UsageError(f"/{path}: choose a folder of the image itself")
        if moves[path] == _WORK and any(_meet(path, each) for each in _PROGRAMS):
            raise UsageError(f"--workdir /{path}: the system's programs are in it, and they judge the agent's work")
        if any(other != path and PurePosixPath(path).is_relative_to(other) for other in moves):
            raise UsageError(f"/{path}: it lies in another folder that moves; name only that one")
    return moves


def _meet(one: str, other: str) -> bool:
    """Whether one lies in the other, or is the same."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def _taken(path: str) -> str | None:
    first, _, rest = path.partition("/")
    if path in _LEFT_OUT or (first in _OURS and rest):
        return None
    return path


def _opened(source: ImageSource, files: ExitStack, scratch: Path) -> SavedImage | None:
    try:
        if not is_saved(source.path):
            return None
        return files.enter_context(opened(source.path, scratch, int(source.max_gb * (1 << 30))))
    except OSError as error:
        raise UsageError(f"{source.path}: cannot be read: {error.strerror}") from error


def _fill_layer(folder: Path, saved: SavedImage, number: int, below: Sequence[Path], limit: int) -> None:
    (folder / _SYSTEM).mkdir()
    try:
        with LayerTree(folder / _SYSTEM, below, limit=limit) as tree:
            count = saved.unpack(number, tree, _taken, limit)
            (folder / _SPENT).write_text(str(max(count, tree.spent)))
    except OSError as error:
        what = f"{error.filename or ''}: {error.strerror}"
        raise SetupError(f"cannot import its layer {number + 1}: {what}") from error


def _fill(folder: Path, wanted: ImageSource, moves: dict[str, str]) -> None:
    source = wanted.path
    (folder / _SYSTEM).mkdir()
    try:
        # This is the root of whatever a symlink in it says: one that leads to `..` must not come out beside it.
        with Tree(folder / _SYSTEM, limit=int(wanted.max_gb * (1 << 30))) as tree:
            if source.is_dir():
                fd = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    copy(fd, tree, _taken)
                finally:
                    os.close(fd)
            else:
                with source.open("rb") as file:
                    unpack(file, tree, _taken)
    except OSError as error:
        raise SetupError(f"cannot import {source}: {error.filename or ''}: {error.strerror}") from error
    if moves:
        (folder / "home").mkdir()
        for path, target in moves.items():
            _move(folder, path, target)


def _move(folder: Path, path: str, target: str) -> None:
    """Put a folder of the system below home, and a link where it was. No symlink is followed on the way."""
    place = folder / "system"
    for part in path.split("/"):
        place /= part
        if not os.path.lexists(place):
            raise UsageError(f"/{path}: there is no such folder in the image")
        if not stat.S_ISDIR(place.lstat().st_mode):
            raise UsageError(f"/{path}: /{place.relative_to(folder / 'system')} is no folder in the image")
    home = folder / "home" / target
    home.parent.mkdir(parents=True, exist_ok=True)
    place.rename(home)
    place.symlink_to(f"{HOME}/{target}")


def _digest(source: ImageSource, moves: dict[str, str], saved: SavedImage | None) -> str:
    try:
        if saved:
            content = json.dumps([saved.digests, saved.settings.model_dump()])
        else:
            content = _folder_digest(source.path) if source.path.is_dir() else _file_digest(source.path)
    except OSError as error:
        raise UsageError(f"{source.path}: cannot be read: {error.strerror}") from error
    text = json.dumps([FORMAT, content, moves, source.env], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _file_digest(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"{path}: give a folder or a tar archive")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _folder_digest(folder: Path) -> str:
    """By names, kinds, sizes and times: reading every byte would take as long as copying."""
    digest = hashlib.sha256()

    def note(above: str, name: str, here: int) -> None:
        found = os.lstat(name, dir_fd=here)
        target = os.readlink(name, dir_fd=here) if stat.S_ISLNK(found.st_mode) else ""
        shape = (
            (found.st_mode, 0, 0) if stat.S_ISDIR(found.st_mode) else (found.st_mode, found.st_size, found.st_mtime_ns)
        )
        digest.update(repr((above, name, shape, target)).encode("utf-8", "surrogateescape"))

    for above, folders, files, here in os.fwalk(folder):
        folders.sort()
        for name in sorted((*folders, *files)):
            note(os.path.relpath(above, folder), name, here)
    return digest.hexdigest()
