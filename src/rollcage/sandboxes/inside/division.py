"""Divides a box that we are root in: the code that is judged gets mounts of its own, the judge's are changed.

There, its tests are sealed and the launcher is put. What both see is cloned by descriptors that led through no link, so
nothing an agent made decides where a mount lands. Standard library only, for Python 3.8 and later.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside.system import HOST_FILES

_STAGE = "/run/stage"
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_BACKLOG = 64
_PROGRAMS = ("/usr/local/bin", "/usr/bin", "/bin")
_FOLDER = os.O_PATH | os.O_DIRECTORY


def divide(request: Mapping[str, Any], user: int, serve: Callable[[socket.socket], None]) -> tuple[int, int]:
    """In a container; returns the socket at which the judge's launcher asks, and one that leads to a second first
    process, which serves the judged with processes of its own.

    `serve`: what that process does with its end of the socket. It says there what went wrong where something did.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mounted, telling = os.pipe2(os.O_CLOEXEC)
    if os.fork() == 0:
        ours.close()
        _become_judged(request, user, theirs, telling, serve)
    theirs.close()
    os.close(telling)
    # What both see is taken from the judge's mounts before any of it is covered there.
    if complaint := os.read(mounted, 4096).decode():
        raise OSError(0, complaint)
    return prepare_judge(request, user), ours.detach()


def prepare_judge(request: Mapping[str, Any], user: int) -> int:
    """Cover, seal and add what the judge is to see, in the mounts that this process has; returns the launcher's
    socket."""
    with _AsUser(user):
        root = os.open("/", _FOLDER | os.O_CLOEXEC)
        unlinked = [_opened(root, path) for path in request["shared"] if request["unlinked"]]
        covered = [_opened(root, path) for path in request["covered"]]
        hidden = [kernel.open_plain(root, path[1:], _FOLDER) for path in request["hidden"]]
        sealed = [kernel.open_plain(root, path[1:], _FOLDER) for path in request["sealed"]]
    os.mkdir(_STAGE)
    for target in (fd for fd in unlinked if fd >= 0):
        _put(target, target, kernel.ATTR_NOSYMFOLLOW)
    for target in (fd for fd in covered if fd >= 0):
        _cover(target)
    for target in hidden:
        # A disk of its own: whoever fills the workdir must not keep the judge from writing its verdict.
        _disk(_STAGE, request["tmp"], user)
        _put(os.open(_STAGE, _FOLDER | os.O_CLOEXEC), target)
        kernel.detach(_STAGE)
    for target in sealed:
        _put(target, target, kernel.ATTR_RDONLY)
    return _open_door(request["tools"])


def forget_afterwards(request: Mapping[str, Any], user: int) -> None:
    """For this process alone: what it writes is gone with it, but for what it writes to live paths.

    So a command of the judge's finds nothing that code of an earlier one has left for it.
    """
    home = request["home"]
    _own_mounts(request["disk"], user)
    _empty_temporary(request["tmp"])
    root = os.open("/", _FOLDER | os.O_CLOEXEC)
    with _AsUser(user):
        before = kernel.open_plain(root, home[1:], _FOLDER)
        live = [(path, _opened(root, path)) for path in sorted(request["live"])]
        for name in ("below", "upper", "work", "home"):
            os.mkdir(f"{_STAGE}/{name}")
        os.chmod(f"{_STAGE}/upper", stat.S_IMODE(os.fstat(before).st_mode))
    _put(before, os.open(f"{_STAGE}/below", _FOLDER | os.O_CLOEXEC))
    how = f"userxattr,index=off,lowerdir={_STAGE}/below,upperdir={_STAGE}/upper,workdir={_STAGE}/work"
    try:
        kernel.mount("home", f"{_STAGE}/home", "overlay", _FLAGS, how)
    except kernel.KernelRefused:
        return  # this engine allows none
    _put(os.open(f"{_STAGE}/home", _FOLDER | os.O_CLOEXEC), before)
    for path, original in live:
        if original >= 0:
            with _AsUser(user):
                target = kernel.open_plain(os.open("/", _FOLDER | os.O_CLOEXEC), path[1:], os.O_PATH)
            _put(original, target)


def use_scratch(paths: Sequence[str], size: int, user: int) -> None:
    """For this process alone: put copies in the place of what is shared, gone with it."""
    _own_mounts(size, user)
    root = os.open("/", _FOLDER | os.O_CLOEXEC)
    for number, path in enumerate(paths):
        with _AsUser(user):
            original = _opened(root, path)
            copy = f"{_STAGE}/{number}"
            if original < 0:
                continue
            _copy(f"/proc/self/fd/{original}", copy, os.fstat(original).st_mode)
            place = os.open(copy, os.O_PATH | os.O_CLOEXEC)
        _put(place, original)


def hide_host() -> None:
    """Empty the files of /proc that tell of the machine."""
    for name in HOST_FILES:
        if os.path.exists(name):
            kernel.mount(os.devnull, name, flags=kernel.MS_BIND)


def _become_judged(
    request: Mapping[str, Any], user: int, control: socket.socket, telling: int, serve: Callable[[socket.socket], None]
) -> None:
    """Never returns. Process ids are new for what is forked from here on, so there is one fork more."""
    try:
        spaces = kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWPID
        kernel.unshare(spaces, "make namespaces for the judged")
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        show_judged(request, user)
        if os.fork():
            os._exit(0)
        kernel.mount("proc", "/proc", "proc", _FLAGS | kernel.MS_NOEXEC)
        hide_host()
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is for the one who asked)
        step = getattr(error, "step", "")
        os.write(telling, f"{step}: {error}".encode()[:4096])
        os._exit(1)
    os.close(telling)
    try:
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, signal.SIG_IGN)
        serve(control)
    finally:
        os._exit(0)


