"""The system calls that Python does not wrap: namespaces, mounts, and opening a path that cannot lead out."""

from __future__ import annotations

import array
import ctypes
import fcntl
import os
import socket
import struct
from errno import EAGAIN

CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

ATTR_RDONLY = 1
ATTR_NOSUID = 2
ATTR_NODEV = 4
ATTR_NOSYMFOLLOW = 0x00200000
_ATTR_IDMAP = 0x00100000
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_AT_EMPTY_PATH = 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_BY_DESCRIPTORS = 0x44

_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08
_RESOLVE_IN_ROOT = 0x10
_PATIENCE = 1000
"""A path with `..` in it is refused while anything on the machine is renamed or mounted (EAGAIN). That passes."""

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_FILTER = 2

_NR_PIVOT_ROOT = 155 if os.uname().machine == "x86_64" else 41
_NR_OPEN_TREE = 428
_NR_MOVE_MOUNT = 429
_NR_OPENAT2 = 437
_NR_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3


class KernelRefused(OSError):
    """The kernel said no: `step` says in words what was tried.

    `about`, for programs, is what it concerns where the remedy depends on that: `overlay` or another kind of mount,
    `layer`, `attributes`.
    """

    def __init__(self, number: int, step: str, about: str = "") -> None:
        super().__init__(number, os.strerror(number))
        self.step, self.about = step, about


def _check(result: int, step: str, about: str = "") -> int:
    if result == -1:
        raise KernelRefused(ctypes.get_errno(), step, about)
    return result


def unshare(flags: int, step: str) -> None:
    """Move this process (or, of process ids, what it forks) into new namespaces."""
    _check(_libc.unshare(flags), step)


def setns(fd: int, kind: int) -> None:
    """Join the namespace that a descriptor holds."""
    _check(_libc.setns(fd, kind), "join the box")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "", *, about: str = "") -> None:
    """mount(2); the step of a failure names the kind and the target, and it is `about` the kind unless said."""
    _check(
        _libc.mount(
            os.fsencode(source), os.fsencode(target), kind.encode() or None, flags, os.fsencode(options) or None
        ),
        f"mount {kind or source} on {target}",
        about or kind,
    )


def set_attributes(target: str | int, attributes: int, mapping: int = -1) -> None:
    """Set mount attributes on a whole tree of mounts at once, named by a path or a descriptor.

    `mapping`: a user namespace that says whose files are shown as whose.
    """
    mapped = (attributes | _ATTR_IDMAP, mapping) if mapping >= 0 else (attributes, 0)
    wanted = struct.pack("=QQQQ", mapped[0], 0, 0, mapped[1])
    number = ctypes.c_long(_NR_MOUNT_SETATTR)
    where, path, how = (target, "", _AT_EMPTY_PATH) if isinstance(target, int) else (_AT_FDCWD, target, 0)
    _check(
        _libc.syscall(
            number,
            ctypes.c_int(where),
            os.fsencode(path),
            ctypes.c_uint(_AT_RECURSIVE | how),
            wanted,
            ctypes.c_size_t(len(wanted)),
        ),
        f"mount_setattr {target}",
    )


def clone_mount(fd: int) -> int:
    """A mount of its own of what a descriptor leads to, not yet to be found anywhere."""
    flags = _OPEN_TREE_CLONE | _AT_EMPTY_PATH | os.O_CLOEXEC
    number = ctypes.c_long(_NR_OPEN_TREE)
    return _check(_libc.syscall(number, ctypes.c_int(fd), b"", ctypes.c_uint(flags)), "open_tree")


def attach_mount(tree: int, target: int) -> None:
    """Put a cloned mount where a descriptor leads."""
    number, flags = ctypes.c_long(_NR_MOVE_MOUNT), ctypes.c_uint(_MOVE_BY_DESCRIPTORS)
    _check(_libc.syscall(number, ctypes.c_int(tree), b"", ctypes.c_int(target), b"", flags), "move_mount")


def detach(target: str) -> None:
    """Unmount now, even while something still looks at it."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"unmount {target}")


def make_root(folder: str) -> None:
    """Make a mounted folder the root of this mount namespace and let go of the old one."""
    os.chdir(folder)
    _check(_libc.syscall(ctypes.c_long(_NR_PIVOT_ROOT), b".", b"."), "pivot_root")
    detach(".")
    os.chdir("/")


def open_plain(root: int, path: str, flags: int) -> int:
    """Open a relative path below `root` that leads through no link at all."""
    return _open(root, path, flags, _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS)


def open_in(root: int, path: str, flags: int) -> int:
    """Open a path as a process would whose root directory is `root`: no symlink, `..` or magic link leads out."""
    return _open(root, path, flags, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)


def _open(root: int, path: str, flags: int, resolve: int) -> int:
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    words = (ctypes.c_long(_NR_OPENAT2), ctypes.c_int(root), os.fsencode(path), how, ctypes.c_size_t(len(how)))
    for _ in range(_PATIENCE):
        opened: int = _libc.syscall(*words)
        if opened != -1 or ctypes.get_errno() != EAGAIN:
            break
    return _check(opened, "open")


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


def die_with_parent(signal: int = 9) -> None:
    """That signal (SIGKILL) for this process when the thread that forked it ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal, 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that none is left to anybody else."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def gain_nothing() -> None:
    """Bar this process, and what it becomes, from more rights: no set-user-id program takes effect."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def filter_calls(program: bytes) -> None:
    """Bar system calls for good, on top of those that are barred already. `program`: classic BPF."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    gain_nothing()
    wanted = Program(len(program) // 8, program)
    _check(_libc.prctl(_PR_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(wanted), 0, 0), "filter system calls")


def own_proc_entries() -> None:
    """Give /proc/self back to this process after it changed its uid, so that it may write its own id maps."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")


def ended_by_signal(pidfd: int) -> bool:
    """Whether a signal ended this process, which is gone; False where the kernel cannot tell (before Linux 6.15)."""
    asked = bytearray(struct.pack("=Q56x", _PIDFD_INFO_EXIT))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, asked)
    except OSError:
        return False
    (told,), (status,) = struct.unpack_from("=Q", asked), struct.unpack_from("=i", asked, 60)
    return bool(told & _PIDFD_INFO_EXIT) and os.WIFSIGNALED(status)
