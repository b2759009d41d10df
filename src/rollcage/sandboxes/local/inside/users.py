"""A host user for each box, where we are root: what the kernel counts for a user, it then counts for one box.

Layers belong to one user on disk. A box sees them through mounts that show them as its own user's (idmapped mounts),
so that an overlay can copy what a command changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside.processes import become_user

_PROBE = "/tmp"  # noqa: S108 (every host has it; ours is mounted over it in a mount namespace of our own)
_LENT = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV


def take_on(uid: int) -> None:
    """Become this ordinary user for good."""
    if uid <= 0:
        raise PermissionError(0, "a box must run as an ordinary user")
    become_user(uid, uid)
    kernel.own_proc_entries()


def lend(folders: Sequence[str], owner: int, uid: int) -> list[int]:
    """Mounts of folders of the working directory, not yet to be found anywhere, in which `owner`'s files are `uid`'s.

    Only as root.
    """
    if not folders:
        return []
    mapping = _mapping(owner, uid)
    try:
        return [_lent(folder, mapping) for folder in folders]
    finally:
        os.close(mapping)


def can_be_given(owner: int, uid: int) -> bool:
    """Whether boxes can have users of their own here: tried with the working directory below an overlay."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with suppress(BaseException):
            [tree] = lend(["."], owner, uid)
            take_on(uid)
            enter_user_namespace(kernel.CLONE_NEWNS)
            kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
            kernel.mount("tmpfs", _PROBE, "tmpfs")
            for name in ("lent", "more", "shown"):
                os.mkdir(f"{_PROBE}/{name}")
            kernel.attach_mount(tree, os.open(f"{_PROBE}/lent", os.O_PATH | os.O_CLOEXEC))
            options = f"userxattr,lowerdir={_PROBE}/lent:{_PROBE}/more"
            kernel.mount("probe", f"{_PROBE}/shown", "overlay", 0, options)
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def enter_user_namespace(beside: int = 0) -> None:
    """Become root of a new user namespace (and owner of new ones of other kinds) in which nobody else is known."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | beside, "make a user namespace")
    put("/proc/self/setgroups", "deny")
    put("/proc/self/uid_map", f"0 {uid} 1")
    put("/proc/self/gid_map", f"0 {gid} 1")


def put(path: str, text: str) -> None:
    """Write to a file of the kernel's."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise kernel.KernelRefused(error.errno or 0, f"write {path}") from error


def _lent(folder: str, mapping: int) -> int:
    try:
        source = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise kernel.KernelRefused(error.errno or 0, f"open {folder}", "layer") from error
    try:
        tree = kernel.clone_mount(source)
    finally:
        os.close(source)
    kernel.set_attributes(tree, _LENT, mapping)
    return tree


def _mapping(owner: int, uid: int) -> int:
    """A user namespace that says that `owner` is `uid`: the form in which the kernel wants to be told."""
    (made, told), (waits, release) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(release)
        try:
            kernel.unshare(kernel.CLONE_NEWUSER, "make a user namespace")
            os.write(told, b".")
            os.read(waits, 1)
        finally:
            os._exit(0)
    try:
        os.close(told)
        os.read(made, 1)
        for kind in ("uid_map", "gid_map"):
            put(f"/proc/{pid}/{kind}", f"{owner} {uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        for fd in (made, waits, release):
            os.close(fd)
        with suppress(ChildProcessError):  # where the kernel reaps for us
            os.waitpid(pid, 0)
