"""The way to the model: a keep-alive HTTP/1.1 client that hands each piece of an answer on the moment it arrives.

Hand-written, because the client library decides what a relay costs (docs/gateway.md has the numbers).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from rollcage.gateway.proxies import NO_PROXIES, ProxyRefused, proxy_to, through
from rollcage.types import Endpoint, Proxies

CONNECT_TIMEOUT_S = 10.0
IDLE_S = 60.0
STALE_S = 1.0
"""A connection that was closed while it was idle shows it sooner than this."""
HEAD_LIMIT = 256 << 10
ANSWER_LIMIT = 64 << 20
"""Bytes of one answer, unless set otherwise: a model that never ends must not fill our memory."""


class UpstreamError(Exception):
    """The upstream could not be reached, or broke off; the message says how."""


class Target(NamedTuple):
    """One address to send to."""

    secure: bool
    host: str
    port: int
    path: str

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, base_url: str, path: str) -> Target:
        """The address of `path` below a base URL (whose query, if any, goes along)."""
        url = urlsplit(base_url)
        secure = url.scheme == "https"
        query = f"?{url.query}" if url.query else ""
        return cls(secure, url.hostname or "", url.port or (443 if secure else 80), url.path.rstrip("/") + path + query)

    @property
    def origin(self) -> tuple[bool, str, int]:
        """What a connection can be shared by."""
        return self.secure, self.host, self.port

    def head(self, method: str, headers: dict[str, str], length: int | None) -> bytes:
        """The head of a request."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = self.port == (443 if self.secure else 80)
        lines = [f"{method} {self.path} HTTP/1.1", f"Host: {host}" if usual else f"Host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def headers_for(endpoint: Endpoint) -> dict[str, str]:
    """What every request to an endpoint carries: the one place where the real key leaves this process."""
    headers = {"Accept-Encoding": "identity", "User-Agent": "rollcage"}
    if key := endpoint.key.get_secret_value().strip():
        headers["Authorization"] = f"Bearer {key}"
    return headers


class ModelConnection(asyncio.Protocol):
    """One connection to a model's server, and the one request it is busy with."""

    status = 0
    used = False
    """Whether a request went over it before."""

    def __init__(self, pool: Upstream, origin: tuple[bool, str, int]) -> None:
        self._pool, self.origin = pool, origin
        self._loop = asyncio.get_running_loop()
        self._busy = self._lost = False
        self._between = False
        """Whether the parser stands between two chunks of a body."""
        self._head_in: asyncio.Future[None] | None = None
        self.idle_since = 0.0

    # What a call does with it.

    async def send(self, head: bytes, body: bytes) -> None:
        """Send a request and wait for the head of the answer."""
        if self._lost:
            raise UpstreamError("the upstream closed the connection")
        self.status, self.headers = 0, dict[str, str]()
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # what the parser calls for each piece: no Python in between
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Callable[[bytes], None] | None = None
        self._shortcut: Callable[[bytes], bool] | None = None
        self._complete = self._keep_alive = self._between = False
        self.answered = False
        self._size = 0
        self._head_in = self._loop.create_future()
        self._ended: asyncio.Future[str | None] = self._loop.create_future()
        self._busy = True
        self._transport.writelines([head, body] if body else [head])
        await self._head_in

    async def body(self, sink: Callable[[bytes], None], shortcut: Callable[[bytes], bool] | None = None) -> str | None:
        """Give every piece of the body to `sink`; returns at its end, with what broke it off where something did.

        `shortcut` is asked first, where a read begins with a new chunk: whether it takes all of the bytes as they are.
        """
        self._sink, self._shortcut = sink, shortcut
        self._flush(sink)
        return await self._ended

    def finish(self) -> None:
        """Call the answer complete, though the upstream has not ended it."""
        if not self._ended.done():
            self._ended.set_result(None)

    def pause(self) -> None:
        """Take no more for now: the reader is slow."""
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Take more."""
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def release(self) -> None:
        """The request is over: keep the connection where that is possible, cut it where not."""
        self._busy = self._between = False
        self._sink = None
        if self._complete and self._keep_alive and not self._transport.is_closing():
            self.used = True
            self.resume()
            self._pool.give_back(self)
        else:
            self._transport.abort()

    def cut(self) -> None:
        """End the connection at once, whatever it is doing."""
        self._transport.abort()

    @property
    def complete(self) -> bool:
        """Whether the whole answer has come."""
        return self._complete

    @property
    def closing(self) -> bool:
        """Whether it is on its way out."""
        return self._transport.is_closing()

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods but not the type
        self._pool.remember(self)
        raw = transport.get_extra_info("socket")
        if raw is not None and hasattr(socket, "TCP_KEEPIDLE"):
            # An answer may take hours to start; a peer that vanished meanwhile must be noticed.
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)

    def data_received(self, data: bytes) -> None:
        if self._between and self._shortcut is not None and self._shortcut(data):
            self._size += len(data)
            if self._size > self._pool.answer_limit:
                self._too_long()
            return
        if not self._busy or self._complete:
            self._transport.abort()  # nobody asked
            return
        self.answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._sink is not None:
                self._flush(self._sink)
            self._break(f"the upstream does not speak HTTP: {error}")
            self._transport.abort()
            return
        self._size += len(data)
        if not self.status:
            if self._size > HEAD_LIMIT:
                self._break("the upstream's answer has an endless head")
                self._transport.abort()
            return
        if self._pieces and self._sink is not None:
            self._flush(self._sink)
        if self._size > self._pool.answer_limit and not self._complete:
            self._too_long()
            return
        if self._complete and not self._ended.done():
            self._ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._pool.forget(self)
        if not self._busy:
            return
        endless = self.status and not {"content-length", "transfer-encoding"} & self.headers.keys()
        if endless and error is None and not self._ended.done():
            self._ended.set_result(None)  # a body without an announced length ends with its connection
        self._break(f"the upstream broke off: {error}" if error else "the upstream broke off")

    # What the parser finds.

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._complete:
            return  # 100 Continue, 103 Early Hints: the answer proper is still to come
        self.status = status
        if self._head_in is not None and not self._head_in.done():
            self._head_in.set_result(None)

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        self._between = False
        if not self.status:
            self.headers.clear()
            return
        self._complete, self._keep_alive = True, self._parser.should_keep_alive()

    def _flush(self, sink: Callable[[bytes], None]) -> None:
        """Pass on what one read brought, in one piece."""
        pieces = self._pieces
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        if data:
            sink(data)

    def _too_long(self) -> None:
        self._break(too_long(self._pool.answer_limit))
        self._transport.abort()

    def _break(self, reason: str) -> None:
        if self._head_in is not None and not self._head_in.done():
            self._head_in.set_exception(UpstreamError(reason))
        elif not self._ended.done():
            self._ended.set_result(reason)


class Upstream:
    """All connections to all models: one pool per origin, as large as it needs to be."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, answer_limit: int = ANSWER_LIMIT, proxies: Proxies = NO_PROXIES
    ) -> None:
        self._tls, self._proxies = tls, proxies
        self.answer_limit = answer_limit
        """Bytes of one answer; a longer one is cut off."""
        self._idle: dict[tuple[bool, str, int], deque[ModelConnection]] = {}
        self._all: set[ModelConnection] = set()
        self._closed = False
        self._empty = asyncio.Event()

    @property
    def connections(self) -> int:
        """How many are open, busy or idle."""
        return len(self._all)

    async def open(self, target: Target, head: bytes, body: bytes) -> ModelConnection:
        """Send a request, and return with the head of its answer. The caller must `release` the connection."""
        if not target.secure and proxy_to(self._proxies, target.origin):
            # A proxy for plain HTTP wants to know the whole address; one for TLS is asked for a tunnel.
            host = f"[{target.host}]" if ":" in target.host else target.host
            head = head.replace(b" /", f" http://{host}:{target.port}/".encode(), 1)
        while True:
            connection = self._take(target.origin) or await self._connect(target)
            sent_at = asyncio.get_running_loop().time()
            try:
                await connection.send(head, body)
            except UpstreamError:
                connection.release()
                # A kept connection may have been closed just as we wrote to it. If it breaks later, it was at work.
                stale = connection.used and not connection.answered
                if stale and asyncio.get_running_loop().time() - sent_at < STALE_S:
                    continue
                raise
            except BaseException:
                connection.release()
                raise
            return connection

    async def close(self) -> None:
        """Cut every connection and wait until they are gone."""
        self._closed = True
        for connection in list(self._all):
            connection.cut()
        if self._all:
            await self._empty.wait()

    def give_back(self, connection: ModelConnection) -> None:
        """Keep a connection for the next request."""
        if self._closed:
            connection.cut()
            return
        connection.idle_since = asyncio.get_running_loop().time()
        idle = self._idle.setdefault(connection.origin, deque())
        idle.append(connection)
        while idle[0].idle_since < connection.idle_since - IDLE_S:
            idle.popleft().cut()

    def remember(self, connection: ModelConnection) -> None:
        """A connection is there."""
        self._all.add(connection)

    def forget(self, connection: ModelConnection) -> None:
        """A connection is gone."""
        self._all.discard(connection)
        with suppress(KeyError, ValueError):
            self._idle[connection.origin].remove(connection)
        if self._closed and not self._all:
            self._empty.set()

    def _take(self, origin: tuple[bool, str, int]) -> ModelConnection | None:
        idle = self._idle.get(origin)
        while idle:
            connection = idle.pop()
            if not connection.closing:
                return connection
        return None

    async def _connect(self, target: Target) -> ModelConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if proxy := proxy_to(self._proxies, target.origin):
                    return await through(
                        proxy, target.origin, ModelConnection(self, target.origin), self._context(target)
                    )
                _, connection = await loop.create_connection(
                    lambda: ModelConnection(self, target.origin), target.host, target.port, ssl=self._context(target)
                )
        except TimeoutError as error:
            raise UpstreamError(f"no connection within {CONNECT_TIMEOUT_S:.0f} s") from error
        except ProxyRefused as error:
            raise UpstreamError(str(error)) from error
        except (OSError, ssl.SSLError, UnicodeError) as error:
            raise UpstreamError(_in_words(error)) from error
        return connection

    def _context(self, target: Target) -> ssl.SSLContext | None:
        if target.secure and self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls if target.secure else None


def too_long(limit: int) -> str:
    """What is wrong with an answer of more bytes than that."""
    return f"the answer was cut off: it is longer than {limit >> 20} MB"


def _in_words(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate not accepted: {error.verify_message}"
    return str(error) or type(error).__name__
