"""Becomes a command in a box: joins it, takes on its limits, and turns into bubblewrap."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from rollcage.sandboxes.inside import kernel
from rollcage.sandboxes.inside.files import is_folder
from rollcage.sandboxes.inside.processes import reset_signals, set_limits
from rollcage.sandboxes.inside.requests import NoFolder
from rollcage.sandboxes.inside.system import HOST_FILES
from rollcage.sandboxes.local.inside.judged import JUDGED, cover_with_scratch, forget_afterwards
from rollcage.sandboxes.local.inside.rootfs import JUDGED_PTS, PTS, ROOT


def become(
    request: Mapping[str, object], fds: Sequence[int], bwrap: int, fork_server: int, announce: Callable[[], None]
) -> None:
    """Never returns if all goes well. `fds`: stdin, stdout, stderr, status, block, the namespaces, then cgroups."""
    stdin, stdout, stderr, status, block, user, mnt, net, *groups = fds
    options, argv, limits, cwd = request["options"], request["argv"], request["limits"], request["cwd"]
    assert isinstance(options, list) and isinstance(argv, list) and isinstance(limits, dict) and isinstance(cwd, str)
    for group in groups:
        # From inside, before anything is started: nothing the command does can be outside its limits.
        os.write(group, b"0")
    root = JUDGED if request["judged"] else ROOT
    if request["judged"]:
        _be_killed_first()
    kernel.setns(user, kernel.CLONE_NEWUSER)
    kernel.setns(mnt, kernel.CLONE_NEWNS)
    kernel.setns(net, kernel.CLONE_NEWNET)
    if not is_folder(root, cwd):
        raise NoFolder(0, "no such folder")
    scratch = request["scratch"]
    assert isinstance(scratch, list)
    if scratch:
        cover_with_scratch(scratch, int(str(request["disk"])))
    live = request["live"]
    if isinstance(live, list):
        forget_afterwards(live, int(str(request["disk"])), int(str(request["shm"])))
    # In here: the number of processes is counted for this box's user namespace, not for a uid that boxes may share.
    set_limits(limits)
    filter_program = bytes.fromhex(str(request["seccomp"]))
    options += ["--seccomp", str(_memory(filter_program)), "--block-fd", str(_inheritable(block))]
    options += [
        "--json-status-fd",
        str(_inheritable(status)),
        "--bind",
        root,
        "/",
        *_mounts(int(str(request["shm"])), bool(request["judged"])),
    ]
    options += ["--chdir", cwd]
    listed = _memory(b"".join(os.fsencode(option) + b"\0" for option in options))
    for number, fd in enumerate((stdin, stdout, stderr)):
        os.dup2(fd, number)
    reset_signals()
    kernel.die_with_parent()
    if os.getppid() != fork_server:
        os._exit(1)
    announce()
    # An empty environment: bubblewrap's own stays readable in the box as /proc/1/environ.
    os.execve(bwrap, ["bwrap", "--args", str(listed), "--", *argv], {})  # noqa: S606


def _be_killed_first() -> None:
    """Where memory runs short, the judged goes before its judge."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _mounts(shm: int, judged: bool) -> list[str]:
    # Only where the box's own read-only root has the folder, never below the home directory: there, a symlink of the
    # agent's would lead bubblewrap before 0.12 out of the box.
    shared = ["--size", str(shm), "--perms", "1777", "--tmpfs", "/dev/shm"]  # noqa: S108
    terminals = ["--dev-bind", JUDGED_PTS if judged else PTS, "/dev/pts"]
    # Whoever can write to the memory of a namespace's first process decides how its command seems to have ended.
    sealed = ["--ro-bind", "/dev/null", "/proc/1/mem", "--ro-bind", "/dev/null", "/proc/1/task/1/mem"]
    # Without a name space of their own: as long as they can be read, they are the host's.
    masked = [word for name in HOST_FILES if os.access(name, os.R_OK) for word in ("--ro-bind", "/dev/null", name)]
    return ["--proc", "/proc", *sealed, *masked, "--dev", "/dev", *terminals, *shared, "--remount-ro", "/dev"]


def _memory(data: bytes) -> int:
    fd = os.memfd_create("request", 0)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _inheritable(fd: int) -> int:
    os.set_inheritable(fd, True)
    return fd
