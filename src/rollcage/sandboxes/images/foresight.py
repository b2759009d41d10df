"""Looks at a system before anything of it is copied: whether the folders that are to move are there, and whether its
programs are for this machine. Names alone are read, and the first bytes of one program."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from rollcage.errors import UsageError
from rollcage.sandboxes.images.archives import Entries, entries
from rollcage.sandboxes.images.saved import SavedImage
from rollcage.sandboxes.images.stacked import Stacked, removal_of
from rollcage.sandboxes.images.streams import boundary, is_compressed, plain
from rollcage.sandboxes.images.tree import parts_of

_PROGRAM = "usr/bin/env"
"""Every box needs it."""
_ELF = b"\x7fELF"
_MACHINES = {"x86_64": 62, "aarch64": 183}
_HEAD = 20

Kind = Literal["folder", "other", ""]


class Foreseen:
    """What the folders that move, and those above them, will be."""

    def __init__(self, wanted: Iterable[str]) -> None:
        split = [path.split("/") for path in wanted]
        upto = ("/".join(parts[: depth + 1]) for parts in split for depth in range(len(parts)))
        self._kinds: dict[str, Kind] = dict.fromkeys(upto, "")
        self._wanted = [*map("/".join, split)]

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def set(self, path: str, kind: Kind) -> None:
        """There is something of that kind at a path."""
        for each in self._kinds:
            if path.startswith(f"{each}/") and not self._kinds[each]:
                self._kinds[each] = "folder"
            elif kind != "folder" and each.startswith(f"{path}/"):
                self._kinds[each] = ""
        if path in self._kinds:
            self._kinds[path] = kind

    def remove(self, path: str, *, itself: bool) -> None:
        """What is below a path is gone, and the path too or not."""
        for each in self._kinds:
            if (itself and each == path) or not path or each.startswith(f"{path}/"):
                self._kinds[each] = ""

    def check(self) -> None:
        """UsageError for the first that cannot move."""
        for path in self._wanted:
            parts = path.split("/")
            for depth in range(len(parts)):
                upto = "/".join(parts[: depth + 1])
                if self._kinds[upto] == "other":
                    raise UsageError(f"/{path}: /{upto} is no folder in the image")
                if not self._kinds[upto]:
                    raise UsageError(f"/{path}: there is no such folder in the image")

    def at(self, system: Stacked) -> None:
        """As they are in folders that are there already."""
        for path in self._kinds:
            if places := system.find(path):
                self.set(path, "folder" if stat.S_ISDIR(os.lstat(places[0]).st_mode) else "other")

    def after(self, found: Iterator[tuple[str, bool]]) -> None:
        """As they are once a layer, given by its names and which of them are folders, is laid over what is there."""
        added: list[tuple[str, bool]] = []
        for path, is_folder in found:
            if removal := removal_of(path):
                self.remove(removal[0], itself=removal[1])
            elif any(path == each or path.startswith(f"{each}/") or each.startswith(path) for each in self._kinds):
                added.append((path, is_folder))
        for path, is_folder in added:
            self.set(path, "folder" if is_folder else "other")


def foresee_saved(image: SavedImage, there: Sequence[Path], moves: Iterable[str]) -> None:
    """`there`: systems of the first layers that were unpacked before, topmost first."""
    foreseen = Foreseen(moves)
    if not foreseen:
        return
    foreseen.at(Stacked(there))
    for name in image.layers[len(there) :]:
        with image.files.open(name) as file, boundary(), plain(file) as stream, entries(stream) as found:
            foreseen.after(_named(found))
    foreseen.check()


def foresee_system(path: Path, moves: Iterable[str]) -> None:
    """The same of one tree of files: a folder or an archive of it."""
    foreseen = Foreseen(moves)
    if path.is_dir():
        foreseen.at(Stacked([path]))
        program = path / _PROGRAM
        if program.is_file() and not program.is_symlink():
            with program.open("rb") as file:
                _check_program(file.read(_HEAD))
    else:
        with path.open("rb") as file, boundary(), plain(file) as stream:
            seekable = not is_compressed(file)
            with entries(file if seekable else stream, "r:" if seekable else "r|") as found:
                foreseen.after(_named(found, until_program=not foreseen))
    foreseen.check()


def _named(found: Entries, *, until_program: bool = False) -> Iterator[tuple[str, bool]]:
    for member in found:
        path = "/".join(parts_of(member.name))
        if path == _PROGRAM and member.isreg() and (content := found.content(member)) is not None:
            with content:
                _check_program(content.read(_HEAD))
            if until_program:
                return
        yield path, member.isdir()


def _check_program(head: bytes) -> None:
    ours = _MACHINES.get(platform.machine())
    if ours and head.startswith(_ELF) and (machine := int.from_bytes(head[18:20], "little")) != ours:
        raise UsageError(
            f"this system cannot run a box: /{_PROGRAM} in it is for another processor (ELF machine {machine}), "
            f"and this machine is {platform.machine()}"
        )
