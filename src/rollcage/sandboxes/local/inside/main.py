"""The fork server: takes requests on a socket and forks once for each. It ends with its parent, and commands too."""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rollcage.sandboxes.inside import files, kernel
from rollcage.sandboxes.inside.processes import end_all
from rollcage.sandboxes.inside.requests import connect, hand_over, listen, read_request, refusal_of
from rollcage.sandboxes.local.inside import home, judged, plain, rootfs, spawn, usage, users

MOST_BYTES = 64
_AS_ROOT = ("build", "discard")
"""What begins as root, and becomes the box's user in the course of it."""


def main() -> None:
    """Serve the socket that is standard input. Arguments: parent's pid, layer folder, bwrap's path; where we are root
    the user whose layers are, a colon, and one that a box might have, else -.
    """
    parent, layers, bwrap_path, ids = sys.argv[2:6]
    os.closerange(3, 1 << 20)
    # Descriptors on their way through sockets are counted for a uid, which boxes may share: ours must always fit.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        watch = os.pidfd_open(int(parent))
    except ProcessLookupError:
        return  # whoever started us died meanwhile
    if os.getppid() != int(parent):
        return  # as above, and another process has its number now
    control = socket.socket(fileno=0)
    os.umask(0o022)
    bwrap = os.open(bwrap_path, os.O_PATH | os.O_CLOEXEC)
    # As root, entered before the drop: the folders above it may be closed to the uid that boxes run as.
    try:
        os.chdir(layers)
    except FileNotFoundError:
        if os.getppid() != int(parent):
            return  # as above, and its folder is gone too
        raise
    own = 0
    if ids != "-":
        owner, another = map(int, ids.split(":"))
        if users.can_be_given(owner, another):
            own = owner
        else:
            users.take_on(owner)
    # The dead are reaped by the kernel, orphans of a killed bubblewrap included.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    kernel.adopt_orphans()
    # Children live for one request each, and this process makes no cycles: looking for some only dirties memory.
    gc.disable()
    gc.freeze()
    # Whoever started us may be gone already: then there is nothing to do and nobody to tell.
    with suppress(BrokenPipeError):
        control.send(b"ready own" if own else b"ready")
        _take_requests(control, watch, bwrap, own)
    # Each bubblewrap dies with us anyhow, but while it starts, what it started may not.
    end_all()


def _take_requests(control: socket.socket, watch: int, bwrap: int, own: int) -> None:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(watch, select.POLLIN)
    while watch not in dict(poll.poll()):
        message, fds = kernel.receive_fds(control, MOST_BYTES)
        if not message:
            return
        if os.fork() == 0:
            _serve(message.decode(), fds, bwrap, own)
        for fd in fds:
            os.close(fd)


def _serve(action: str, fds: list[int], bwrap: int, own: int) -> None:
    """In a child of its own, which never returns. `own`: whose layers are, where each box has a user of its own."""
    reply_fd, request_fd, *given = fds
    reply = socket.socket(fileno=reply_fd)
    fork_server = os.getppid()
    try:
        request = read_request(request_fd)
        if own and action not in _AS_ROOT:
            users.take_on(request["uid"])
        if action == "spawn":
            spawn.become(request, given, bwrap, fork_server, lambda: _say(reply, {"pid": os.getpid()}))
        answer, passed = _perform(action, request, given, own)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is for the one who asked)
        answer, passed = refusal_of(error), []
    try:
        _say(reply, answer, passed)
        if action != "join":
            reply.close()  # who asked waits for that, and need not wait until our memory is given back
    finally:
        os._exit(0)


def _say(reply: socket.socket, answer: dict[str, Any], fds: Sequence[int] = ()) -> None:
    data = json.dumps(answer).encode() + b"\n"
    sent = hand_over(reply, data, fds) if fds else 0
    reply.sendall(data[sent:])


def _perform(action: str, request: dict[str, Any], fds: Sequence[int], own: int) -> tuple[dict[str, Any], list[int]]:
    if action == "build":
        owners = rootfs.FileOwners(own, request["uid"]) if own else None
        return {"ok": True}, rootfs.build(request["layers"], rootfs.Disk.of(request), rootfs.System.of(request), owners)
    if action == "discard":
        rootfs.discard(request["folder"], own=bool(own))
        return {"ok": True}, []
    if action == "join":
        for fd in fds:
            os.write(fd, b"0")
        return {"ok": True}, []
    kernel.setns(fds[0], kernel.CLONE_NEWUSER)
    if action in ("listen", "connect"):
        kernel.setns(fds[1], kernel.CLONE_NEWNET)
        return {"ok": True}, [listen(request["port"]) if action == "listen" else connect(request["port"])]
    kernel.setns(fds[1], kernel.CLONE_NEWNS)
    if action == "read":
        return {"ok": True}, [files.open_file(rootfs.ROOT, request["path"])]
    if action == "list":
        return {"names": files.names_in(rootfs.ROOT, request["path"], request["most"])}, []
    if action == "contents":
        entries, content = plain.plain_contents(rootfs.ROOT, request["path"], request["empty"]) or ([], -1)
        return {"entries": entries}, [content] if content >= 0 else []
    if action == "divide":
        return {"ok": True}, [judged.divide(request)]
    if action == "written":
        return {"paths": home.written(request["upper"], request["since"], request["without"])}, []
    if action == "upper":
        return {"ok": True}, [home.open_upper(request["upper"])]
    if action == "usage":
        return {"bytes": usage.usage(request["first"], fds[2])}, []
    if action == "write":
        files.write_file(rootfs.ROOT, request["path"], fds[2], request["mode"])
    elif action == "checkpoint":
        home.checkpoint(home.Stack.of(request))
    elif action == "rewind":
        if request["divided"]:
            judged.remove_second_root(request)
        changed = home.rewind(home.Stack.of(request), request["keep"], request["restore"])
        home.empty_tmp(request["tmp"])
        return {"changed": changed, "kept": usage.usage() if request["brought"] else 0}, []
    return {"ok": True}, []
