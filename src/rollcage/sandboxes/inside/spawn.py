"""Becomes a command in a box: joins it, takes on its limits, and turns into bubblewrap."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Mapping, Sequence

from . import kernel
from .files import is_folder
from .world import ROOT


class NoFolder(OSError):
    """The command's working directory is not in the box."""


def become(
    order: Mapping[str, object], fds: Sequence[int], bwrap: int, keeper: int, announce: Callable[[], None]
) -> None:
    """Never returns if all goes well. `fds`: stdin, stdout, stderr, status, block, the namespaces, then cgroups."""
    stdin, stdout, stderr, status, block, user, mnt, net, *groups = fds
    options, argv, limits, cwd = order["options"], order["argv"], order["limits"], order["cwd"]
    assert isinstance(options, list) and isinstance(argv, list) and isinstance(limits, dict) and isinstance(cwd, str)
    for group in groups:
        # From inside, before anything is started: nothing the command does can be outside its limits.
        os.write(group, b"0")
    kernel.setns(user, kernel.CLONE_NEWUSER)
    kernel.setns(mnt, kernel.CLONE_NEWNS)
    kernel.setns(net, kernel.CLONE_NEWNET)
    if not is_folder(cwd):
        raise NoFolder(0, "no such folder")
    # In here: the number of processes is counted for this box's user namespace, not for the uid all boxes share.
    for name, wanted in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(kind)
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (value, value))
    filter_program = bytes.fromhex(str(order["seccomp"]))
    options += ["--seccomp", str(_memory(filter_program)), "--block-fd", str(_keep(block))]
    options += ["--json-status-fd", str(_keep(status)), "--bind", ROOT, "/", *_mounts(int(str(order["shm"])))]
    options += ["--chdir", cwd]
    listed = _memory(b"".join(os.fsencode(option) + b"\0" for option in options))
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
    for name in (signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
    kernel.die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)
    announce()
    # An empty environment: bubblewrap's own stays readable in the box as /proc/1/environ.
    os.execve(bwrap, ["bwrap", "--args", str(listed), "--", *argv], {})  # noqa: S606


def _mounts(shm: int) -> list[str]:
    # Only where the box's own read-only root has the folder, never below the home directory: there, a symlink of the
    # agent's would lead bubblewrap before 0.12 out of the box.
    shared = ["--size", str(shm), "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108
    # Whoever can write to the memory of a namespace's first process decides how its command seems to have ended.
    sealed = ["--ro-bind", "/dev/null", "/proc/1/mem", "--ro-bind", "/dev/null", "/proc/1/task/1/mem"]
    return ["--proc", "/proc", *sealed, "--dev", "/dev", *shared, "--remount-ro", "/dev"]


def _memory(data: bytes) -> int:
    fd = os.memfd_create("order", 0)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _keep(fd: int) -> int:
    os.set_inheritable(fd, True)
    return fd
