"""Layers as overlay shows them: looked at without a mount, and one more of them written so that it fits on top.

Engines write a layer as what differs from those below it. Here each becomes a folder of its own, in overlay's marks, so
that images with the same base share it. What a name in a layer leads to is decided by all layers together.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from rollcage.errors import UsageError
from rollcage.sandboxes.images.archives import entries
from rollcage.sandboxes.images.saved_files import Counted
from rollcage.sandboxes.images.tree import Placing, Tree, parts_of
from rollcage.sandboxes.inside.overlay import is_opaque, is_whiteout

_HIDDEN = ".wh."
_OPAQUE = ".wh..wh..opq"
_MOST_LINKS = 40
_CHUNK = 1 << 20

LayerPaths = tuple[str, ...]
"""What together makes up one name: a file or a link, or folders that are merged, topmost first. Empty: nothing."""


class Stacked:
    """Folders laid over one another, topmost first. Nothing but a real folder is ever walked through."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._roots: LayerPaths = tuple(map(str, folders))

    def look(self, above: LayerPaths, name: str) -> LayerPaths:
        """What a name stands for in a merged folder."""
        found: list[str] = []
        for folder in above:
            place = f"{folder}/{name}"
            try:
                kind = os.lstat(place)
            except OSError:
                continue
            if is_whiteout(kind):
                break
            if not stat.S_ISDIR(kind.st_mode):
                return tuple(found) or (place,)
            found.append(place)
            if is_opaque(place):
                break
        return tuple(found)

    def find(self, path: str) -> LayerPaths:
        """What has this path, with no link followed."""
        places = self._roots
        for name in parts_of(path):
            places = self.look(places, name) if _are_folders(places) else ()
        return places

    def resolve(self, path: str) -> str:
        """The same path with links followed, as in the box, in all but its last name."""
        names, trail, hops = [*reversed(parts_of(path))], [self._roots], 0
        done: list[str] = []
        while len(names) > 1:
            name = names.pop()
            if name == "..":
                done = done[:-1]
                trail = trail[: len(done) + 1]
                continue
            places = self.look(trail[-1], name)
            if places and stat.S_ISLNK(os.lstat(places[0]).st_mode):
                target, hops = str(Path(places[0]).readlink()), hops + 1
                if hops > _MOST_LINKS:
                    raise UsageError(f"cannot take {path!r}: its links lead to one another without end")
                if target.startswith("/"):
                    done, trail = [], trail[:1]
                names += [part for part in reversed(target.split("/")) if part not in ("", ".")]
                continue
            done.append(name)
            trail.append(places if _are_folders(places) else ())
        return "/".join([*done, *names])

    def names(self, places: LayerPaths) -> list[str]:
        """What is in a merged folder."""
        seen = {name for place in places for name in os.listdir(place)}  # noqa: PTH208 (paths are texts here)
        return sorted(name for name in seen if self.look(places, name))

    def walk(self, path: str) -> Iterator[tuple[str, LayerPaths]]:
        """Everything below a folder: its path, and what makes it up; folders before what is in them."""
        waiting = [(path, self.find(path))]
        while waiting:
            above, places = waiting.pop()
            for name in self.names(places):
                found = self.look(places, name)
                yield f"{above}/{name}", found
                if _are_folders(found):
                    waiting.append((f"{above}/{name}", found))


