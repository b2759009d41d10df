"""Stands over one command in a container: starts it, waits for its end, and sees to it that nothing of it lives on.

Commands of a container share one space of process ids. What loses its parent falls to the nearest supervisor above it,
so a command's supervisor is an ancestor of everything the command ever started.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from select import POLLIN, poll
from typing import Any

from rollcage.sandboxes.inside import division, kernel
from rollcage.sandboxes.inside.processes import become_user, end_all, reset_signals, set_limits
from rollcage.sandboxes.inside.requests import NoFolder

PATIENCE = 500
"""Rounds of killing one by one, beside other commands, before all commands of the box are killed at once."""
_PROGRAM = "/usr/bin/env"
"""Starts the command: it knows the search path, scripts without a first line, and the usual 126 and 127."""


def supervise(request: dict[str, Any], fds: list[int], commands: int, user: int, started: Callable[[], None]) -> int:
    """Run one command to its end. `fds`: stdin, stdout, stderr, and a status socket whose other end our process holds.

    The exit code is sent along the status socket once all is dead. If its other end is closed, the command is killed.
    `commands`: a file that each supervisor holds a shared lock on; who gets it alone may kill all of the user's.
    """
    *stdio, status_fd = fds
    status = socket.socket(fileno=status_fd)
    kernel.adopt_orphans()
    hold = os.open(f"/proc/self/fd/{commands}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(hold, fcntl.LOCK_SH)
    complaints, telling = os.pipe2(os.O_CLOEXEC)
    child = os.fork()
    if child == 0:
        _become(request, stdio, telling, user)
    for fd in (*stdio, telling):
        os.close(fd)
    if complaint := os.read(complaints, 4096):
        os.waitpid(child, 0)
        raise NoFolder(0, complaint.decode())
    started()
    wait = poll()
    wait.register(os.pidfd_open(child), POLLIN)
    wait.register(status, POLLIN)
    wait.poll()
    # Killing one by one may lose against what forks; all of the user's at once do not.
    code = end_all(child, lambda rounds: sweep(user) if _alone(hold) or rounds > PATIENCE else None)
    with suppress(OSError):
        status.send(json.dumps({"exit": code}).encode())
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


def _alone(hold: int) -> bool:
    """Whether no other command runs; then none can start before we have ended."""
    try:
        fcntl.flock(hold, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # The shared lock is lost by trying. Whoever has it alone now kills ours too, which is what we want.
        return False
    return True


def _become(request: dict[str, Any], stdio: list[int], telling: int, user: int) -> None:
    """Turn into the command. Never returns."""
    try:
        os.setsid()
        # Where memory runs out, a command dies and not what stands over it.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000" if request["judged"] else "500")
        if not request["network"]:
            kernel.unshare(kernel.CLONE_NEWNET, "make a network")
        if request["scratch"]:
            division.use_scratch(request["scratch"], request["disk"], user)
        if request["live"] is not None:
            division.forget_afterwards(request, user)
        become_user(user, user)
        set_limits(request["limits"])
        try:
            os.chdir(request["cwd"])
        except OSError:
            os.write(telling, f"no such folder in the box: {request['cwd']}".encode())
            os._exit(1)
        # Descriptors come in with numbers of their own, all above 2.
        for number, fd in enumerate(stdio):
            os.dup2(fd, number)
        reset_signals()
        for program in request["filters"]:
            kernel.filter_calls(bytes.fromhex(program))
        os.execve(_PROGRAM, ["env", "--", *request["argv"]], request["env"])  # noqa: S606
    except BaseException as error:  # noqa: BLE001 (there is nobody else to tell)
        os.write(telling, str(error).encode()[:4096])
    finally:
        os._exit(1)
