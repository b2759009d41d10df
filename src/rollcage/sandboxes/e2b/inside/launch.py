"""Starts one command in a virtual machine that is a box, and sees to it that nothing of the command outlives it.

Standard library only, for Python 3.8 and later; its text, with that of the modules it uses, is handed to `python3 -c`.
The request comes first on standard input (its length, then JSON); what follows there is the command's. One line of JSON
says how the start went; what follows on standard output and error is the command's, each byte as the character of that
number, as UTF-8: whoever carries it takes it for text. The exit code is the command's, 128+n where signal n killed it.

As root: the command runs as an ordinary user that can never become root, in a process table of its own that dies with
us, in a network that all commands of the box share and that has nothing but a loopback. Not as root, it is merely found
and killed at the end with everything that it started, wherever that went.
"""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import select
import signal
import struct
import sys
from contextlib import suppress
from typing import Any, NoReturn

from rollcage.sandboxes.inside.kernel import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    adopt_orphans,
    die_with_parent,
    gain_nothing,
    loopback_up,
    mount,
    setns,
    unshare,
)
from rollcage.sandboxes.inside.processes import KILLED, become_user, end_all, exit_code, reset_signals, set_limits

STATE = "/run/rollcage"
"""Where root keeps the box's network."""
_CHUNK = 1 << 16


def main() -> None:
    """Read the request, start the command, pass its output on, end as it ended."""
    request = read_request()
    root, missing = os.geteuid() == 0, []
    apart = False
    if root:
        user_of(request)
        missing += _attempt("network: commands share the machine's own", join_network)
        _enter_side(request)
        lost = _attempt("processes: commands share one process table", _separate)
        missing, apart = missing + lost, not lost
    else:
        missing.append("root: commands are killed one by one")
    if not apart:
        adopt_orphans()
    (out_r, out_w), (err_r, err_w) = os.pipe(), os.pipe()
    supervisor, started_r, code_r = _fork(request, (0, out_w, err_w), (out_r, err_r), apart)
    for fd in (0, out_w, err_w):
        os.close(fd)
    said = b"".join(iter(lambda: os.read(started_r, _CHUNK), b""))
    answer = {"apart": apart, "missing": missing, "refused": said.decode("utf-8", "replace")}
    os.write(1, json.dumps(answer).encode() + b"\n")
    if not said:
        _pass_on({out_r: 1, err_r: 2})
    code = os.read(code_r, 16)
    os.waitpid(supervisor, 0)
    end_all()
    os._exit(int(code) if code else KILLED)


def read_request() -> dict[str, Any]:
    """What comes first on standard input."""
    (length,) = struct.unpack("!I", _exactly(4))
    request: dict[str, Any] = json.loads(_exactly(length))
    return request


def user_of(request: dict[str, Any]) -> int:
    """Have the request name the machine's own `user`, where there is one; returns who it names."""
    with suppress(KeyError):
        request["uid"], request["gid"] = pwd.getpwnam("user")[2:4]
    return int(request["uid"])


def start(request: dict[str, Any], streams: tuple[int, int, int]) -> tuple[int, int, int]:
    """As root, in the box's network: start a command on a side of a divided box, with these streams.

    Returns its supervisor, whose death it does not outlive, and where is said why it was not started, and how it ended.
    """
    user_of(request)
    _enter_side(request)
    _separate()
    return _fork(request, streams, (), apart=True)


def _fork(
    request: dict[str, Any], streams: tuple[int, int, int], others: tuple[int, ...], apart: bool
) -> tuple[int, int, int]:
    (started_r, started_w), (code_r, code_w) = os.pipe(), os.pipe()
    parent = os.getpid()
    supervisor = os.fork()
    if supervisor == 0:
        for fd in (started_r, code_r, *others):
            os.close(fd)
        if streams[0]:
            os.dup2(streams[0], 0)
        _supervise(request, (streams[1], streams[2], started_w, code_w), parent, apart)
    for fd in (started_w, code_w):
        os.close(fd)
    return supervisor, started_r, code_r


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


# The supervisor: the first process of the command's own table, or what comes closest.


def _supervise(request: dict[str, Any], pipes: tuple[int, int, int, int], parent: int, apart: bool) -> NoReturn:
    out, err, started, code_pipe = pipes
    try:
        if apart:
            die_with_parent()
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        else:
            # Killed, it could not kill what the command started: so it is asked.
            signal.signal(signal.SIGTERM, _end_all_and_exit)
            die_with_parent(signal.SIGTERM)
            adopt_orphans()
            if os.getppid() != parent:
                os._exit(1)
        command = os.fork()
        if command == 0:
            _become(request, out, err, started)
        for fd in {0, 1, 2, out, err, started}:
            os.close(fd)
        while True:
            pid, status = os.wait()
            if pid == command:
                break
        if not apart:
            end_all()
        os.write(code_pipe, b"%d" % exit_code(status))
    finally:
        os._exit(0)


def _become(request: dict[str, Any], out: int, err: int, started: int) -> NoReturn:
    try:
        os.setsid()
        reset_signals()
        os.umask(0o022)
        _prepare_side(request)
        set_limits(request["limits"])
        if os.geteuid() == 0:
            become_user(request["uid"], request["gid"])
        # No sudo: it could undo all of this.
        gain_nothing()
        try:
            os.chdir(request["cwd"])
        except OSError:
            _refuse(started, "no such folder in the box: " + request["cwd"])
        os.dup2(out, 1)
        os.dup2(err, 2)
        _execute(request["argv"], request["env"], started)
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


def _end_all_and_exit(*_: object) -> None:
    end_all()
    os._exit(0)


# What only root can do.


def _attempt(name: str, step: Any) -> list[str]:
    try:
        step()
    except OSError as error:
        return [f"{name} ({error.strerror})"]
    return []


def _enter_side(request: dict[str, Any]) -> None:
    """In a divided box: have the mounts of the judge's side, or of the judged's."""
    side = request.get("side")
    if not side:
        return
    fd = os.open(side["mounts"], os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(fd, CLONE_NEWNS)
    finally:
        os.close(fd)
    if not side["network"]:
        unshare(CLONE_NEWNET, "make a network")
        loopback_up()


def _prepare_side(request: dict[str, Any]) -> None:
    """What a command of a divided box has to itself: a copy of the work, or all that it writes outside of it."""
    side = request.get("side")
    if not side:
        return
    from rollcage.sandboxes.inside import division  # not before: only divided boxes need it

    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000" if side["judged"] else "500")
    if side["scratch"]:
        division.use_scratch(side["scratch"], side["disk"], request["uid"])
    if side["live"] is not None:
        division.forget_afterwards(side, request["uid"])


def _separate() -> None:
    """The next process we fork is the first of a process table of its own."""
    unshare(CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWPID, "make a process table")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def join_network() -> None:
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
        setns(fd, CLONE_NEWNET)
    finally:
        os.close(fd)


def _make_network(place: str) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            unshare(CLONE_NEWNET, "make a network")
            loopback_up()
            os.close(os.open(place, os.O_RDWR | os.O_CREAT, 0o600))
            mount("/proc/self/ns/net", place, flags=MS_BIND)
            os._exit(0)
        except OSError as error:
            with suppress(OSError):
                os.unlink(place)
            os._exit(error.errno or 1)
    code = os.WEXITSTATUS(os.waitpid(pid, 0)[1])
    if code:
        raise OSError(code, os.strerror(code))


if __name__ == "__main__":
    main()
    sys.exit(0)
