# ruff: noqa: PTH123, PTH208 (speaks to the kernel in its own terms)
"""Stands over one command in a container: starts it, waits for its end, and sees to it that nothing of it lives on.

Commands of a container share one space of process ids. What loses its parent falls to the nearest supervisor above it,
so a command's supervisor is an ancestor of everything the command ever started.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from select import POLLIN, poll
from typing import Any

from . import kernel

PATIENCE = 500
"""Rounds of killing one by one, beside other commands, before all commands of the box are killed at once."""
_PROGRAM = "/usr/bin/env"
"""Starts the command: it knows the search path, scripts without a first line, and the usual 126 and 127."""
_PAUSE_S = 0.002
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_FILTER = 2


class NoFolder(OSError):
    """The command's working directory is not in the box."""


def supervise(order: dict[str, Any], fds: list[int], commands: int, user: int, started: Callable[[], None]) -> int:
    """Run one command to its end. `fds`: stdin, stdout, stderr, and a leash whose other end is ours.

    The exit code goes along the leash once all is dead. If the leash is let go of, the command is killed.
    `commands`: a file that each supervisor holds a shared lock on; who gets it alone may kill all of the user's.
    """
    *stdio, leash_fd = fds
    leash = socket.socket(fileno=leash_fd)
    kernel.adopt_orphans()
    hold = os.open(f"/proc/self/fd/{commands}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(hold, fcntl.LOCK_SH)
    told, telling = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(order, stdio, telling, user)
    for fd in (*stdio, telling):
        os.close(fd)
    if complaint := os.read(told, 4096):
        os.waitpid(child, 0)
        raise NoFolder(0, complaint.decode())
    started()
    wait = poll()
    wait.register(os.pidfd_open(child), POLLIN)
    wait.register(leash, POLLIN)
    wait.poll()
    code = _end(child, hold, user)
    with suppress(OSError):
        leash.send(json.dumps({"exit": code}).encode())
    return 0


def sweep(user: int) -> None:
    """Kill every process of the box's user in one stroke, which no fork can slip through and which needs no fork."""
    # Root may kill more than that, so for the stroke we are the user, and can be root again.
    os.setresuid(user, user, 0)
    try:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    finally:
        os.setresuid(0, 0, 0)


def _end(child: int, hold: int, user: int) -> int:
    """Kill the command and everything below us until there is nothing left; the command's exit code."""
    code = 128 + signal.SIGKILL
    rounds = 0
    while True:
        try:
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                if reaped[0] == child:
                    ended = os.waitstatus_to_exitcode(reaped[1])
                    code = ended if ended >= 0 else 128 - ended
        except ChildProcessError:
            # Certain, unlike any list: whoever is below us has an ancestor, dead or alive, that is our child.
            return code
        if _alone(hold) or rounds > PATIENCE:
            sweep(user)
        for pid in _descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        rounds += 1
        if rounds > 1:
            time.sleep(_PAUSE_S)


def _alone(hold: int) -> bool:
    """Whether no other command runs; then none can start before we have ended."""
    try:
        fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # The shared lock is lost by trying. Whoever has it alone now kills ours too, which is what we want.
        return False
    return True


def _descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    below = [os.getpid()]
    while below:
        nearer = children.get(below.pop(), [])
        found += nearer
        below += nearer
    return found


def _become_user(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _become(order: dict[str, Any], stdio: list[int], telling: int, user: int) -> None:
    """Turn into the command. Never returns."""
    try:
        os.setsid()
        # Where memory runs out, a command dies and not what stands over it.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")
        _become_user(user)
        for name, wanted in order["limits"].items():
            kind = getattr(resource, f"RLIMIT_{name}")
            _, most = resource.getrlimit(kind)
            value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
            resource.setrlimit(kind, (value, value))
        try:
            os.chdir(order["cwd"])
        except OSError:
            os.write(telling, f"no such folder in the box: {order['cwd']}".encode())
            os._exit(1)
        # Descriptors come in with numbers of their own, all above 2.
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        for name in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(name, signal.SIG_DFL)
        for program in order["filters"]:
            _filter(bytes.fromhex(program))
        os.execve(_PROGRAM, ["env", "--", *order["argv"]], order["env"])  # noqa: S606
    except BaseException as error:  # noqa: BLE001 (there is nobody else to tell)
        os.write(telling, str(error).encode()[:4096])
    finally:
        os._exit(1)


def _filter(program: bytes) -> None:
    """Bar system calls for good, on top of those that are barred already."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]

    libc = ctypes.CDLL(None, use_errno=True)
    wanted = Program(len(program) // 8, program)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(wanted), 0, 0):
        raise OSError(ctypes.get_errno(), "the system call filter was refused")
