"""The side the agent sees: a small HTTP/1.1 server on a socket that lies in the agent's box.

It trusts nothing that comes in: heads, bodies and the number of connections are bounded, garbage is answered with 400.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol, cast

import httptools

from rollcage.gateway.policy import problem

BODY_LIMIT = 64 << 20
HEAD_LIMIT = 64 << 10
HEADER_COUNT = 200
CHECKED_BEYOND = 1 << 20
"""Bodies up to this size are taken without a look at what the other clients send."""
PIPELINED = 32
LINGER_S = 2.0
"""How long a refused sender may go on sending before it is cut: time to read why."""
TURNED_AWAY_S = 0.05
"""The same where there are too many connections: a box that floods us must not hold our descriptors."""

JSON = {"Content-Type": "application/json"}


@dataclass
class AgentRequest:
    """What a client asked."""

    method: str = ""
    target: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    """Names in lower case."""
    body: list[bytes] = field(default_factory=list)
    """In pieces, as it came."""
    size: int = 0
    """Bytes of it."""
    keep_alive: bool = True
    chunks: bool = True
    """Whether the client understands chunked answers (HTTP/1.0 does not)."""

    @property
    def path(self) -> str:
        """The target without its query."""
        return self.target.partition("?")[0]


class Source(Protocol):
    """Whatever fills the answer, and can wait while the client is slow."""

    def pause(self) -> None:
        """Stop for now."""

    def resume(self) -> None:
        """Go on."""


class Host(Protocol):
    """Who answers."""

    def connected(self, connection: AgentConnection) -> bool:
        """A client is there; false turns it away."""

    def has_room(self) -> bool:
        """Whether what all clients together have sent may grow further."""

    def requested(self, connection: AgentConnection, request: AgentRequest) -> None:
        """A whole request is in. It is answered with `reply`, or `begin`, `send` ... `finish`; or cut."""

    def disconnected(self, connection: AgentConnection) -> None:
        """The client is gone; whatever is done for it is in vain."""


class AgentConnection(asyncio.Protocol):
    """One client. One request is answered at a time; what is pipelined waits."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._waiting: deque[AgentRequest] = deque()
        self._current: AgentRequest | None = None
        self._begun = self._refused = self._chunked = False
        self._unsent = b""
        """The head of an answer whose first piece is not there yet."""
        self._source: Source | None = None
        self._slow = False
        self._reset()

    # What whoever answers does with it.

    def reply(self, status: int, body: bytes = b"", headers: Mapping[str, str] = JSON) -> None:
        """Answer the current request as a whole."""
        head = self._head(status, {**headers, "Content-Length": str(len(body))})
        bodiless = self._current is not None and self._current.method == "HEAD"
        self._write([head] if bodiless or not body else [head, body])
        self._next()

    def begin(self, status: int, headers: Mapping[str, str], source: Source) -> None:
        """Start an answer of unknown length, filled by `source`."""
        self._chunked = self._current is not None and self._current.chunks
        # It goes out with the first piece where that is there already: each write is a call of the kernel's.
        self._unsent = self._head(status, {**headers, "Transfer-Encoding": "chunked"} if self._chunked else headers)
        asyncio.get_running_loop().call_soon(self._send_head)
        self._begun, self._source = True, source
        if self._slow:
            source.pause()

    def send(self, data: bytes) -> None:
        """Pass on a piece of the answer."""
        if data and not self._transport.is_closing():
            # One piece: for the small ones of a stream copying is cheaper than a list of buffers.
            data = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
            if self._unsent:
                data, self._unsent = self._unsent + data, b""
            self._transport.write(data)

    def relay(self, chunks: bytes, data: bytes) -> None:
        """Pass on a piece of the answer that came as these chunks."""
        if not self._chunked or self._unsent:
            self.send(data)
        elif not self._transport.is_closing():
            self._transport.write(chunks)

    def finish(self, data: bytes = b"") -> None:
        """Pass on the last piece and end the answer."""
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
            head, self._unsent = self._unsent, b""
            self._write([head + last])
        else:
            self.send(data)
        self._send_head()
        self._next()

    def _send_head(self) -> None:
        if self._unsent:
            head, self._unsent = self._unsent, b""
            self._write([head])

    def cut(self) -> None:
        """End the connection at once, in the middle of whatever it carries."""
        self._transport.abort()

    @property
    def held(self) -> int:
        """Bytes of bodies that are kept for this client."""
        waiting = sum(request.size for request in self._waiting)
        return self._size + waiting + (self._current.size if self._current is not None and self._current.body else 0)

    @property
    def begun(self) -> bool:
        """Whether part of the current answer is out already."""
        return self._begun

    # What asyncio tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's has the methods but not the type
        raw = transport.get_extra_info("socket")
        if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does this only for sockets made with an explicit protocol number; without it each piece of a
            # stream may wait 40 ms for the client's acknowledgement of the one before.
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self._host.connected(self):
            self._refuse(503, "too many connections", linger_s=TURNED_AWAY_S)

    def connection_lost(self, error: Exception | None) -> None:
        self._waiting.clear()
        self._host.disconnected(self)

    def pause_writing(self) -> None:
        self._slow = True
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._slow = False
        if self._source is not None:
            self._source.resume()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "this server speaks HTTP/1.1 only")
        except httptools.HttpParserError as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            if isinstance(cause, _TooMuch):
                self._refuse(cause.status, cause.message)
            else:
                self._refuse(400, "this is no HTTP request")
        else:
            if not self._head_in and self._received > HEAD_LIMIT:
                self._refuse(431, "the head of the request is too long")
            elif self._received > 2 * BODY_LIMIT + HEAD_LIMIT:
                self._refuse(413, "the request is too long")
            elif self._waiting:
                self._transport.pause_reading()

    # What the parser finds.

    def on_message_begin(self) -> None:
        self._arriving = AgentRequest()

    def on_url(self, url: bytes) -> None:
        self._arriving.target += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > HEADER_COUNT:
            raise _TooMuch(431, "too many headers")
        self._arriving.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._head_in = True
        request = self._arriving
        request.method = self._parser.get_method().decode("latin-1")
        request.chunks = self._parser.get_http_version() != "1.0"
        if int(request.headers.get("content-length", "0")) > BODY_LIMIT:
            raise _TooMuch(413, f"the request is larger than {BODY_LIMIT >> 20} MB")
        if request.headers.get("expect", "").lower() == "100-continue" and self._current is None:
            self._write([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > BODY_LIMIT:
            raise _TooMuch(413, f"the request is larger than {BODY_LIMIT >> 20} MB")
        if self._size > CHECKED_BEYOND and not self._host.has_room():
            raise _TooMuch(413, "too much is being sent at once")
        self._body.append(data)

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        request = self._arriving
        request.body, request.size = self._body, self._size
        request.keep_alive = self._parser.should_keep_alive()
        self._reset(keep_parser=True)
        if len(self._waiting) >= PIPELINED:
            raise _TooMuch(400, "too many requests on one connection at once")
        self._waiting.append(request)
        if self._current is None:
            self._take()

    def _reset(self, keep_parser: bool = False) -> None:
        if not keep_parser:
            self._parser = httptools.HttpRequestParser(self)
        self._arriving = AgentRequest()
        self._body: list[bytes] = []
        self._size = self._headers = self._received = 0
        self._head_in = False

    def _take(self) -> None:
        self._current = self._waiting.popleft()
        self._host.requested(self, self._current)

    def _next(self) -> None:
        """The current answer is out: close, or go on with the next request."""
        over = self._refused or (self._current is not None and not self._current.keep_alive)
        self._current, self._source, self._begun = None, None, False
        if over:
            self._transport.close()
        elif self._waiting:
            self._take()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def _refuse(self, status: int, message: str, linger_s: float = LINGER_S) -> None:
        """Say why and close, once what is being answered is answered."""
        self._refused = True
        self._body, self._size = [], 0
        if self._current is not None:
            return
        body = problem(message)
        self._write([self._head(status, {**JSON, "Content-Length": str(len(body)), "Connection": "close"}), body])
        # Closing while the client still sends would reset the connection, and it might never read the answer.
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(linger_s, self._transport.abort)

    def _head(self, status: int, headers: Mapping[str, str]) -> bytes:
        try:
            phrase = HTTPStatus(status).phrase
        except ValueError:
            phrase = "Unknown"
        lines = [f"HTTP/1.1 {status} {phrase}", *(f"{name}: {value}" for name, value in headers.items())]
        if self._current is not None and not self._current.keep_alive:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")

    def _write(self, pieces: list[bytes]) -> None:
        if not self._transport.is_closing():
            self._transport.writelines(pieces)


class _TooMuch(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message
