# ruff: noqa: PTH123, PTH208 (speaks to the kernel in its own terms)
"""The keeper: takes orders on a socket and forks once for each. It ends, and all commands with it, with its parent."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from . import files, home, kernel, spawn, usage, world

MOST_BYTES = 64


def main() -> None:
    """Serve the socket that is standard input. Arguments: parent's pid, layer folder, bwrap's path, uid or -."""
    parent, layers, bwrap_path, uid = sys.argv[2:6]
    os.closerange(3, 1 << 20)
    # Descriptors on their way through sockets are counted for the uid that all boxes share: ours must always fit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    watch = os.pidfd_open(int(parent))
    control = socket.socket(fileno=0)
    os.setsid()
    os.umask(0o022)
    bwrap = os.open(bwrap_path, os.O_PATH | os.O_CLOEXEC)
    # As root, entered before the drop: the folders above it may be closed to the uid that boxes run as.
    os.chdir(layers)
    if uid != "-":
        _drop_to(int(uid))
    # The dead are reaped by the kernel, orphans of a killed bubblewrap included.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    kernel.adopt_orphans()
    gc.freeze()
    # Whoever started us may be gone already: then there is nothing to do and nobody to tell.
    with suppress(BrokenPipeError):
        control.send(b"ready")
        _take_orders(control, watch, bwrap)
    _end_all()


def _take_orders(control: socket.socket, watch: int, bwrap: int) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(watch, select.POLLIN)
    while watch not in dict(poll.poll()):
        message, fds = kernel.receive_fds(control, MOST_BYTES)
        if not message:
            return
        if os.fork() == 0:
            _serve(message.decode(), fds, bwrap)
        for fd in fds:
            os.close(fd)


def _end_all() -> None:
    """Kill every descendant. Each bubblewrap dies with us anyhow, but while it starts, what it started may not."""
    while children := _children():
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.001)


def _children() -> list[int]:
    mine, found = str(os.getpid()).encode(), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if parent == mine and state not in b"ZX":
                found.append(int(name))
    return found


def _drop_to(uid: int) -> None:
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.own_proc_entries()


def _serve(action: str, fds: list[int], bwrap: int) -> None:
    """In a child of its own, which never returns."""
    reply_fd, order_fd, *given = fds
    reply = socket.socket(fileno=reply_fd)
    keeper = os.getppid()
    try:
        order = json.loads(os.pread(order_fd, os.fstat(order_fd).st_size, 0))
        if action == "spawn":
            spawn.become(order, given, bwrap, keeper, lambda: _say(reply, {"pid": os.getpid()}))
        answer, passed = _obey(action, order, given)
    except OSError as error:
        answer, passed = {"error": type(error).__name__, "errno": error.errno, "text": error.strerror}, []
        answer["step"] = getattr(error, "step", "")
    except Exception as error:  # noqa: BLE001 (whatever it is, it is for the one who asked)
        answer, passed = {"error": type(error).__name__, "errno": 0, "text": str(error), "step": ""}, []
    try:
        _say(reply, answer, passed)
    finally:
        os._exit(0)


def _say(reply: socket.socket, answer: dict[str, Any], fds: Sequence[int] = ()) -> None:
    data = json.dumps(answer).encode() + b"\n"
    sent = socket.send_fds(reply, [data], fds) if fds else 0
    reply.sendall(data[sent:])


def _obey(action: str, order: dict[str, Any], fds: Sequence[int]) -> tuple[dict[str, Any], list[int]]:
    if action == "build":
        return {"ok": True}, world.build(order["layers"], world.Disk.of(order), world.System.of(order))
    if action == "discard":
        world.discard(order["folder"])
        return {"ok": True}, []
    if action == "join":
        for fd in fds:
            os.write(fd, b"0")
        return {"ok": True}, []
    kernel.setns(fds[0], kernel.CLONE_NEWUSER)
    if action == "listen":
        kernel.setns(fds[1], kernel.CLONE_NEWNET)
        return {"ok": True}, [_listen(order["port"])]
    kernel.setns(fds[1], kernel.CLONE_NEWNS)
    if action == "read":
        return {"ok": True}, [files.open_file(order["path"])]
    if action == "upper":
        return {"ok": True}, [home.open_upper(order["upper"])]
    if action == "usage":
        return {"bytes": usage.usage(order["first"], fds[2])}, []
    if action == "write":
        files.write_file(order["path"], fds[2], order["mode"])
    elif action == "checkpoint":
        home.checkpoint(home.Stack.of(order))
    elif action == "rewind":
        changed = home.rewind(home.Stack.of(order), order["keep"])
        home.empty_tmp(order["tmp"])
        return {"changed": changed, "kept": usage.usage() if order["brought"] else 0}, []
    return {"ok": True}, []


def _listen(port: int) -> int:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(512)
    return listener.detach()