def show_judged(request: Mapping[str, Any], user: int) -> None:
    """Make the mounts that this process has those of the judged."""
    home = request["home"]
    root = os.open("/", _FOLDER | os.O_CLOEXEC)
    with _AsUser(user):
        shared = [(path, _opened(root, path)) for path in request["shared"]]
        before = kernel.open_plain(root, home[1:], _FOLDER)
    # The launcher, and whatever else is put there later, is the judge's alone.
    kernel.mount("tmpfs", "/run", "tmpfs", _FLAGS, f"mode=0755,size={1 << 20}")
    _empty_temporary(request["tmp"])
    os.mkdir(_STAGE)
    _disk(_STAGE, request["disk"], user)
    with _AsUser(user):
        apart = {os.path.normpath(path) for key in ("shared", "sealed", "hidden") for path in request[key]}
        _copy_folder(f"/proc/self/fd/{before}", _STAGE, home, apart)
        for path, original in shared:
            if original >= 0:
                _place(f"{_STAGE}{path[len(home) :]}", original)
    _put(os.open(_STAGE, _FOLDER | os.O_CLOEXEC), before)
    kernel.detach(_STAGE)
    os.rmdir(_STAGE)
    for path, original in shared:
        if original >= 0:
            with _AsUser(user):
                target = kernel.open_plain(os.open("/", _FOLDER | os.O_CLOEXEC), path[1:], os.O_PATH)
            _put(original, target)


def _own_mounts(size: int, user: int) -> None:
    """Mounts of this process's own, and a disk at the stage."""
    kernel.unshare(kernel.CLONE_NEWNS, "make a mount namespace")
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    os.makedirs(_STAGE, exist_ok=True)
    _disk(_STAGE, size, user)


def _empty_temporary(size: int) -> None:
    for place in ("/tmp", "/var/tmp", "/dev/shm"):  # noqa: S108
        if os.path.isdir(place) and not os.path.islink(place):
            kernel.mount("tmpfs", place, "tmpfs", _FLAGS, f"mode=1777,size={size}")


def _place(path: str, original: int) -> None:
    """Make what the original is to be mounted on."""
    folder = stat.S_ISDIR(os.fstat(original).st_mode)
    os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
    if not folder:
        os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o644))


def _copy_folder(source: str, target: str, path: str, apart: set[str]) -> None:
    """Copy what is in a folder, but for the paths that are kept apart. `path`: what the box calls the source."""
    for entry in os.scandir(source):
        inner = f"{path}/{entry.name}"
        if inner in apart:
            continue
        copy = f"{target}/{entry.name}"
        if entry.is_dir(follow_symlinks=False) and any(each.startswith(f"{inner}/") for each in apart):
            os.mkdir(copy)
            _copy_folder(entry.path, copy, inner, apart)
            shutil.copystat(entry.path, copy)
        else:
            _copy(entry.path, copy, entry.stat(follow_symlinks=False).st_mode)


def _copy(source: str, target: str, mode: int) -> None:
    """What is neither file, folder nor link is not copied: opening it could hang."""
    if stat.S_ISDIR(mode):
        shutil.copytree(source, target, symlinks=True, ignore=_special)
    elif stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISREG(mode):
        shutil.copy2(source, target)


def _special(folder: str, names: list[str]) -> list[str]:
    kinds = (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK)
    return [name for name in names if not any(kind(os.lstat(f"{folder}/{name}").st_mode) for kind in kinds)]


def _opened(root: int, path: str) -> int:
    """A file or folder that no link leads to; -1 where the agent removed it, or made something else of it."""
    try:
        found = kernel.open_plain(root, path[1:], os.O_PATH)
    except OSError:
        return -1
    mode = os.fstat(found).st_mode
    return found if stat.S_ISDIR(mode) or stat.S_ISREG(mode) else -1


def _cover(target: int) -> None:
    empty = f"{_STAGE}/empty"
    if stat.S_ISDIR(os.fstat(target).st_mode):
        os.makedirs(empty, exist_ok=True)
    else:
        empty = os.devnull
    _put(os.open(empty, os.O_PATH | os.O_CLOEXEC), target, kernel.ATTR_RDONLY)


def _open_door(tools: Mapping[str, str]) -> int:
    for name, text in tools.items():
        if text.startswith("#!/bin/sh") and not any(os.path.exists(f"{folder}/{name}") for folder in _PROGRAMS):
            continue  # it would stand before a program that the image does not have
        if text.startswith("#!\n"):
            text = f"#!{sys.executable} -IS\n{text.partition(chr(10))[2]}"
        with open(f"/run/{name}", "w") as file:
            file.write(text)
        os.chmod(f"/run/{name}", 0o755 if text.startswith("#!") else 0o644)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    listener.bind("/run/socket")
    os.chmod("/run/socket", 0o666)  # noqa: S103 (the judge is the box's user)
    listener.listen(_BACKLOG)
    return listener.detach()


def _disk(place: str, size: int, user: int) -> None:
    kernel.mount("tmpfs", place, "tmpfs", _FLAGS, f"mode=0755,size={size},uid={user},gid={user}")


def _put(source: int, target: int, attributes: int = 0) -> None:
    tree = kernel.clone_mount(source)
    if attributes:
        kernel.set_attributes(tree, attributes)
    kernel.attach_mount(tree, target)


class _AsUser:
    """As the box's user, who may open what it has closed to others; mounts need root again."""

    def __init__(self, user: int) -> None:
        self._user = user

    def __enter__(self) -> None:
        os.setegid(self._user)
        os.seteuid(self._user)

    def __exit__(self, *_: object) -> None:
        os.seteuid(0)
        os.setegid(0)
