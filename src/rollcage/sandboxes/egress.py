"""The one way out of a box: an HTTP proxy for setup commands that connects to allow-listed names and nowhere else."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

import anyio

from rollcage.errors import UsageError
from rollcage.sandboxes.base import Sandbox

PORT = 7003
"""Where the proxy is, inside the box: beside the model (7000), the agent's server (7001), the remote tools (7002)."""

_MOST_HEAD = 1 << 16
_CHUNK = 1 << 16
_PATIENCE_S = 30.0
_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_NOT_PASSED_ON = (b"proxy-", b"connection:", b"keep-alive:", b"host:")


class Denied(Exception):
    """What the proxy answers instead of connecting: a status and a reason."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status


Refusal = Callable[[str], None]
"""Told the host of a request that was refused."""


def tell_nobody(host: str) -> None:
    """Tells nobody."""


@asynccontextmanager
async def egress(
    box: Sandbox, hosts: Sequence[str], *, trusted: Sequence[str] = (), refused: Refusal = tell_nobody
) -> AsyncIterator[dict[str, str]]:
    """Let the box reach `hosts` (exact names, `*.suffix`, or literal addresses) for the length of the block.

    Gives the environment variables that programs find the proxy by. When the block is left, open connections are cut.
    `trusted`: further names, of this machine's own configuration, which may lead to private addresses. `refused`: told
    of every host that was asked for and is not among them; with no hosts at all that is whoever tries to reach one.
    """
    for host in hosts:
        if not host or "/" in host or host == "*":
            raise UsageError(f"{host!r} is no host name: give names, `*.suffix` or literal addresses")
    proxy = _Proxy(_names(hosts), trusted=_names(trusted), refused=refused)
    async with box.listen(PORT) as listener:
        start = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        server = await start(proxy.serve, sock=listener, limit=_MOST_HEAD)
        try:
            address = f"http://127.0.0.1:{PORT}"
            proxies = {spelling: address for name in _NAMES for spelling in (name, name.lower())}
            yield {**proxies, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
        finally:
            with anyio.CancelScope(shield=True):
                server.close()
                await proxy.cut()
                await server.wait_closed()


def _names(hosts: Sequence[str]) -> frozenset[str]:
    return frozenset(host.lower().rstrip(".") for host in hosts)


class _Proxy:
    """Serves connections from one box."""

    def __init__(
        self, allowed: frozenset[str], *, trusted: frozenset[str] = frozenset(), refused: Refusal = tell_nobody
    ) -> None:
        self._allowed, self._trusted, self._refused = allowed | trusted, trusted, refused
        self._serving: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first line to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    upstream = await self._open(reader, writer)
            except Denied as denied:
                writer.write(_answer(denied))
                await writer.drain()
                return
            await _relay(reader, writer, *upstream)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass
        except asyncio.CancelledError:
            # Cut at the end of the block: there is nobody left to tell.
            writer.transport.abort()
        finally:
            self._serving.discard(task)
            await _close(writer)

    async def cut(self) -> None:
        """End every connection now."""
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)

    async def _open(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Read the request, and connect to where it wants to go, if it may."""
        head = await reader.readuntil(b"\r\n\r\n")
        line, *headers = head[:-4].split(b"\r\n")
        try:
            method, target, version = line.decode("ascii").split(" ")
            url = urlsplit(f"//{target}" if method == "CONNECT" else target)
            host, port = url.hostname, url.port or 80
        except ValueError as error:
            raise Denied("400 Bad Request", "not a proxy request") from error
        if not host or (method != "CONNECT" and url.scheme != "http"):
            raise Denied("400 Bad Request", "not a proxy request: CONNECT host:port, or an absolute http:// address")
        upstream = await self._connect(host.rstrip("."), port)
        if method == "CONNECT":
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await writer.drain()
            return upstream
        path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        passed_on = [header for header in headers if not header.lower().startswith(_NOT_PASSED_ON)]
        lines = [f"{method} {path} {version}".encode(), f"Host: {url.netloc.rpartition('@')[2]}".encode(), *passed_on]
        upstream[1].write(b"\r\n".join([*lines, b"Connection: close", b"", b""]))
        return upstream

    async def _connect(self, host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not self._allows(host):
            self._refused(host)
            raise Denied("403 Forbidden", f"{host} is not among the hosts that setup may reach")
        for address in await self._addresses(host, port):
            with suppress(OSError):
                # To the address that was judged, not to the name: it may resolve to another the next time.
                return await asyncio.open_connection(address, port)
        raise Denied("502 Bad Gateway", f"{host}:{port} cannot be reached")

    def _allows(self, host: str) -> bool:
        suffixes = (f"*{host[index:]}" for index, letter in enumerate(host) if letter == "." and index)
        return host in self._allowed or any(suffix in self._allowed for suffix in suffixes)

    async def _addresses(self, host: str, port: int) -> list[str]:
        if _is_literal(host):
            # It is on the list as it stands, so it is meant, private or not.
            return [host]
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise Denied("502 Bad Gateway", f"{host} is not known") from error
        addresses = [str(entry[4][0]) for entry in found]
        for address in addresses:
            # A mirror in one's own network is meant if its address is on the list too.
            if not _is_public(address) and address not in self._allowed and host not in self._trusted:
                self._refused(host)
                # Which one it is, is not for the box to know.
                reason = f"{host} leads to a private address; if that is meant, allow the address beside the name"
                raise Denied("403 Forbidden", reason)
        return addresses


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is not None:
            address = inner
        elif address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def _answer(denied: Denied) -> bytes:
    body = f"rollcage: {denied}\n".encode()
    head = f"HTTP/1.1 {denied.status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


async def _relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Carry bytes both ways until both sides are done."""
    try:
        await asyncio.gather(_carry(reader, far_writer), _carry(far_reader, writer))
    except asyncio.CancelledError:
        far_writer.transport.abort()
        raise
    finally:
        await _close(far_writer)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        if target.can_write_eof():
            target.write_eof()
