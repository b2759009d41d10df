# ruff: noqa: PTH103, PTH108, PTH110, PTH123, PTH208 (speaks to the kernel in its own terms)
"""Starts one command in a virtual machine that is a box, and sees to it that nothing of the command outlives it.

Standard library only, for Python 3.8 and later; its text is handed to `python3 -c`. The order comes first on standard
input (its length, then JSON); what follows there is the command's. One line of JSON says how the start went; what
follows on standard output and error is the command's, each byte as the character of that number, as UTF-8: whoever
carries it takes it for text. The exit code is the command's, 128+n where signal n killed it.

As root: the command runs as an ordinary user that can never become root, in a process table of its own that dies with
us, in a network that all commands of the box share and that has nothing but a loopback. Not as root, it is merely found
and killed at the end with everything that it started, wherever that went.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pwd
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

STATE = "/run/rollcage"
"""Where root keeps the box's network."""
_NEWNS, _NEWIPC, _NEWPID, _NEWNET = 0x20000, 0x8000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _NOSUID_NODEV_NOEXEC = 0x1000, 0x4000, 1 << 18, 2 | 4 | 8
_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38
_CHUNK = 1 << 16
_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the order, start the command, pass its output on, end as it ended."""
    (length,) = struct.unpack("!I", _exactly(4))
    order = json.loads(_exactly(length))
    root, missing = os.geteuid() == 0, []
    apart = False
    if root:
        with suppress(KeyError):
            order["uid"], order["gid"] = pwd.getpwnam("user")[2:4]
        missing += _attempt("network: commands share the machine's own", _join_network)
        lost = _attempt("processes: commands share one process table", _separate)
        missing, apart = missing + lost, not lost
    else:
        missing.append("root: commands are killed one by one")
    if not apart:
        _call("prctl", _SUBREAPER, 1, 0, 0, 0)
    (started_r, started_w), (code_r, code_w) = os.pipe(), os.pipe()
    (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe()
    parent = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        for fd in (started_r, code_r, out_r, err_r):
            os.close(fd)
        _keep(order, (out_w, err_w, started_w, code_w), parent, apart)
    for fd in (0, started_w, code_w, out_w, err_w):
        os.close(fd)
    said = b"".join(iter(lambda: os.read(started_r, _CHUNK), b""))
    answer = {"missing": missing, "refused": said.decode("utf-8", "replace")}
    os.write(1, json.dumps(answer).encode() + b"\n")
    if not said:
        _pass_on({out_r: 1, err_r: 2})
    code = os.read(code_r, 16)
    os.waitpid(keeper, 0)
    _end_all()
    os._exit(int(code) if code else 128 + signal.SIGKILL)


def _exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(0, count - len(data))
        if not piece:
            os._exit(125)
        data += piece
    return data


def _pass_on(pipes: dict[int, int]) -> None:
    poll = select.poll()
    for pipe in pipes:
        poll.register(pipe, select.POLLIN)
    while pipes:
        for fd, _ in poll.poll():
            data = os.read(fd, _CHUNK)
            if not data:
                poll.unregister(fd)
                del pipes[fd]
                continue
            view = memoryview(data if data.isascii() else data.decode("latin-1").encode())
            while view:
                view = view[os.write(pipes[fd], view) :]


# The keeper: the first process of the command's own table, or what comes closest.


def _keep(order: dict[str, Any], pipes: tuple[int, int, int, int], parent: int, apart: bool) -> NoReturn:
    out, err, started, code_pipe = pipes
    try:
        if apart:
            _call("prctl", _PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            _call("mount", b"proc", b"/proc", b"proc", _NOSUID_NODEV_NOEXEC, None)
        else:
            # Killed, it could not kill what the command started: so it is asked.
            signal.signal(signal.SIGTERM, _end_all_and_exit)
            _call("prctl", _PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            _call("prctl", _SUBREAPER, 1, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
        command = os.fork()
        if command == 0:
            _become(order, out, err, started)
        for fd in (0, 1, 2, out, err, started):
            os.close(fd)
        while True:
            pid, status = os.wait()
            if pid == command:
                break
        if not apart:
            _end_all()
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
        os.write(code_pipe, b"%d" % code)
    finally:
        os._exit(0)


def _become(order: dict[str, Any], out: int, err: int, started: int) -> NoReturn:
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        with suppress(AttributeError):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.umask(0o022)
        for name, wanted in order["limits"].items():
            kind = getattr(resource, "RLIMIT_" + name)
            most = resource.getrlimit(kind)[1]
            value = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
            resource.setrlimit(kind, (value, value))
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(*[order["gid"]] * 3)
            os.setresuid(*[order["uid"]] * 3)
        # No sudo: it could undo all of this.
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        try:
            os.chdir(order["cwd"])
        except OSError:
            _refuse(started, "no such folder in the box: " + order["cwd"])
        os.dup2(out, 1)
        os.dup2(err, 2)
        _execute(order["argv"], order["env"], started)
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is for the one who asked)
        _refuse(started, f"{type(error).__name__}: {error}")


def _execute(argv: list[str], env: dict[str, str], started: int) -> NoReturn:
    words = [os.fsencode(word) for word in argv]
    variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
    try:
        os.execvpe(words[0], words, variables)  # noqa: S606
    except OSError as error:
        if error.errno == 7:  # too long for the kernel: that is for the one who asked
            _refuse(started, str(error.strerror))
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode("utf-8", "replace"))
        os._exit(127 if isinstance(error, (FileNotFoundError, NotADirectoryError)) else 126)


def _refuse(started: int, why: str) -> NoReturn:
    os.write(started, why.encode("utf-8", "replace")[:2000])
    os._exit(125)


def _end_all(*_: object) -> None:
    """Kill every descendant, and what becomes one while we do."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _end_all_and_exit(*_: object) -> None:
    _end_all()
    os._exit(0)


def _children() -> list[int]:
    mine, found = str(os.getpid()).encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if parent == mine and state not in b"ZX":
                found.append(int(name))
    return found


# What only root can do.


def _attempt(name: str, step: Any) -> list[str]:
    try:
        step()
    except OSError as error:
        return [f"{name} ({error.strerror})"]
    return []


def _separate() -> None:
    """The next process we fork is the first of a process table of its own."""
    _call("unshare", _NEWNS | _NEWIPC | _NEWPID)
    _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)


def _join_network() -> None:
    """Enter the network of this box; the first command makes it."""
    os.makedirs(STATE, 0o700, exist_ok=True)
    place = STATE + "/net"
    lock = os.open(STATE + "/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(place):
            _make_network(place)
    finally:
        os.close(lock)
    fd = os.open(place, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", fd, _NEWNET)
    finally:
        os.close(fd)


def _make_network(place: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            _call("unshare", _NEWNET)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # up and running
            os.close(os.open(place, os.O_RDWR | os.O_CREAT, 0o600))
            _call("mount", b"/proc/self/ns/net", place.encode(), None, _MS_BIND, None)
            os._exit(0)
        except OSError as error:
            with suppress(OSError):
                os.unlink(place)
            os._exit(error.errno or 1)
    code = os.WEXITSTATUS(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    main()
    sys.exit(0)
