"""What every program that stands over commands does: hold them to limits, give up rights, and end all they started.

Standard library only, for Python 3.8 and later.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

KILLED = 128 + signal.SIGKILL
_PAUSE_S = 0.001
_SIGNALS = ("SIGCHLD", "SIGPIPE", "SIGXFSZ", "SIGINT", "SIGTERM", "SIGHUP")


def set_limits(limits: Mapping[str, int]) -> None:
    """Hold this process, and what it becomes, to limits by name (`NOFILE`), as far as it may have them."""
    for name, wanted in limits.items():
        kind = getattr(resource, "RLIMIT_" + name)
        most = resource.getrlimit(kind)[1]
        value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
        resource.setrlimit(kind, (value, value))


def reset_signals() -> None:
    """Have signals do what a program expects of them."""
    for name in _SIGNALS:
        signal.signal(getattr(signal, name), signal.SIG_DFL)


def become_user(uid: int, gid: int) -> None:
    """Give up root for good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def exit_code(status: int) -> int:
    """What `wait` says, as an exit code; 128+n where signal n killed it."""
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def end_all(command: int = 0, harder: Callable[[int], None] | None = None) -> int:
    """Kill every descendant, and what becomes one while we do; returns when there is none.

    What loses its parent must fall to us (`kernel.adopt_orphans`). Returns the exit code of the child `command`.
    `harder`: called before each round with its number, to do what killing one by one cannot.
    """
    code, rounds = KILLED, 0
    while True:
        try:
            pid = -1
            while pid:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid and pid == command:
                    code = exit_code(status)
        except ChildProcessError:
            # Certain, unlike any list: whoever is below us has an ancestor, dead or alive, that is our child.
            return code
        if harder is not None:
            harder(rounds)
        for pid in descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        rounds += 1
        if rounds > 1:
            time.sleep(_PAUSE_S)


def descendants() -> list[int]:
    """Every process below this one."""
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
