# ruff: noqa: PTH102, PTH115, PTH123, PTH211 (speaks to the kernel in its own terms)
"""Builds a box: its namespaces, and in them the little world its commands will see."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from . import home, kernel

FRAME = "/tmp"  # noqa: S108 (every host has it; ours is mounted over it in a mount namespace of our own)
ROOT = "/root"
"""What commands see as /; beside it in the frame, out of their sight: layers, disk, and the host's /proc and /dev."""

_SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives",
    "ca-certificates",
    "ca-certificates.conf",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "pki",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
)
_FILES = {
    "passwd": "root:x:0:0:root:/:/usr/sbin/nologin\nuser:x:1000:1000:user:/home/user:/bin/bash\n",
    "group": "root:x:0:\nuser:x:1000:\n",
    "hosts": "127.0.0.1 localhost box\n::1 localhost\n",
    "hostname": "box\n",
}
_SHARE = 8
"""A box may use this part of what all boxes of one host user share."""


def build(layers: Sequence[str], disk: int, tmp: int) -> list[int]:
    """Move this process into a new box; returns descriptors of its user, mount and network namespaces.

    Layers are names in the working directory. It is carried into the new mount namespace, so they are reached even
    where a folder above them is closed to this uid.
    """
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS | kernel.CLONE_NEWNET, "make a user namespace")
    _put("/proc/self/setgroups", "deny")
    _put("/proc/self/uid_map", f"0 {uid} 1")
    _put("/proc/self/gid_map", f"0 {gid} 1")
    kernel.loopback_up()
    _share_fairly()
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", FRAME, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=4m,nr_inodes=4k")
    _furnish(FRAME + ROOT)
    for name in (*_SYSTEM, "etc"):
        os.symlink(f"{ROOT}/{name}"[1:], f"{FRAME}/{name}")
    os.mkdir(f"{FRAME}/tmp")  # noqa: S108 (bubblewrap wants one to start from)
    for name in ("proc", "dev"):
        os.mkdir(f"{FRAME}/{name}")
        _bind(f"/{name}", f"{FRAME}/{name}")
    os.mkdir(f"{FRAME}/layers")
    for number, layer in enumerate(layers):
        os.mkdir(f"{FRAME}/layers/{number}")
        kernel.mount(f"./{layer}", f"{FRAME}/layers/{number}", flags=kernel.MS_BIND)
    kernel.make_root(FRAME)
    home.prepare(disk, len(layers))
    home.empty_tmp(tmp, first=True)
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "mnt", "net")]


def _put(path: str, text: str) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    except OSError as error:
        raise kernel.Refused(error.errno or 0, f"write {path}") from error


def _share_fairly() -> None:
    # All boxes run as one host user, who may hold only so many inotify instances: no box may take them all.
    for limit, ours in (("max_user_instances", "max_inotify_instances"), ("max_user_watches", "max_inotify_watches")):
        with open(f"/proc/sys/fs/inotify/{limit}") as file:
            allowed = int(file.read())
        _put(f"/proc/sys/user/{ours}", str(max(4, allowed // _SHARE)))


def _bind(source: str, target: str) -> None:
    kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)


def _furnish(root: str) -> None:
    os.mkdir(root)
    _bind(root, root)
    for name in ("dev", "etc", "etc/ssl", "home", "home/user", "proc", "run", "tmp"):
        os.mkdir(f"{root}/{name}")
    for name in _SYSTEM:
        _mirror(f"/{name}", f"{root}/{name}")
    for name in _ETC:
        _mirror(f"/etc/{name}", f"{root}/etc/{name}")
    for name, text in _FILES.items():
        with open(f"{root}/etc/{name}", "w") as file:
            file.write(text)
    kernel.set_attributes(root, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)


def _mirror(source: str, target: str) -> None:
    """Show a host file or folder in the box; a symlink is made anew and leads nowhere if its target is not shown."""
    try:
        mode = os.lstat(source).st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode):
        os.symlink(os.readlink(source), target)
        return
    if stat.S_ISDIR(mode):
        os.mkdir(target)
    else:
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o444))
    _bind(source, target)
