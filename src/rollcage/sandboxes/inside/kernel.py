"""The system calls that Python does not wrap: namespaces, mounts, and opening a path that cannot lead out."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import platform
import socket
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 2
MS_NODEV = 4
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36

_NR_PIVOT_ROOT = 155 if platform.machine() == "x86_64" else 41
_NR_OPENAT2 = 437
_NR_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


class Refused(OSError):
    """The kernel said no; `step` says what was tried, for the remedy."""

    def __init__(self, number: int, step: str) -> None:
        super().__init__(number, os.strerror(number))
        self.step = step


def _check(result: int, step: str) -> int:
    if result == -1:
        raise Refused(ctypes.get_errno(), step)
    return result


def unshare(flags: int, step: str) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(flags), step)


def setns(fd: int, kind: int) -> None:
    """Join the namespace that a descriptor holds."""
    _check(_libc.setns(fd, kind), "join the box")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2); the step of a failure names the kind and the target."""
    _check(
        _libc.mount(
            os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, os.fsencode(options) or None
        ),
        f"mount {kind or source} on {target}",
    )


def set_attributes(target: str, attributes: int) -> None:
    """Set mount attributes on a whole tree of mounts at once."""
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    number = ctypes.c_long(_NR_MOUNT_SETATTR)
    _check(
        _libc.syscall(
            number,
            ctypes.c_int(_AT_FDCWD),
            os.fsencode(target),
            ctypes.c_uint(_AT_RECURSIVE),
            wanted,
            ctypes.c_size_t(len(wanted)),
        ),
        f"mount_setattr {target}",
    )


def detach(target: str) -> None:
    """Unmount now, even while something still looks at it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def make_root(folder: str) -> None:
    """Make a mounted folder the root of this mount namespace and let go of the old one."""
    os.chdir(folder)
    _check(_libc.syscall(ctypes.c_long(_NR_PIVOT_ROOT), b".", b"."), "pivot_root")
    detach(".")
    os.chdir("/")


def open_in(root: int, path: str, flags: int) -> int:
    """Open a path as a process would whose root directory is `root`: no symlink, `..` or magic link leads out."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
    return _check(
        _libc.syscall(
            ctypes.c_long(_NR_OPENAT2), ctypes.c_int(root), os.fsencode(path), how, ctypes.c_size_t(len(how))
        ),
        "open",
    )


def receive_fds(source: socket.socket, size: int) -> tuple[bytes, list[int]]:
    """A message and the descriptors with it, none of which a program we turn into will inherit.

    (`socket.recv_fds` does not pass its flags on.)
    """
    data, ancillary, _, _ = source.recvmsg(size, socket.CMSG_SPACE(32 * 4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, list(fds)


def loopback_up() -> None:
    """Bring up `lo` in this network namespace."""
    up = struct.pack("16sh14x", b"lo", 0x41)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as handle:
        fcntl.ioctl(handle, 0x8914, up)


def die_with_parent() -> None:
    """SIGKILL for this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none is left to anybody else."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def own_proc_entries() -> None:
    """Give /proc/self back to this process after it changed its uid, so that it may write its own id maps."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")
