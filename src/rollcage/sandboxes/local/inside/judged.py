"""Divides a box: a second root for the code that is judged; in the judge's own, sealed tests and a launcher.

The frame that holds both roots is out of sight of every command. What is shared is cloned from the judge's root by
descriptors that led through no link, so nothing an agent made decides where a mount lands.
"""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from errno import ENOENT
from typing import Any

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.local.inside import home

JUDGED = "/judged"
"""What judged commands see as /."""
SCRATCH = "/scratch"
_JUDGE = "/root"
_HOME = "home/user"
_DOOR, _COVER, _PRIVATE = "/door", "/cover", "/private"
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_BACKLOG = 64
_PYTHONS = ("usr/bin/python3", "usr/local/bin/python3", "bin/python3")
_PROGRAMS = ("usr/local/bin", "usr/bin", "bin")


def divide(request: Mapping[str, Any]) -> int:
    """Do it, in the box's mount namespace; returns the socket at which the launcher of the judge asks."""
    judge = os.open(_JUDGE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    python = next((path for path in _PYTHONS if _is_program(judge, path)), "")
    if request["needs_launcher"] and not python:
        raise FileNotFoundError(ENOENT, "the image has no python3, which `untrusted` runs with")
    for folder in (JUDGED, SCRATCH, _COVER, f"{_COVER}/folder", _PRIVATE, _DOOR):
        os.mkdir(folder)
    os.close(os.open(f"{_COVER}/file", os.O_CREAT | os.O_CLOEXEC, 0o444))
    home.second_root(home.Stack.of(request), JUDGED, request["tmp"])
    judged = os.open(JUDGED, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for path in request.get("removed", ()):
        _cover(path[1:], judged)
    for path in request["shared"]:
        _share(path[1:], judge, judged)
    for path in request["shared"] if request["unlinked"] else ():
        _follow_no_link(path[1:], judge)
    for path in request["covered"]:
        _cover(path[1:], judge)
    # A disk of its own: whoever fills the workdir must not keep the judge from writing its verdict.
    kernel.mount("tmpfs", _PRIVATE, "tmpfs", _FLAGS, f"mode=0755,size={request['tmp']}")
    for number, path in enumerate(request["hidden"]):
        os.mkdir(f"{_PRIVATE}/{number}")
        _put(f"{_PRIVATE}/{number}", kernel.open_plain(judge, path[1:], os.O_PATH | os.O_DIRECTORY))
    for path in request["sealed"]:
        target = kernel.open_plain(judge, path[1:], os.O_PATH | os.O_DIRECTORY)
        _put_descriptor(target, target, kernel.ATTR_RDONLY)
    for name, digits in request["compiled"].items():
        os.makedirs(os.path.dirname(f"{_DOOR}/{name}"), exist_ok=True)
        with open(f"{_DOOR}/{name}", "wb") as compiled:
            compiled.write(bytes.fromhex(digits))
    tools = {name: text for name, text in request["tools"].items() if _has_use(judge, name, text)}
    listener = _open_door(tools, python)
    _put(_DOOR, kernel.open_in(judge, request["door"], os.O_PATH | os.O_DIRECTORY), kernel.ATTR_RDONLY)
    return listener


def remove_second_root(request: Mapping[str, Any]) -> None:
    """Take the second root away; the judge's own is laid anew by whoever rewinds the box. No command may be running."""
    for folder in (JUDGED, _PRIVATE):
        kernel.detach(folder)
    for folder in (JUDGED, SCRATCH, _COVER, _PRIVATE, _DOOR):
        home.discard(folder, "/")
    home.forget_second_root(home.Stack.of(request))


def forget_afterwards(live: Sequence[str], disk: int, tmp: int) -> None:
    """In a mount namespace of the command's own: what it writes is gone with it, but for what it writes to live paths.

    So a command of the judge's finds nothing that code of an earlier one has left for it.
    """
    _own_mounts(disk)
    kernel.mount("tmpfs", f"{_JUDGE}/tmp", "tmpfs", _FLAGS, f"mode=1777,size={tmp}")  # noqa: S108
    judge = os.open(_JUDGE, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    below = kernel.open_plain(judge, _HOME, os.O_PATH | os.O_DIRECTORY)
    opened: list[tuple[str, int]] = []
    for path in sorted(live):
        with suppress(OSError):  # the agent removed it, or made a link of it
            opened.append((path[1:], kernel.open_plain(judge, path[1:], os.O_PATH)))
    if not _overlaid(below, f"{SCRATCH}/home"):
        return  # as many layers as the kernel allows lie there already
    _put(f"{SCRATCH}/home", below)
    for path, source in opened:
        _put_descriptor(source, kernel.open_plain(judge, path, os.O_PATH))


def cover_with_scratch(paths: Sequence[str], size: int) -> None:
    """In a mount namespace of the command's own: put copies in the place of what is shared, gone with the command."""
    _own_mounts(size)
    judged = os.open(JUDGED, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for number, path in enumerate(paths):
        try:
            original = kernel.open_plain(judged, path[1:], os.O_PATH)
        except OSError:
            continue
        copy = f"{SCRATCH}/{number}"
        if not stat.S_ISDIR(os.fstat(original).st_mode):
            shutil.copyfile(f"/proc/self/fd/{original}", copy)
        elif not _overlaid(original, copy):
            shutil.copytree(f"/proc/self/fd/{original}", copy, symlinks=True, ignore=_special)
        _put(copy, original)


def _own_mounts(size: int) -> None:
    kernel.unshare(kernel.CLONE_NEWNS, "make a mount namespace")
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", SCRATCH, "tmpfs", _FLAGS, f"mode=0755,size={size}")


def _overlaid(original: int, copy: str) -> bool:
    """Whether a copy that costs nothing could be made: changes go to a layer above. Overlays cannot be stacked high."""
    for folder in ("", ".below", ".upper", ".work"):
        os.mkdir(copy + folder)
    _put_descriptor(original, os.open(f"{copy}.below", os.O_PATH | os.O_CLOEXEC))
    os.chmod(f"{copy}.upper", stat.S_IMODE(os.stat(f"{copy}.below").st_mode))
    how = f"userxattr,index=off,lowerdir={copy}.below,upperdir={copy}.upper,workdir={copy}.work"
    try:
        kernel.mount("scratch", copy, "overlay", _FLAGS, how)
    except kernel.KernelRefused:
        os.rmdir(copy)
        return False
    return True


def _special(folder: str, names: list[str]) -> list[str]:
    """What is neither file, folder nor link is not copied: opening it could hang."""
    kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    return [name for name in names if not any(kind(os.lstat(f"{folder}/{name}").st_mode) for kind in kinds)]


def _share(path: str, judge: int, judged: int) -> None:
    try:
        source = kernel.open_plain(judge, path, os.O_PATH)
    except OSError:
        return  # the agent removed it, or made a link of it: neither side has it
    mode = os.fstat(source).st_mode
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        return
    parts = path.split("/")
    for depth in range(len(parts)):
        place = "/".join(parts[: depth + 1])
        found = _lstat(f"{JUDGED}/{place}")
        wanted = stat.S_ISDIR if depth < len(parts) - 1 or stat.S_ISDIR(mode) else stat.S_ISREG
        if found is not None and not wanted(found.st_mode):
            remove = shutil.rmtree if stat.S_ISDIR(found.st_mode) else os.unlink
            remove(f"{JUDGED}/{place}")
            found = None
        if found is None and wanted is stat.S_ISDIR:
            os.mkdir(f"{JUDGED}/{place}")
        elif found is None:
            os.close(os.open(f"{JUDGED}/{place}", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    _put_descriptor(source, kernel.open_plain(judged, path, os.O_PATH))


def _follow_no_link(path: str, judge: int) -> None:
    with suppress(OSError):  # the agent removed it, or made a link of it
        target = kernel.open_plain(judge, path, os.O_PATH)
        _put_descriptor(target, target, kernel.ATTR_NOSYMFOLLOW)


def _cover(path: str, root: int) -> None:
    try:
        target = kernel.open_plain(root, path, os.O_PATH)
    except OSError:
        return
    kind = "folder" if stat.S_ISDIR(os.fstat(target).st_mode) else "file"
    _put(f"{_COVER}/{kind}", target, kernel.ATTR_RDONLY)


def _open_door(tools: Mapping[str, str], python: str) -> int:
    for name, text in tools.items():
        if text.startswith("#!\n") and python:
            text = f"#!/{python} -IS\n{text.partition(chr(10))[2]}"
        elif text.startswith("#!\n"):
            text = "#!/bin/sh\necho 'untrusted: this image has no python3 to launch with' >&2\nexit 125\n"
        with open(f"{_DOOR}/{name}", "w") as file:
            file.write(text)
        os.chmod(f"{_DOOR}/{name}", 0o755 if text.startswith("#!") else 0o644)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind(f"{_DOOR}/socket")
    listener.listen(_BACKLOG)
    return listener.detach()


def _has_use(root: int, name: str, text: str) -> bool:
    """Whether a tool is of use: one that stands before a program that the image does not have would hide that."""
    return not text.startswith("#!/bin/sh") or any(_is_program(root, f"{folder}/{name}") for folder in _PROGRAMS)


def _is_program(root: int, path: str) -> bool:
    try:
        os.close(kernel.open_in(root, path, os.O_PATH))
    except OSError:
        return False
    return True


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _put(source: str, target: int, attributes: int = 0) -> None:
    _put_descriptor(os.open(source, os.O_PATH | os.O_CLOEXEC), target, attributes)


def _put_descriptor(source: int, target: int, attributes: int = 0) -> None:
    tree = kernel.clone_mount(source)
    if attributes:
        kernel.set_attributes(tree, attributes)
    kernel.attach_mount(tree, target)
