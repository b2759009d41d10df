"""The first process of a container: takes requests on a socket and forks once for each. The container ends with it.

It runs as root with next to no capabilities, everything an agent starts as an ordinary user with none: what runs in the
box can neither stop this process nor look into it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from select import POLLIN, poll
from typing import Any

from rollcage.sandboxes.container.inside import supervisor
from rollcage.sandboxes.inside import division, files, kernel
from rollcage.sandboxes.inside.requests import hand_over, listen, read_request, refusal_of

USER = 1000

_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION = 0x20080522
_SYS_ADMIN = 1 << 21
_KEPT = (1 << 5) | (1 << 6) | (1 << 7) | _SYS_ADMIN  # KILL, SETGID, SETUID


def main() -> None:
    """Serve whoever listens at a socket until they are gone. Arguments: the socket's path, the home directory."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    os.umask(0o022)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    control.connect(sys.argv[1])
    try:
        _own_places(sys.argv[2])
        with suppress(OSError):  # an engine that bars mounts
            division.hide_host()
        _give_up_capabilities()
    except OSError as error:
        control.send(str(error).encode())
        return
    serve(control)


def serve(control: socket.socket) -> None:
    """Take requests until nobody is there any more."""
    try:
        waking, awake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(awake, warn_on_full_buffer=False)
        commands = os.memfd_create("commands", os.MFD_CLOEXEC)
    except OSError as error:
        control.send(str(error).encode())
        return
    control.send(b"ready")
    _take_requests(control, waking, commands)


def _own_places(home: str) -> None:
    """Give the box's user what is mounted for it; engines differ in what they make of the owner and the rights."""
    os.chmod(home, 0o755)  # noqa: S103 (in the box)
    os.chown(home, USER, USER)
    for place in ("/tmp", "/var/tmp"):  # noqa: S108 (the box's own)
        os.chmod(place, 0o1777)  # noqa: S103 (in the box)


def _take_requests(control: socket.socket, waking: int, commands: int) -> None:
    wait = poll()
    wait.register(control, POLLIN)
    wait.register(waking, POLLIN)
    supervisors: set[int] = set()
    while True:
        ready = dict(wait.poll())
        if waking in ready:
            os.read(waking, 4096)
            _reap(supervisors)
        if control.fileno() not in ready:
            continue
        try:
            message, fds = kernel.receive_fds(control, 64)
        except ConnectionError:
            return
        if not message:
            return
        child = _forked(fds[0])
        if child == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            control.close()
            _serve(message.decode(), fds, commands)
        if message == b"sweep":
            supervisor.sweep(USER)
        elif message == b"spawn" and child > 0:
            supervisors.add(child)
        for fd in fds:
            os.close(fd)


def _forked(reply: int) -> int:
    """As fork; -1 where the box has as many processes as it may have, which is then the answer."""
    try:
        return os.fork()
    except OSError as error:
        text = f"the box has as many processes as it may have ({error.strerror})"
        _say(socket.socket(fileno=os.dup(reply)), {**refusal_of(error), "text": text})
        return -1


def _reap(supervisors: set[int]) -> None:
    """Reap the dead. A supervisor that did not end by itself left a command behind: then nothing may go on living."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in supervisors:
                supervisors.discard(pid)
                if status:
                    supervisor.sweep(USER)


def _serve(action: str, fds: list[int], commands: int) -> None:
    """In a child of its own, which never returns."""
    reply_fd, request_fd, *given = fds
    reply = socket.socket(fileno=reply_fd)
    code = 0
    try:
        request = read_request(request_fd)
        os.close(request_fd)
        if action == "spawn":
            code = supervisor.supervise(request, given, commands, USER, lambda: _say(reply, {"ok": True}))
        else:
            body, passed = _perform(action, request, given)
            _say(reply, body, passed)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is for the one who asked)
        _say(reply, refusal_of(error))
    finally:
        os._exit(code)


def _say(reply: socket.socket, answer: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    data = json.dumps(answer).encode()
    with suppress(OSError), reply:  # nobody waits for it any more
        if fds:
            hand_over(reply, data, fds)
        else:
            reply.send(data)


def _perform(action: str, request: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], tuple[int, ...]]:
    if action == "divide":
        return {"ok": True}, division.divide(request, USER, serve)
    # Effective only: what the box's user started may not kill a process whose real user is another.
    os.setgroups([])
    os.setegid(USER)
    os.seteuid(USER)
    if action == "listen":
        return {"ok": True}, (listen(request["port"]),)
    if action == "read":
        return {"ok": True}, (files.open_file("/", request["path"]),)
    if action == "write":
        files.write_file("/", request["path"], fds[0], request["mode"])
    elif action == "populate_home":
        from rollcage.sandboxes.container.inside import home  # not before: nothing else needs most of what it needs

        home.populate_home(request["layers"], request["home"])
        return {"bounds": home.bounds(), "divides": _may_mount()}, ()
    return {"ok": True}, ()


def _may_mount() -> bool:
    """Whether the engine gave us what it takes to divide the box."""
    with open("/proc/self/status") as file:
        permitted = next(int(line.split()[1], 16) for line in file if line.startswith("CapPrm:"))
    return bool(permitted & _SYS_ADMIN)


def _give_up_capabilities() -> None:
    """Keep what it takes to become the box's user, to kill and to divide the box, as far as the engine gave it; no
    program started from here can ever have more.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    given = ctypes.create_string_buffer(24)
    if libc.capget(header, given):
        raise OSError(ctypes.get_errno(), "cannot see capabilities")
    kept = _KEPT & struct.unpack("=6I", given.raw)[1]
    data = struct.pack("=6I", kept, kept, 0, 0, 0, 0)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "cannot give up capabilities")
