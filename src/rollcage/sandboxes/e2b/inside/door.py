"""Divides a virtual machine that is a box, and launches what its judge asks for as the judged.

It runs as root for as long as the box is divided. Its own mounts are the judge's: commands of the judge's join them. A
child of it holds those of the judged. Orders of the launcher `untrusted` are served here, in the box. The request comes
first on standard input; when that ends, everything launched is killed, and the mounts stay. One line of JSON says how
it went; then one character is printed for every command that was launched. For Python 3.9 and later.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

from rollcage.sandboxes.e2b.inside import launch
from rollcage.sandboxes.inside import division
from rollcage.sandboxes.inside.kernel import (
    CLONE_NEWNS,
    MS_NODEV,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    die_with_parent,
    mount,
    receive_fds,
    unshare,
)
from rollcage.sandboxes.inside.orders import ASK_S, MOST_AT_ONCE, OrderTerms, take_order
from rollcage.sandboxes.inside.processes import KILLED

_LAUNCHED = b"+"
_TIMED_OUT = 124
_FLAGS = MS_NOSUID | MS_NODEV


def main() -> None:
    """Read the request, divide the box, and serve the launcher."""
    request = launch.read_request()
    refused = ""
    holder = listener = -1
    try:
        if os.geteuid() != 0:
            raise PermissionError(0, "the machine gives us no root")
        user = launch.user_of(request)
        launch.join_network()  # before the mounts change: what leads to it is out of the judge's sight
        holder = _hold_judged(request, user)
        _own_mounts()
        # The machine's own /run is none of the judge's business; the launcher is put there.
        mount("tmpfs", "/run", "tmpfs", _FLAGS, f"mode=0755,size={1 << 20}")
        listener = division.prepare_judge(request, user)
    except OSError as error:
        refused = f"{getattr(error, 'step', '')} {error.strerror or error}".strip()
    told = {"missing": [], "refused": refused, "judge": os.getpid(), "judged": holder}
    os.write(1, json.dumps(told).encode() + b"\n")
    if refused:
        sys.exit(125)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _serve(socket.socket(fileno=listener), request, f"/proc/{holder}/ns/mnt")
    while True:
        signal.pause()


def _own_mounts() -> None:
    unshare(CLONE_NEWNS, "make a mount namespace")
    mount("none", "/", flags=MS_REC | MS_PRIVATE)


def _hold_judged(request: dict[str, Any], user: int) -> int:
    """A process that has the mounts of the judged, and does nothing else."""
    mounted, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent()
            _own_mounts()
            division.show_judged(request, user)
        except BaseException as error:  # noqa: BLE001 (whatever it is, it is for the one who asked)
            os.write(telling, f"{getattr(error, 'step', '')} {error}".encode()[:4000])
            os._exit(1)
        for fd in (0, 1, 2, telling):
            os.close(fd)
        while True:
            signal.pause()
    os.close(telling)
    if complaint := os.read(mounted, 4000).decode("utf-8", "replace"):
        raise OSError(0, complaint)
    os.close(mounted)
    return pid


def _serve(listener: socket.socket, request: dict[str, Any], mounts: str) -> None:
    """Take orders until standard input ends; each is served by a child, and none can hold up another."""
    listener.setblocking(False)
    serving: dict[int, int] = {}
    poll = select.poll()
    poll.register(0, select.POLLIN)
    while True:
        poll.register(listener, select.POLLIN if len(serving) < MOST_AT_ONCE else 0)
        ready = dict(poll.poll())
        for fd in [fd for fd in serving if fd in ready]:
            poll.unregister(fd)
            os.close(fd)
            del serving[fd]
        if 0 in ready and not os.read(0, 1 << 16):
            break
        if listener.fileno() in ready:
            with suppress(OSError):
                connection, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    _carry_out(connection, request, mounts)
                connection.close()
                fd = os.pidfd_open(pid)
                serving[fd] = pid
                poll.register(fd, select.POLLIN)
    for fd, pid in serving.items():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        select.select([fd], [], [])


def _carry_out(connection: socket.socket, request: dict[str, Any], mounts: str) -> NoReturn:
    """Serve one who asked. In a child of its own, which never returns."""
    answer = b""
    try:
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.settimeout(ASK_S)
        _, fds = receive_fds(connection, 64)
        if fds:
            try:
                answer = _run(connection, fds, request, mounts)
            except (ValueError, OSError) as error:
                answer = f"refused {error}".encode("utf-8", "replace")[:4000]
            connection.setblocking(False)
            connection.send(answer)
    finally:
        os._exit(0)


def _run(connection: socket.socket, fds: list[int], request: dict[str, Any], mounts: str) -> bytes:
    """Run what is asked for; the answer is its exit code, and why it was ended where it was."""
    order = take_order(fds, OrderTerms(request["timeout_s"], request["withheld"]))
    os.write(1, _LAUNCHED)
    side = {**request["sizes"], "mounts": mounts, "network": order.network, "live": None, "judged": True}
    side["scratch"] = request["shared"] if order.scratch else []
    command = {**request, "argv": order.argv, "env": order.env, "cwd": order.cwd, "side": side}
    ends = time.monotonic() + order.timeout_s
    supervisor, started, code_pipe = launch.start(command, (fds[1], fds[2], fds[3]))
    for fd in fds:
        os.close(fd)
    said = b"".join(iter(lambda: os.read(started, 4096), b""))
    poll = select.poll()
    poll.register(code_pipe, select.POLLIN)
    poll.register(connection, select.POLLIN)
    ready = [] if said else poll.poll(max(0.0, ends - time.monotonic()) * 1000)
    code = os.read(code_pipe, 16) if said or any(fd == code_pipe for fd, _ in ready) else b""
    # It is the first process of its table: all of the command dies with it.
    os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)
    if said:
        return b"refused " + said
    if not ready:
        return b"%d timeout" % _TIMED_OUT
    return b"%d " % (int(code) if code else KILLED)


if __name__ == "__main__":
    main()
    sys.exit(0)
