"""The home directory: an overlay whose uppers are numbered folders on one disk.

The disk is a tmpfs of the size that was asked for; where tmpfs keeps no user attributes (Linux before 6.6), a folder of
the host that was brought along, whose size nothing bounds from here.

`checkpoint` freezes the upper and lays a fresh one over it. What is written then is a diff by construction, so
`rewind` reads the changes from it, moves the kept parts of it under a third upper, and throws the rest away.
Nothing is ever mounted at, or looked up through, a path that a command could have made.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside.overlay import is_opaque, is_whiteout
from rollcage.sandboxes.local.inside import restoring
from rollcage.sandboxes.local.inside.diff import HOME, PathParts, changes, exists, lstat

_HOME = f"/root{HOME}"
_TMP = "/root/tmp"
_DISK = "/disk"
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_MANY_INODES = 200 << 10
_LEAST_INODES = 16 << 10
_SPARE_INODES = 1 << 10
_SPARE_BYTES = 32 << 20
"""Added whenever we have to work on the disk, so that an agent who used up all cannot prevent it."""


class Stack(NamedTuple):
    """What home is made of."""

    upper: int
    """Number of the folder that is written to."""
    frozen: Sequence[int]
    """Those of earlier ones, topmost first."""
    layers: int
    """How many layers lie below them."""
    brought: bool = False
    """The disk is a folder of the host."""

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Stack:
        """As a request says."""
        return cls(request["upper"], request["frozen"], request["layers"], request["brought"])


def prepare(size: int, layers: int, *, brought: bool) -> None:
    """Mount the first home, on a disk that was brought along or that is made now."""
    if not brought:
        os.mkdir(_DISK)
        kernel.mount("tmpfs", _DISK, "tmpfs", _FLAGS, f"mode=0755,size={size},nr_inodes={_inodes(size)}")
    os.mkdir(f"{_DISK}/none")
    try:
        # Overlay marks replaced folders this way; without it, `rm -r folder && mkdir folder` would fail in the box.
        os.setxattr(f"{_DISK}/none", "user.rollcage", b"y")
    except OSError as error:
        where = "below the state folder" if brought else "on tmpfs"
        raise kernel.KernelRefused(error.errno or 0, f"keep user attributes {where}", "attributes") from error
    _make_upper(0, 0o755)
    _mount(0, Stack(0, (), layers, brought))


def open_upper(upper: int) -> int:
    """A descriptor of the folder that holds what was written since the last checkpoint, as overlay keeps it."""
    return os.open(f"{_DISK}/{upper}/u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def empty_tmp(size: int, *, first: bool = False, tmp: str = _TMP) -> None:
    """Put a fresh /tmp in place."""
    if not first:
        kernel.detach(tmp)
    kernel.mount("tmpfs", tmp, "tmpfs", _FLAGS, f"mode=1777,size={size},nr_inodes={_inodes(size)}")


def second_home(stack: Stack, place: str) -> None:
    """Lay another upper over the frozen ones, at another place: a home as it was at the checkpoint."""
    _make_room(stack)
    number = stack.upper + 1
    _make_upper(number, _mode(stack.frozen[0]) if stack.frozen else 0o755)
    kernel.detach(place)
    _mount(number, stack, place)


def _inodes(size: int) -> int:
    # A larger disk always has more: what fills one fits on another that is larger, with room to spare.
    return max(_LEAST_INODES, min(_MANY_INODES, size >> 12) + (size >> 15))


def _make_room(stack: Stack) -> None:
    if stack.brought:
        return
    disk = os.statvfs(_DISK)
    size, inodes = disk.f_blocks * disk.f_frsize + _SPARE_BYTES, disk.f_files + _SPARE_INODES
    kernel.mount("tmpfs", _DISK, flags=kernel.MS_REMOUNT | _FLAGS, options=f"size={size},nr_inodes={inodes}")


def checkpoint(stack: Stack) -> None:
    """Freeze the upper (above the already frozen ones) and lay upper + 1 over it."""
    _make_room(stack)
    kernel.detach(_HOME)
    _make_upper(stack.upper + 1, _mode(stack.upper))
    _mount(stack.upper + 1, stack._replace(frozen=(stack.upper, *stack.frozen)))


def rewind(stack: Stack, keep: Sequence[str], restore: Sequence[str] = ()) -> list[str]:
    """Replace the upper by upper + 1, which holds nothing but the kept paths; returns what else had been changed.

    In the kept paths, what `restore` names is as it was before.
    """
    upper, fresh = stack.upper, stack.upper + 1
    kept = {_parts(path) for path in keep}
    kept = {path for path in kept if not any(path[:size] in kept for size in range(len(path)))}
    _make_room(stack)
    kernel.detach(_HOME)
    if () in kept:
        os.rename(f"{_DISK}/{upper}", f"{_DISK}/{fresh}")
        _mount(fresh, stack)
        return []
    _make_upper(fresh, _mode(stack.frozen[0]))
    _mount(fresh, stack)
    old = f"{_DISK}/{upper}/u"
    changed = changes(old, _HOME, kept)
    moves = [_judge(old, parts) for parts in sorted(kept)]
    for parts, verdict in moves:
        if verdict == "strange":
            changed.append("/".join((HOME, *parts)))
    hidden = [verdict in ("gone", "strange") and _was_there(parts) for parts, verdict in moves]
    back = [parts for parts in map(_parts, restore) if _was_there(parts[:-1], folder=True)]
    for (parts, verdict), whiteout in zip(moves, hidden, strict=True):
        if whiteout or verdict in ("moved", "alone"):
            _make_parents(parts, old)
    kernel.detach(_HOME)
    new = f"{_DISK}/{fresh}/u"
    for (parts, verdict), whiteout in zip(moves, hidden, strict=True):
        path = "/".join(parts)
        if whiteout:
            os.mknod(f"{new}/{path}", stat.S_IFCHR, 0)
        elif verdict in ("moved", "alone"):
            os.rename(f"{old}/{path}", f"{new}/{path}")
            if verdict == "alone" and stat.S_ISDIR(os.lstat(f"{new}/{path}").st_mode):
                os.setxattr(f"{new}/{path}", "user.overlay.opaque", b"y")
    discard(f"{_DISK}/{upper}", _DISK)
    covered = [parts for parts in back if restoring.uncover(new, parts, _DISK, discard)]
    _mount(fresh, stack)
    if covered:
        before = f"{_DISK}/before"
        os.mkdir(before)
        kernel.mount("before", before, "overlay", _FLAGS | kernel.MS_RDONLY, f"userxattr,lowerdir={_below(stack)}")
        for parts in covered:
            restoring.copy_back(before, _HOME, parts)
        kernel.detach(before)
        os.rmdir(before)
    return sorted(set(changed))


def _parts(path: str) -> PathParts:
    return tuple(part for part in path[len(HOME) :].split("/") if part)


def _below(stack: Stack) -> str:
    """What lies below the upper, as overlay is told it; at least two folders, which is what it wants."""
    frozen = [f"{_DISK}/{number}/u" for number in stack.frozen]
    return ":".join([*frozen, *(f"/layers/{number}" for number in range(stack.layers)), f"{_DISK}/none"])


def _judge(old: str, parts: PathParts) -> tuple[PathParts, str]:
    """What the agent made of a kept path, with no symlink followed in any component.

    same: untouched. moved: changed, to be carried over. alone: so too, but nothing below it shines through.
    gone: deleted. strange: it, or a folder above it, became something that is neither file nor folder.
    """
    alone = False
    for depth in range(1, len(parts) + 1):
        path, last = "/".join((old, *parts[:depth])), depth == len(parts)
        found = lstat(path)
        if found is None:
            return parts, "gone" if alone else "same"
        if is_whiteout(found):
            return parts, "gone"
        if last and (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
            return parts, "alone" if alone else "moved"
        if not stat.S_ISDIR(found.st_mode):
            return parts, "strange"
        alone = alone or is_opaque(path)
    raise AssertionError("a kept path has at least one part")


def _was_there(parts: PathParts, *, folder: bool = False) -> bool:
    """Whether the checkpoint has this path (as a folder), with no symlink above it."""
    above = [lstat("/".join((_HOME, *parts[:depth]))) for depth in range(1, len(parts) + folder)]
    return all(found and stat.S_ISDIR(found.st_mode) for found in above) and exists("/".join((_HOME, *parts)))


def _make_parents(parts: PathParts, old: str) -> None:
    """Bring the folders above a kept path into the new upper, through the mounted home, so that it can be put there."""
    for depth in range(1, len(parts)):
        path = "/".join((_HOME, *parts[:depth]))
        found = lstat(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            os.chmod(path, stat.S_IMODE(found.st_mode))
            continue
        if found is not None:
            os.unlink(path)
        theirs = lstat("/".join((old, *parts[:depth])))
        os.mkdir(path)
        os.chmod(path, stat.S_IMODE(theirs.st_mode) if theirs and stat.S_ISDIR(theirs.st_mode) else 0o755)


def _make_upper(number: int, mode: int) -> None:
    for folder in ("", "/u", "/w"):
        os.mkdir(f"{_DISK}/{number}{folder}")
    os.chmod(f"{_DISK}/{number}/u", mode)


def _mode(number: int) -> int:
    return stat.S_IMODE(os.lstat(f"{_DISK}/{number}/u").st_mode)


def _mount(upper: int, stack: Stack, place: str = _HOME) -> None:
    """Lay the upper of this number over the frozen ones and the layers."""
    work = f"{_DISK}/{upper}/w"
    folders = f"lowerdir={_below(stack)},upperdir={_DISK}/{upper}/u,workdir={work}"
    how = "userxattr,index=off"
    if stack.brought:
        # Else each end of a mount would write out all that the host has not written yet. Overlay takes a work folder
        # that was used in this way for the remains of a crash, so it gets a new one.
        how += ",volatile"
        discard(work, _DISK)
        os.mkdir(work)
    kernel.mount("home", place, "overlay", _FLAGS, f"{how},{folders}")


def discard(folder: str, aside: str) -> None:
    """Delete a tree however deep it is: folders are moved to `aside`, on the same disk, before they are emptied."""
    # Another one may have been cut short here before.
    waiting, count, mark = [folder], 0, secrets.token_hex(4)
    while waiting:
        current = waiting.pop()
        # By its descriptor: something may still die in the box, and could put a link in the folder's place.
        try:
            here = os.open(current, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError:
            os.unlink(current)
            continue
        try:
            for name in os.listdir(here):
                if not stat.S_ISDIR(os.lstat(name, dir_fd=here).st_mode):
                    os.unlink(name, dir_fd=here)
                    continue
                count += 1
                os.rename(name, f"{aside}/trash-{mark}-{count}", src_dir_fd=here)
                waiting.append(f"{aside}/trash-{mark}-{count}")
        finally:
            os.close(here)
        os.rmdir(current)
