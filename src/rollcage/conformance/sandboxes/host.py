"""What is put on the host for a box to reach, if it can: files, folders, sockets. Open to everybody, so only the box's
walls protect them."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

SECRET = "secret of the host"  # noqa: S105 (nothing is protected by it)


@contextmanager
def a_folder() -> Iterator[Path]:
    """A folder that everybody may change."""
    with tempfile.TemporaryDirectory(prefix="conformance-") as name:
        Path(name).chmod(0o777)
        yield Path(name)


@contextmanager
def a_secret() -> Iterator[Path]:
    """A file that everybody may read."""
    with a_folder() as folder:
        file = folder / "secret"
        file.write_text(SECRET)
        file.chmod(0o666)
        yield file


def is_empty(folder: Path) -> bool:
    """Whether nothing was put there."""
    return not any(folder.iterdir())


@dataclass(frozen=True)
class HostSockets:
    """Sockets of the host that everybody on it can reach."""

    addresses: tuple[str, ...]
    """Of this machine."""
    tcp: int
    udp: int
    path: str
    abstract: str
    listening: tuple[socket.socket, ...]

    def reached(self) -> bool:
        """Whether anybody came."""
        for listener in self.listening:
            with suppress(BlockingIOError):
                if listener.type == socket.SOCK_DGRAM:
                    listener.recv(1)
                else:
                    listener.accept()[0].close()
                return True
        return False


@contextmanager
def host_sockets() -> Iterator[HostSockets]:
    """Open one of each kind, on every address."""
    name = f"conformance-{secrets.token_hex(6)}"
    with ExitStack() as stack:
        folder = stack.enter_context(a_folder())
        tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))  # noqa: S104 (so that a box could reach it)
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("0.0.0.0", 0))  # noqa: S104
        named = stack.enter_context(socket.socket(socket.AF_UNIX))
        named.bind(str(folder / "socket"))
        os.chmod(folder / "socket", 0o777)  # noqa: S103, PTH101
        hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
        hidden.bind(f"\0{name}")
        for listening in (named, hidden):
            listening.listen()
        for listening in (tcp, udp, named, hidden):
            listening.setblocking(False)
        ports = tcp.getsockname()[1], udp.getsockname()[1]
        yield HostSockets(_addresses(), *ports, str(folder / "socket"), name, (tcp, udp, named, hidden))


def free_port() -> int:
    """A port that nobody on this machine uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def answers(port: int) -> bool:
    """Whether somebody on this machine takes connections there."""
    try:
        socket.create_connection(("127.0.0.1", port), 2).close()
    except OSError:
        return False
    return True


def _addresses() -> tuple[str, ...]:
    found = ["127.0.0.1", "127.0.0.2"]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        # Nothing is sent: the kernel only says from which address it would be.
        asking.connect(("192.0.2.1", 9))
        found.append(asking.getsockname()[0])
    return tuple(found)