class LayerTree(Tree):
    """The folder of one layer while it is filled, over those below it."""

    def __init__(self, folder: Path, below: Sequence[Path], *, limit: int | None = None) -> None:
        super().__init__(folder, limit=limit, layered=True)
        self._own, self._below = str(folder), bool(below)
        self.together = Stacked([folder, *below])
        self._led: dict[str, str] = {}
        """Where folders of the layer lie, as far as they were looked for since anything there changed."""

    def place(self, path: str) -> str:
        """Where a path of the layer lies, links of the layers below followed; the folders above it are made as they
        are there."""
        above, _, name = path.rpartition("/")
        if not self._below or not above:
            return path
        if above not in self._led:
            led = self.together.resolve(f"{above}/{name}").rpartition("/")[0]
            self._bring(led)
            self._led[above] = led
        led = self._led[above]
        return f"{led}/{name}" if led else name

    def _bring(self, path: str) -> None:
        """Make a folder here, and those above it, with the modes that they have below."""
        parts = path.split("/") if path else []
        for depth in range(1, len(parts) + 1):
            upto = "/".join(parts[:depth])
            found = self.together.find(upto)
            if _are_folders(found) and not self._is_own(found[0]):
                self.folder(upto, stat.S_IMODE(os.lstat(found[0]).st_mode))

    def folder(self, path: str, mode: int) -> None:
        """As in any tree; where it takes the place of a link, paths lead elsewhere from now on."""
        if self._below and not _are_folders(self.together.find(path)):
            self._led.clear()
        super().folder(path, mode)

    def symlink(self, path: str, target: str) -> None:
        """As in any tree; from now on paths may lead elsewhere."""
        super().symlink(path, target)
        self._led.clear()

    def link(self, path: str, target: str) -> None:
        """A further name for a file; of a file in a layer below, a copy."""
        found = self.together.find(target)
        if not found or self._is_own(found[0]) or not stat.S_ISREG((kind := os.lstat(found[0])).st_mode):
            super().link(path, target)
            return
        with Path(found[0]).open("rb") as content:
            self.file(path, content, kind.st_mode, kind.st_mtime)

    def hide(self, path: str) -> None:
        """What has this name in the layers below is gone."""
        path = self.place(path)
        above, _, name = path.rpartition("/")
        places = self.together.find(above)
        if _are_folders(places) and any(not self._is_own(place) for place in self.together.look(places, name)):
            self.whiteout(path)
            self._led.clear()

    def hide_all(self, path: str) -> None:
        """Whatever is in this folder in the layers below is gone."""
        if not path:  # overlay has no mark for its very root
            for name in self.together.names(self.together.find("")):
                self.hide(name)
            return
        path = self.place(path)
        places = self.together.find(path)
        if _are_folders(places) and any(not self._is_own(place) for place in places):
            self._bring(path)
            self.opaque(path)

    def _is_own(self, place: str) -> bool:
        return place.startswith(f"{self._own}/")


def remove_hidden(stream: Counted, tree: LayerTree, place: Placing, visible: Placing) -> None:
    """Mark what a layer says is gone from those below it, and read it to its end."""
    with entries(stream) as found:
        for member in found:
            path = "/".join(parts_of(member.name))
            if member.isdir():
                # A folder that takes the place of a link must, before anything is removed in it.
                if (placed := visible(path)) is not None:
                    tree.folder(placed, member.mode)
            elif removal := removal_of(path):
                gone, itself = removal
                if not gone or place(gone) is not None:
                    (tree.hide if itself else tree.hide_all)(gone)
    while stream.read(_CHUNK):
        pass


def removal_of(path: str) -> tuple[str, bool] | None:
    """What a name in a layer says is gone: a path, and whether it is gone itself or only what is in it. None: it says
    nothing of the kind."""
    above, _, name = path.rpartition("/")
    if name == _OPAQUE:
        return above, False
    if not name.startswith(_HIDDEN) or name.startswith(f"{_HIDDEN}{_HIDDEN}"):
        return None
    gone = "/".join(parts_of(f"{above}/{name.removeprefix(_HIDDEN)}"))
    return (gone, True) if gone != above else None


def is_mark(path: str) -> bool:
    """Whether a name in a layer says that something is gone, or is a file system's own."""
    return any(part.startswith(_HIDDEN) for part in path.split("/"))


def move_out(system: Stacked, path: str, part: Path, target: str, leads_to: str) -> None:
    """Put a folder of a system into a part of its own, below its home, and a link in its place. Files are not copied:
    layers never change, so they may have two names."""
    home = part / "home" / target
    home.mkdir(parents=True)
    home.chmod(stat.S_IMODE(os.lstat(system.find(path)[0]).st_mode))
    for each, places in system.walk(path):
        place, kind = home / each[len(path) + 1 :], os.lstat(places[0])
        if stat.S_ISDIR(kind.st_mode):
            place.mkdir()
            place.chmod(stat.S_IMODE(kind.st_mode))
        elif stat.S_ISLNK(kind.st_mode):
            place.symlink_to(str(Path(places[0]).readlink()))
        else:
            try:
                os.link(places[0], place, follow_symlinks=False)
            except OSError:
                shutil.copy2(places[0], place, follow_symlinks=False)
    link = part / "system" / path
    for above in reversed(link.parents[: path.count("/")]):
        if not above.exists():
            above.mkdir()
            found = system.find(str(above.relative_to(part / "system")))
            above.chmod(stat.S_IMODE(os.lstat(found[0]).st_mode))
    link.symlink_to(leads_to)


def _are_folders(places: LayerPaths) -> bool:
    return bool(places) and stat.S_ISDIR(os.lstat(places[0]).st_mode)
