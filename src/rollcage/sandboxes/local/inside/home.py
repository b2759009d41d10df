"""What a box can write: overlays whose uppers are numbered folders on one disk. The home directory, and in boxes that
ask for it the whole system around it.

The disk is a tmpfs of the size that was asked for; where tmpfs keeps no user attributes (Linux before 6.6), a folder of
the host that was brought along, whose size nothing bounds from here.

`checkpoint` freezes the upper and lays a fresh one over it. What is written then is a diff by construction, so
`rewind` reads the changes from it, moves the kept parts of it under a third upper, and throws the rest away.
Nothing is ever mounted at, or looked up through, a path that a command could have made.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside.overlay import is_opaque, is_whiteout
from rollcage.sandboxes.local.inside import restoring
from rollcage.sandboxes.local.inside.diff import HOME, PathParts, changes, exists, files_since, lstat

_ROOT = "/root"
_HOME = f"{_ROOT}{HOME}"
_TMP = f"{_ROOT}/tmp"  # noqa: S108
BASE, SKELETON = "/base", "/skeleton"
"""In the frame, what lies below a system that can be written: the host's as a box shows it, or our part of an image's.
"""
ROOT_HOME = "/root"
"""What commands of such a box call their home; it is the same folder as HOME."""
_VIEW = "/view"
_ALL = "/"
_FIXED = ("dev", "home", "proc", "run")
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
    rooted: bool = False
    """The system can be written, too."""
    systems: int = 0
    """How many folders lie below the system, where it is one of its own; else what is below it is in BASE."""

    @classmethod
    def of(cls, request: Mapping[str, Any]) -> Stack:
        """As a request says."""
        more = (request.get("rooted", False), request.get("systems", 0))
        return cls(request["upper"], request["frozen"], request["layers"], request["brought"], *more)


class Area(NamedTuple):
    """One overlay of a box."""

    prefix: str
    """What commands call it; empty is the root."""
    upper: str
    work: str
    """Its folders in each numbered one."""


_IN_HOME, _IN_SYSTEM = Area(HOME, "u", "w"), Area("", "s", "sw")


def prepare(size: int, stack: Stack) -> None:
    """Mount the first home, on a disk that was brought along or that is made now."""
    if not stack.brought:
        os.mkdir(_DISK)
        kernel.mount("tmpfs", _DISK, "tmpfs", _FLAGS, f"mode=0755,size={size},nr_inodes={_inodes(size)}")
    os.mkdir(f"{_DISK}/none")
    try:
        # Overlay marks replaced folders this way; without it, `rm -r folder && mkdir folder` would fail in the box.
        os.setxattr(f"{_DISK}/none", "user.rollcage", b"y")
    except OSError as error:
        where = "below the state folder" if stack.brought else "on tmpfs"
        raise kernel.KernelRefused(error.errno or 0, f"keep user attributes {where}", "attributes") from error
    _make_upper(0, stack, first=True)
    _lay(0, stack)


def open_upper(upper: int) -> int:
    """A descriptor of the folder that holds what was written since the last checkpoint, as overlay keeps it."""
    return os.open(f"{_DISK}/{upper}/u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def written(upper: int, since: float, without: Sequence[str]) -> list[str]:
    """Files below home and in /tmp that were made or changed since then, outside these paths."""
    places = {f"{_DISK}/{upper}/u": HOME, _TMP: "/tmp"}  # noqa: S108 (in the box)
    return files_since(places, since, without)


def empty_tmp(size: int, *, first: bool = False, tmp: str = _TMP) -> None:
    """Put a fresh /tmp in place."""
    if not first:
        kernel.detach(tmp)
    kernel.mount("tmpfs", tmp, "tmpfs", _FLAGS, f"mode=1777,size={size},nr_inodes={_inodes(size)}")


def second_root(stack: Stack, place: str, tmp: int) -> None:
    """Show the box a second time, with a home and a /tmp of its own: as it was at the checkpoint.

    A system that can be written is there a second time, too; one that cannot is the same.
    """
    if not stack.rooted:
        kernel.mount(_ROOT, place, flags=kernel.MS_BIND | kernel.MS_REC)
        empty_tmp(tmp, tmp=f"{place}/tmp")  # noqa: S108
    _make_room(stack)
    number = stack.upper + 1
    _make_upper(number, stack, first=not stack.frozen)
    if not stack.rooted:
        kernel.detach(f"{place}{HOME}")
        _mount(number, stack, f"{place}{HOME}")
        return
    _lay(number, stack, place)
    empty_tmp(tmp, first=True, tmp=f"{place}/tmp")  # noqa: S108


def forget_second_root(stack: Stack) -> None:
    """Free what was written in it."""
    discard(f"{_DISK}/{stack.upper + 1}", _DISK)


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
    tmp = _strip(stack)
    stack = stack._replace(frozen=(stack.upper, *stack.frozen))
    _make_upper(stack.upper + 1, stack)
    _lay(stack.upper + 1, stack, tmp=tmp)


def rewind(stack: Stack, keep: Sequence[str], restore: Sequence[str] = ()) -> list[str]:
    """Replace the upper by upper + 1, which holds nothing but the kept paths; returns what else had been changed.

    In the kept paths, what `restore` names is as it was before.
    """
    upper, fresh = stack.upper, stack.upper + 1
    _make_room(stack)
    tmp = _strip(stack)
    if (_ALL if stack.rooted else HOME) in keep:
        os.rename(f"{_DISK}/{upper}", f"{_DISK}/{fresh}")
        changed = _keep_all(stack, keep, restore) if stack.rooted else []
        _lay(fresh, stack, tmp=tmp)
        return changed
    _make_upper(fresh, stack)
    if not stack.rooted:
        changed = _rewind(stack, _IN_HOME, keep, restore, _HOME)
        discard(f"{_DISK}/{upper}", _DISK)
        return changed
    changed = []
    for area in (_IN_SYSTEM, _IN_HOME):
        at_home = area is _IN_HOME
        changed += _rewind(
            stack,
            area,
            [_real(path) for path in keep if _is_home(path) == at_home],
            [_real(path) for path in restore if _is_home(path) == at_home],
            _VIEW,
        )
        kernel.detach(_VIEW)
    discard(f"{_DISK}/{upper}", _DISK)
    _lay(fresh, stack, tmp=tmp)
    return changed


def _keep_all(stack: Stack, keep: Sequence[str], restore: Sequence[str]) -> list[str]:
    """Leave a whole system as it is but for `restore`; what was changed in it, outside what else is to be kept."""
    changed, before = [], f"{_DISK}/before"
    os.mkdir(before)
    for area in (_IN_SYSTEM, _IN_HOME):
        new, at_home = f"{_DISK}/{stack.upper + 1}/{area.upper}", area is _IN_HOME
        for parts in (_parts(_real(path), area) for path in restore if _is_home(path) == at_home):
            if restoring.uncover(new, parts, _DISK, discard) and not stat.S_ISDIR(
                os.lstat(f"{new}/{parts[0]}").st_mode
            ):
                os.unlink(f"{new}/{parts[0]}")  # a link, say, in place of the folder above it
        own = {_parts(_real(path), area) for path in keep if path != _ALL and _is_home(path) == at_home}
        kernel.mount(
            "before", before, "overlay", _FLAGS | kernel.MS_RDONLY, f"userxattr,lowerdir={_below(stack, area)}"
        )
        changed += changes(new, before, own, area.prefix)
        kernel.detach(before)
    os.rmdir(before)
    return changed


def _rewind(stack: Stack, area: Area, keep: Sequence[str], restore: Sequence[str], view: str) -> list[str]:
    """One area of it, which is mounted at `view` in the end."""
    upper, fresh = stack.upper, stack.upper + 1
    kept = {_parts(path, area) for path in keep}
    kept = {path for path in kept if not any(path[:size] in kept for size in range(len(path)))}
    old, new = f"{_DISK}/{upper}/{area.upper}", f"{_DISK}/{fresh}/{area.upper}"
    if () in kept:
        os.rmdir(new)
        os.rename(old, new)
        _mount(fresh, stack, view, area)
        return []
    _mount(fresh, stack, view, area)
    changed = changes(old, view, kept, area.prefix)
    moves = [_judge(old, parts) for parts in sorted(kept)]
    for parts, verdict in moves:
        if verdict == "strange":
            changed.append("/".join((area.prefix, *parts)))
    hidden = [verdict in ("gone", "strange") and _was_there(view, parts) for parts, verdict in moves]
    back = [parts for parts in (_parts(path, area) for path in restore) if _was_there(view, parts[:-1], folder=True)]
    for (parts, verdict), whiteout in zip(moves, hidden, strict=True):
        if whiteout or verdict in ("moved", "alone"):
            _make_parents(view, parts, old)
    kernel.detach(view)
    for (parts, verdict), whiteout in zip(moves, hidden, strict=True):
        path = "/".join(parts)
        if whiteout:
            os.mknod(f"{new}/{path}", stat.S_IFCHR, 0)
        elif verdict in ("moved", "alone"):
            os.rename(f"{old}/{path}", f"{new}/{path}")
            if verdict == "alone" and stat.S_ISDIR(os.lstat(f"{new}/{path}").st_mode):
                os.setxattr(f"{new}/{path}", "user.overlay.opaque", b"y")
    discard(old, _DISK)
    covered = [parts for parts in back if restoring.uncover(new, parts, _DISK, discard)]
    _mount(fresh, stack, view, area)
    if covered:
        before = f"{_DISK}/before"
        os.mkdir(before)
        options = f"userxattr,lowerdir={_below(stack, area)}"
        kernel.mount("before", before, "overlay", _FLAGS | kernel.MS_RDONLY, options)
        for parts in covered:
            restoring.copy_back(before, view, parts)
        kernel.detach(before)
        os.rmdir(before)
    return sorted(set(changed))


def _strip(stack: Stack) -> int:
    """Take away what is mounted; what /tmp was where it goes too, else nothing (-1)."""
    if not stack.rooted:
        kernel.detach(_HOME)
        return -1
    tmp = kernel.clone_mount(os.open(_TMP, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
    kernel.detach(_ROOT)
    return tmp


def _lay(number: int, stack: Stack, root: str = _ROOT, *, tmp: int = -1) -> None:
    """Mount the home, and the system around it where that can be written. `tmp`: a mount that goes to /tmp."""
    if not stack.rooted:
        _mount(number, stack, f"{root}{HOME}")
        return
    _mount(number, stack, root, _IN_SYSTEM)
    top = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in _FIXED:
        # No command can move or replace what something is mounted on, so nothing else will ever be mounted elsewhere.
        place = kernel.open_plain(top, name, os.O_PATH | os.O_DIRECTORY)
        kernel.attach_mount(kernel.clone_mount(place), place)
        os.close(place)
    with open("/proc/self/mountinfo") as mounts:
        shown = sorted(at for line in mounts if (at := line.split()[4]).startswith(f"{BASE}/"))
    for at in shown:
        source = os.open(at, os.O_PATH | os.O_CLOEXEC)
        target = kernel.open_plain(top, at[len(BASE) + 1 :], os.O_PATH)
        kernel.attach_mount(kernel.clone_mount(source), target)
        os.close(source)
        os.close(target)
    home = kernel.open_plain(top, HOME[1:], os.O_PATH | os.O_DIRECTORY)
    _mount(number, stack, f"/proc/self/fd/{home}")
    os.close(home)
    home = kernel.open_plain(top, HOME[1:], os.O_PATH | os.O_DIRECTORY)
    kernel.attach_mount(kernel.clone_mount(home), kernel.open_plain(top, "root", os.O_PATH | os.O_DIRECTORY))
    os.close(home)
    if tmp >= 0:
        kernel.attach_mount(tmp, kernel.open_plain(top, "tmp", os.O_PATH | os.O_DIRECTORY))
        os.close(tmp)
    os.close(top)


def _is_home(path: str) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in (HOME, ROOT_HOME))


def _real(path: str) -> str:
    """A path below /root by its name below home: it is the same folder."""
    return HOME + path[len(ROOT_HOME) :] if f"{path}/".startswith(f"{ROOT_HOME}/") else path


def _parts(path: str, area: Area) -> PathParts:
    return tuple(part for part in path[len(area.prefix) :].split("/") if part)


def _below(stack: Stack, area: Area = _IN_HOME) -> str:
    """What lies below the upper, as overlay is told it; at least two folders, which is what it wants."""
    frozen = [f"{_DISK}/{number}/{area.upper}" for number in stack.frozen]
    systems = [f"/systems/{number}" for number in range(stack.systems)]
    if area is _IN_SYSTEM:
        return ":".join([*frozen, *([SKELETON, *systems] if systems else [BASE]), f"{_DISK}/none"])
    layers = [f"/layers/{number}" for number in range(stack.layers)]
    # What an image has in /root: the same folder is the home of such a box.
    roots = _merged(ROOT_HOME, systems) if stack.rooted else []
    return ":".join([*frozen, *layers, *roots, f"{_DISK}/none"])


def _merged(path: str, systems: Sequence[str]) -> list[str]:
    """The folders of that path which overlay would merge, topmost first."""
    found: list[str] = []
    for place in (f"{folder}{path}" for folder in systems):
        kind = lstat(place)
        if kind is None:
            continue
        if not stat.S_ISDIR(kind.st_mode):
            break
        found.append(place)
        if is_opaque(place):
            break
    return found


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


def _was_there(view: str, parts: PathParts, *, folder: bool = False) -> bool:
    """Whether the checkpoint has this path (as a folder), with no symlink above it."""
    above = [lstat("/".join((view, *parts[:depth]))) for depth in range(1, len(parts) + folder)]
    return all(found and stat.S_ISDIR(found.st_mode) for found in above) and exists("/".join((view, *parts)))


def _make_parents(view: str, parts: PathParts, old: str) -> None:
    """Bring the folders above a kept path into the new upper, through the mounted home, so that it can be put there."""
    for depth in range(1, len(parts)):
        path = "/".join((view, *parts[:depth]))
        found = lstat(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            os.chmod(path, stat.S_IMODE(found.st_mode))
            continue
        if found is not None:
            os.unlink(path)
        theirs = lstat("/".join((old, *parts[:depth])))
        os.mkdir(path)
        os.chmod(path, stat.S_IMODE(theirs.st_mode) if theirs and stat.S_ISDIR(theirs.st_mode) else 0o755)


def _make_upper(number: int, stack: Stack, *, first: bool = False) -> None:
    """Make the folders of a numbered upper, each with the mode that the one below it has."""
    os.mkdir(f"{_DISK}/{number}")
    for area in (_IN_HOME, _IN_SYSTEM) if stack.rooted else (_IN_HOME,):
        mode = 0o755
        if not first:
            mode = stat.S_IMODE(os.lstat(f"{_DISK}/{stack.frozen[0]}/{area.upper}").st_mode)
        for folder in (area.upper, area.work):
            os.mkdir(f"{_DISK}/{number}/{folder}")
        os.chmod(f"{_DISK}/{number}/{area.upper}", mode)


def _mount(upper: int, stack: Stack, place: str = _HOME, area: Area = _IN_HOME) -> None:
    """Lay the upper of this number over the frozen ones and what is below those."""
    work = f"{_DISK}/{upper}/{area.work}"
    folders = f"lowerdir={_below(stack, area)},upperdir={_DISK}/{upper}/{area.upper},workdir={work}"
    how = "userxattr,index=off"
    if stack.brought:
        # Else each end of a mount would write out all that the host has not written yet. Overlay takes a work folder
        # that was used in this way for the remains of a crash, so it gets a new one.
        how += ",volatile"
        discard(work, _DISK)
        os.mkdir(work)
    kernel.mount("home" if area is _IN_HOME else "system", place, "overlay", _FLAGS, f"{how},{folders}")


def discard(folder: str, aside: str) -> None:
    """Delete a tree however deep it is: folders are moved to `aside`, on the same disk, before they are emptied."""
    # Another one may have been cut short here before.
    waiting, count, mark = [folder], 0, os.urandom(4).hex()
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
