"""Writes a tree of files that somebody else made, into one folder and never outside it.

Paths are looked up as the box would, with the folder as their root: a symlink `lib -> /usr/lib` leads to the folder's
own `usr/lib`. Device nodes, sockets, FIFOs, setuid bits and owners do not come along.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NoReturn, Self

from rollcage.errors import UsageError
from rollcage.sandboxes.images.archives import Entries, entries
from rollcage.sandboxes.images.streams import boundary, plain
from rollcage.sandboxes.inside.kernel import open_in
from rollcage.sandboxes.inside.overlay import is_opaque, is_whiteout

Placing = Callable[[str], str | None]
"""Where a path is to be put; None leaves it out."""

_OPAQUE = "user.overlay.opaque"
_LATEST = 1 << 33
_CHUNK = 1 << 20
_NAME_COST = 4 << 10
"""What every file, folder and link counts, however little is in it: that many names fill a disk too."""
_DEEPEST = 200
"""Folders in folders: more than any system has, and few enough to be walked and removed by recursion."""


class Tree:
    """A folder that is being filled. Everything in it can be read and removed by its owner."""

    def __init__(self, folder: Path, *, limit: int | None = None, layered: bool = False) -> None:
        """`limit`: bytes that everything in it may come to, with holes counted as if they were full; None: any.

        `layered`: what comes later takes the place of what was there, be it of another kind.
        """
        self._left, self._limit, self._layered = limit, limit, layered
        self._root = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._depth = _depth(self._root)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._root)

    def folder(self, path: str, mode: int) -> None:
        """Make a folder, or give the one that is there this mode."""
        parts = parts_of(path)
        if not parts:
            return
        with self._above(parts) as above:
            name = parts[-1]
            self._spend(path, _NAME_COST)  # also where it is there: an archive may name one folder without end
            with suppress(FileExistsError):
                os.mkdir(name, 0o755, dir_fd=above)
            found = os.lstat(name, dir_fd=above)
            if self._layered and not stat.S_ISDIR(found.st_mode):
                os.unlink(name, dir_fd=above)
                os.mkdir(name, 0o755, dir_fd=above)
                if is_whiteout(found):
                    self.opaque(path)  # it was deleted and made again: nothing of what was in it is
                found = os.lstat(name, dir_fd=above)
            if stat.S_ISLNK(found.st_mode):
                return  # what it leads to was there first, as in `lib -> usr/lib`
            if not stat.S_ISDIR(found.st_mode):
                _refuse(path, "it is a folder and a file at once")
            os.chmod(name, (mode & 0o777) | 0o700, dir_fd=above)

    def file(self, path: str, content: BinaryIO, mode: int, changed: float) -> None:
        """Make or replace a regular file."""
        with self._place(path) as (above, name):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=above), "wb") as target:
                while chunk := content.read(_CHUNK):
                    self._spend(path, len(chunk))
                    if len(chunk) == _CHUNK and not chunk.strip(b"\0"):
                        target.seek(_CHUNK, os.SEEK_CUR)  # a hole: an archive of a few kB may have gigabytes of them
                    else:
                        target.write(chunk)
                target.truncate()
                os.fchmod(target.fileno(), (mode & 0o777) | 0o400)
                target.flush()
                # Compiled Python is valid only for a source of exactly this age.
                time = min(max(0, changed), _LATEST)  # in this order: what is no number becomes 0
                os.utime(target.fileno(), (time, time))

    def symlink(self, path: str, target: str) -> None:
        """Make or replace a symlink; it may say what it likes, it is only ever followed inside."""
        with self._place(path) as (above, name):
            os.symlink(target, name, dir_fd=above)

    def link(self, path: str, target: str) -> None:
        """Make a further name for a file that is in the tree already."""
        parts = parts_of(target)
        if not parts:
            _refuse(path, "it is a link to nothing")
        with self._above(parts) as source, self._place(path) as (above, name):
            try:
                os.link(parts[-1], name, src_dir_fd=source, dst_dir_fd=above, follow_symlinks=False)
            except FileNotFoundError:
                _refuse(path, f"it is a link to {target!r}, which is not there")

    def whiteout(self, path: str) -> None:
        """Overlay's mark for a name that was deleted."""
        with self._place(path) as (above, name):
            os.mknod(name, stat.S_IFCHR, 0, dir_fd=above)

    def opaque(self, path: str) -> None:
        """Overlay's mark for a folder that was deleted and made again."""
        fd = open_in(self._root, "/" + "/".join(parts_of(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.setxattr(fd, _OPAQUE, b"y")
        finally:
            os.close(fd)

    @property
    def spent(self) -> int:
        """Bytes of its limit that are used up."""
        return (self._limit or 0) - (self._left or 0)

    def _erase(self, above: int, name: str) -> None:
        try:
            os.unlink(name, dir_fd=above)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            shutil.rmtree(name, dir_fd=above)

    def _spend(self, path: str, size: int) -> None:
        if self._left is None or self._limit is None:
            return
        self._left -= size
        if self._left < 0:
            _refuse(path, f"with it, everything comes to more than {self._limit / (1 << 30):g} GB; raise --max-gb")

    @contextmanager
    def _place(self, path: str) -> Iterator[tuple[int, str]]:
        parts = parts_of(path)
        if not parts:
            _refuse(path, "it is no file's name")
        self._spend(path, _NAME_COST)
        with self._above(parts) as above:
            try:
                os.unlink(parts[-1], dir_fd=above)
            except FileNotFoundError:
                pass
            except (IsADirectoryError, PermissionError):
                if not self._layered:
                    _refuse(path, "it is a folder and a file at once")
                self._erase(above, parts[-1])
            yield above, parts[-1]

    @contextmanager
    def _above(self, parts: tuple[str, ...]) -> Iterator[int]:
        path = "/".join(parts)
        if len(parts) > _DEEPEST:
            _refuse(path[-100:], "its folders are nested too deeply")
        try:
            fd = self._opened(parts[:-1])
        except OSError as error:
            _refuse(path, f"there is no folder for it ({os.strerror(error.errno or 0)})")
        try:
            if _depth(fd) - self._depth >= _DEEPEST:  # links may have led deeper than the path says
                _refuse(path[-100:], "its folders are nested too deeply")
            yield fd
        finally:
            os.close(fd)

    def _opened(self, parts: tuple[str, ...]) -> int:
        flags = os.O_RDONLY | os.O_DIRECTORY
        try:
            return open_in(self._root, "/" + "/".join(parts), flags)
        except OSError as error:
            if error.errno != errno.ENOENT or not parts:
                raise
        above = self._opened(parts[:-1])
        try:
            self._spend("/".join(parts), _NAME_COST)
            os.mkdir(parts[-1], 0o755, dir_fd=above)
        finally:
            os.close(above)
        return open_in(self._root, "/" + "/".join(parts), flags)


def parts_of(path: str) -> tuple[str, ...]:
    """The names a path is made of, as if the tree were the root; `..` is refused."""
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if ".." in parts or "\0" in path:
        _refuse(path, "it leads out of the tree")
    return parts


def _refuse(path: str, why: str) -> NoReturn:
    shown = path.encode("utf-8", "backslashreplace").decode()
    raise UsageError(f"cannot take {shown!r}: {why}")


def _depth(fd: int) -> int:
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink()).count("/")
    except OSError:
        return 1 << 20  # longer than a path may be


def unpack(archive: io.BufferedReader, tree: Tree, place: Placing) -> None:
    """Write what a tar archive holds, plain or compressed with gzip, bzip2, xz or zstd."""
    with boundary(), plain(archive) as stream, entries(stream) as found:
        for member in found:
            _unpack_one(found, member, tree, place)


def _unpack_one(found: Entries, member: tarfile.TarInfo, tree: Tree, place: Placing) -> None:
    path = place("/".join(parts_of(member.name)))
    if path is None:
        return
    if member.isdir():
        tree.folder(path, member.mode)
    elif member.issym():
        tree.symlink(path, member.linkname)
    elif member.islnk():
        target = place("/".join(parts_of(member.linkname)))
        if target is not None and target != path:
            tree.link(path, target)
    elif member.isreg() and (content := found.content(member)) is not None:
        with content:
            tree.file(path, content, member.mode, member.mtime)


def copy(source: int, tree: Tree, place: Placing, *, overlay: bool = False) -> None:
    """Write what lies below an open folder, on its own file system only, with no symlink followed.

    `overlay`: it is an overlay's upper folder, ours to change; its marks for deleted names come along.
    """
    device, seen = os.fstat(source).st_dev, dict[int, str]()

    def fail(error: OSError) -> None:
        raise error

    try:
        for above, folders, files, here in os.fwalk(".", dir_fd=source, onerror=fail):
            base = "/".join(parts_of(above))
            for name in (*folders, *files):
                found = os.lstat(name, dir_fd=here)
                path = place(f"{base}/{name}" if base else name)
                if path is None or (name in folders and found.st_dev != device):
                    if name in folders:
                        folders.remove(name)
                    continue
                if overlay and not stat.S_ISLNK(found.st_mode) and found.st_mode & 0o500 != 0o500:
                    # Else, unless we are root, we could not read what is ours.
                    os.chmod(name, stat.S_IMODE(found.st_mode) | 0o700, dir_fd=here)
                _copy_one(here, name, found, tree, (path, seen, overlay))
    except RecursionError as error:
        raise UsageError("its folders are nested too deeply") from error


def _copy_one(
    here: int, name: str, found: os.stat_result, tree: Tree, target: tuple[str, dict[int, str], bool]
) -> None:
    path, seen, overlay = target
    if stat.S_ISDIR(found.st_mode):
        tree.folder(path, found.st_mode)
        if overlay and is_opaque(f"/proc/self/fd/{here}/{name}"):
            tree.opaque(path)
    elif stat.S_ISLNK(found.st_mode):
        tree.symlink(path, os.readlink(name, dir_fd=here))
    elif overlay and is_whiteout(found):
        tree.whiteout(path)
    elif stat.S_ISREG(found.st_mode):
        if found.st_nlink > 1 and found.st_ino in seen:
            tree.link(path, seen[found.st_ino])
            return
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(name, flags, dir_fd=here), "rb") as content:
            tree.file(path, content, found.st_mode, found.st_mtime)
        seen[found.st_ino] = path
