"""Through whom models are reached: `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY`, as other programs read them."""

from __future__ import annotations

import asyncio
import base64
import ssl
from ipaddress import ip_address, ip_network
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

from rollcage.types import Proxies

Origin = tuple[bool, str, int]
"""Whether it speaks TLS, its host and its port."""

HEAD_LIMIT = 64 << 10


class ProxyRefused(Exception):
    """The proxy would not let us through; the message says how."""


NO_PROXIES = Proxies()
"""Every model is reached directly."""


def proxy_to(proxies: Proxies, origin: Origin) -> str:
    """The proxy on the way to a model; empty where there is none. This machine never needs one."""
    secure, host, port = origin
    chosen = proxies.https if secure else proxies.http
    direct = not chosen or _is_local(host) or any(_covers(each, host, port) for each in proxies.none_for)
    return "" if direct else chosen


def _is_local(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _covers(rule: str, host: str, port: int) -> bool:
    rule, host = rule.strip().lower(), host.lower()
    if rule == "*":
        return True
    name, _, wanted = rule.rpartition(":") if rule.count(":") == 1 else (rule, "", "")
    if wanted and wanted != str(port):
        return False
    try:
        return ip_address(host) in ip_network(name, strict=False)
    except ValueError:
        name = name.removeprefix("*").lstrip(".")
        return bool(name) and (host == name or host.endswith(f".{name}"))


P = TypeVar("P", bound=asyncio.Protocol)


class _Asking(asyncio.Protocol):
    """Waits for the proxy's answer to CONNECT."""

    def __init__(self) -> None:
        self._said = b""
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self._said += data
        if self.answer.done():
            return
        if b"\r\n\r\n" in self._said:
            self.answer.set_result(self._said)
        elif len(self._said) > HEAD_LIMIT:
            self.answer.set_exception(ProxyRefused("the proxy's answer is too long"))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.answer.done():
            self.answer.set_exception(ProxyRefused("the proxy hung up"))


async def through(proxy: str, origin: Origin, connection: P, tls: ssl.SSLContext | None) -> P:
    """The connection, made through a proxy: by a tunnel where the model speaks TLS."""
    url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ProxyRefused(f"{url.scheme}://{url.hostname or ''} is no proxy that is spoken here: name an http one")
    loop = asyncio.get_running_loop()
    to_proxy = ssl.create_default_context() if url.scheme == "https" else None
    port = url.port or (443 if to_proxy else 80)
    secure, host, target_port = origin
    if not secure:
        await loop.create_connection(lambda: connection, url.hostname, port, ssl=to_proxy)
        return connection
    transport, asking = await loop.create_connection(_Asking, url.hostname, port, ssl=to_proxy)
    try:
        name = f"[{host}]:{target_port}" if ":" in host else f"{host}:{target_port}"
        lines = [f"CONNECT {name} HTTP/1.1", f"Host: {name}", *_credentials(url)]
        transport.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace"))
        first = (await asking.answer).split(b"\r\n", 1)[0]
        status = first.split(b" ")[1:2]
        if status != [b"200"]:
            said = first.decode("latin-1")[:200]
            raise ProxyRefused(f"the proxy {url.hostname}:{port} refused the way to {name}: {said}")
        assert tls is not None
        secured = await loop.start_tls(transport, connection, tls, server_hostname=host)
    except BaseException:
        transport.abort()
        raise
    assert secured is not None
    connection.connection_made(secured)
    return connection


def _credentials(url: SplitResult) -> list[str]:
    if not url.username:
        return []
    pair = f"{unquote(url.username)}:{unquote(url.password or '')}".encode()
    return [f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}"]
