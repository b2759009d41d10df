# ruff: noqa: PTH101, S103 (speaks to the kernel in its own terms)
"""The first process of a container: takes orders on a socket and forks once for each. The container ends with it.

It runs as root with next to no capabilities, everything an agent starts as an ordinary user with none: what runs in the
box can neither stop this process nor look into it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import secrets
import signal
import socket
import stat
import struct
import sys
from contextlib import suppress
from select import POLLIN, poll
from typing import Any

from . import kernel, supervisor

USER = 1000

_PR_CAPBSET_DROP = 24
_CAPABILITY_VERSION = 0x20080522
_KEPT = (1 << 5) | (1 << 6) | (1 << 7)  # KILL, SETGID, SETUID


class NotAFile(OSError):
    """There is something, but no regular file."""


def main() -> None:
    """Serve whoever listens at a socket until they are gone. Arguments: the socket's path, the home directory."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)
    os.umask(0o022)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    control.connect(sys.argv[1])
    try:
        _own_places(sys.argv[2])
        _give_up_capabilities()
        waking, awake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(awake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        commands = os.memfd_create("commands", os.MFD_CLOEXEC)
    except OSError as error:
        control.send(str(error).encode())
        return
    control.send(b"ready")
    _take_orders(control, waking, commands)


def _own_places(home: str) -> None:
    """Give the box's user what is mounted for it; engines differ in what they make of the owner and the rights."""
    os.chmod(home, 0o755)
    os.chown(home, USER, USER)
    for place in ("/tmp", "/var/tmp"):  # noqa: S108 (the box's own)
        os.chmod(place, 0o1777)


def _take_orders(control: socket.socket, waking: int, commands: int) -> None:
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
        _say(socket.socket(fileno=os.dup(reply)), {"error": "TooMany", "errno": error.errno, "text": text})
        return -1


def _reap(supervisors: set[int]) -> None:
    """Bury the dead. A supervisor that did not end by itself left a command behind: then nothing may go on living."""
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
    reply_fd, order_fd, *given = fds
    reply = socket.socket(fileno=reply_fd)
    code = 0
    try:
        order = json.loads(os.pread(order_fd, os.fstat(order_fd).st_size, 0))
        os.close(order_fd)
        if action == "spawn":
            code = supervisor.supervise(order, given, commands, USER, lambda: _say(reply, {"ok": True}))
        else:
            body, passed = _obey(action, order, given)
            _say(reply, body, passed)
    except OSError as error:
        _say(reply, {"error": type(error).__name__, "errno": error.errno, "text": error.strerror or str(error)})
    except Exception as error:  # noqa: BLE001 (whatever it is, it is for the one who asked)
        _say(reply, {"error": type(error).__name__, "errno": 0, "text": str(error)})
    finally:
        os._exit(code)


def _say(reply: socket.socket, answer: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    data = json.dumps({"step": "", **answer}).encode()
    with suppress(OSError), reply:  # nobody waits for it any more
        if fds:
            socket.send_fds(reply, [data], fds)
        else:
            reply.send(data)


def _obey(action: str, order: dict[str, Any], fds: list[int]) -> tuple[dict[str, Any], tuple[int, ...]]:
    # Effective only: what the box's user started may not kill a process whose real user is another.
    os.setgroups([])
    os.setegid(USER)
    os.seteuid(USER)
    if action == "listen":
        return {"ok": True}, (_listen(order["port"]),)
    if action == "read":
        return {"ok": True}, (_open_file(order["path"]),)
    if action == "write":
        _write_file(order["path"], fds[0], order["mode"])
    elif action == "furnish":
        from . import furnish  # not before: most of what it needs, nothing else here does

        furnish.furnish(order["layers"], order["home"])
        return {"bounds": furnish.bounds()}, ()
    return {"ok": True}, ()


def _listen(port: int) -> int:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    return listener.detach()


def _open_file(path: str) -> int:
    """A descriptor of a regular file. Opened only once known to be one: a FIFO would hang, a device might act."""
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = kernel.open_in(root, path, os.O_PATH)
    except kernel.Refused as refused:
        if refused.errno != errno.EACCES:
            raise
        raise NotAFile(0, "not within reach of the box's user") from refused
    if not stat.S_ISREG(os.fstat(found).st_mode):
        raise NotAFile(0, "not a regular file")
    opened = kernel.open_in(root, path, os.O_RDONLY | os.O_NONBLOCK)
    if not os.path.sameopenfile(found, opened):
        raise NotAFile(0, "it was replaced while it was opened")
    return opened


def _write_file(path: str, data: int, mode: int) -> None:
    """Put the content of the descriptor `data` at `path`, whole or not at all, whatever stood there before."""
    above, _, name = path.rstrip("/").rpartition("/")
    if not name or name in (".", ".."):
        raise NotAFile(0, "not the path of a file")
    folder = _open_folder(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC), above or "/")
    draft = f".{secrets.token_hex(8)}"
    target = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    try:
        size, done = os.fstat(data).st_size, 0
        while done < size:
            done += os.sendfile(target, data, done, size - done)
        os.fchmod(target, mode)
        os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        with suppress(OSError):
            os.unlink(draft, dir_fd=folder)
        raise


def _open_folder(root: int, path: str) -> int:
    """Open a folder for work in it, making it and those above it where they are missing."""
    try:
        return kernel.open_in(root, path, os.O_RDONLY | os.O_DIRECTORY)
    except kernel.Refused as refused:
        above, _, name = path.rstrip("/").rpartition("/")
        if refused.errno != errno.ENOENT or not name:
            raise
        parent = _open_folder(root, above or "/")
        with suppress(FileExistsError):
            os.mkdir(name, 0o755, dir_fd=parent)
        return kernel.open_in(root, path, os.O_RDONLY | os.O_DIRECTORY)


def _give_up_capabilities() -> None:
    """Keep what it takes to become the box's user and to kill; no program started from here can ever have more."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(64):
        if libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
            break
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    data = struct.pack("=6I", _KEPT, _KEPT, 0, 0, 0, 0)
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "cannot give up capabilities")
