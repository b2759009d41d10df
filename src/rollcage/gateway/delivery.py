"""How an answer gets to the agent: passed on as it comes, told in another wire's words, or put together at the end.

An agent that streams before an engine that answers as a whole is kept company until then. The head of its answer waits
for the first sign of life, so that an upstream that refuses at once still does so with its own status.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping

from rollcage.gateway.chat import ChatWire, UsageFilter, counts
from rollcage.gateway.http import JSON, Connection
from rollcage.gateway.policy import problem
from rollcage.gateway.shapes import object_of
from rollcage.gateway.sse import Events
from rollcage.gateway.unstream import chunks_of
from rollcage.gateway.upstream import Exchange
from rollcage.gateway.wires import Wire
from rollcage.gateway.wires.base import problem_in
from rollcage.types import JsonObject

PING_S = 3.0
UNPACKED_LIMIT = 256 << 20
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

_PASSED_ON = ("content-type", "content-encoding", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id")
_ABOUT_BODY = ("content-type", "content-encoding")


class Delivery:
    """The answer to one request, on its way out."""

    def __init__(self, connection: Connection, wire: Wire | ChatWire | None = None, *, stream: bool = False) -> None:
        """`stream`: whether the agent wants its answer piece by piece."""
        self._connection, self._stream = connection, stream
        self._wire: Wire | ChatWire = wire or ChatWire({})
        self._events = Events()
        self._alive: asyncio.TimerHandle | None = None
        self._unstreamed = False
        self._headers: dict[str, str] = {}
        self.status = 0
        """What the upstream answered with; 0 where it has not."""
        self.tells = False
        """Whether each chunk of a stream is told in other words, and not passed on as it is."""
        self.filter: UsageFilter | None = None
        """What a stream that is passed on goes through."""

    @property
    def translates(self) -> bool:
        """Whether the agent speaks another language than the engine."""
        return not isinstance(self._wire, ChatWire)

    @property
    def encoding(self) -> str:
        """How the upstream packed its body."""
        return self._headers.get("content-encoding", "")

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """The upstream's head is in."""
        self.status = status
        self._headers = {name: headers[name] for name in _PASSED_ON if name in headers}

    def unpack(self) -> None:
        """The body is no longer packed as its head says."""
        self._headers.pop("content-encoding", None)

    def keep_alive(self) -> None:
        """The agent wants a stream and the engine will answer as a whole: say something now and then until it does."""
        self._unstreamed = True
        if self._alive is None:
            self._alive = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def rest(self) -> None:
        """Nothing more needs to be kept alive."""
        if self._alive is not None:
            self._alive.cancel()

    def flows(self, exchange: Exchange, sent: JsonObject, *, strip: bool) -> bool:
        """Begin to pass on a stream; false where what comes is none. `sent` is what the upstream was asked."""
        whole = self.status != 200 or "json" in self._headers.get("content-type", "")
        if whole or not self._stream or self._connection.begun:
            return False
        self.rest()
        self._unstreamed = False
        chat = self._wire if isinstance(self._wire, ChatWire) else None
        self.tells = chat is None or strip
        if self.tells and self.encoding:
            return False  # it cannot be read before it is whole
        if self.tells:
            self._begin(exchange)
            return True
        if chat is not None and not chat.counts and counts(sent) and not self.encoding:
            self.filter = UsageFilter()
        self._connection.begin(self.status, {**self._headers, "Cache-Control": "no-cache"}, exchange)
        return True

    def tell(self, data: bytes) -> None:
        """Pass on a piece of a stream in the agent's own words."""
        for event in self._events.feed(data):
            self._send(self._said(event.data))

    def finish(self, pieces: list[bytes], held: bytes, broken: str | None, error: str | None) -> None:
        """Let the end go: `held` is what was kept back of a stream that is passed on.

        `broken` is what broke the transport, `error` what is wrong with the answer.
        """
        if self.tells and self._connection.begun:
            self._finish_told(broken, error)
        elif self._connection.begun and not self._unstreamed:
            if broken is None:
                self._connection.finish(held + (self.filter.end() if self.filter else b""))
            else:
                self._connection.cut()
        elif broken is not None or not self.status:
            self._finish_broken()
        elif self.status != 200:
            self._finish_refused(b"".join(pieces))
        elif self._stream and (self._unstreamed or self.translates):
            self._finish_unstreamed(unpacked(b"".join(pieces), self.encoding), error)
        else:
            self._finish_whole(b"".join(pieces))

    def fail(self) -> None:
        """The agent must not take the answer for good."""
        if self._connection.begun:
            self._connection.cut()
        else:
            self.refuse(500, problem("the answer could not be recorded", "server_error"))

    def refuse(self, status: int, body: bytes) -> None:
        """Answer with an error, in the wire's own shape."""
        self._connection.reply(status, self._wire.error(status, body))

    def _finish_told(self, broken: str | None, error: str | None) -> None:
        for event in self._events.end():
            self._send(self._said(event.data))
        if isinstance(self._wire, ChatWire) and broken is not None:
            self._connection.cut()
        elif isinstance(self._wire, ChatWire) or error is None:
            self._connection.finish(self._wire.finish())
        else:
            self._connection.finish(self._wire.cut("the model's answer broke off"))

    def _finish_broken(self) -> None:
        words = "the model's answer broke off" if self.status else "the model cannot be reached"
        if self._connection.begun:
            self._connection.finish(self._wire.cut(words))
        else:
            self.refuse(502, problem(words, "upstream_error"))

    def _finish_refused(self, body: bytes) -> None:
        kept = {name: value for name, value in self._headers.items() if name not in _ABOUT_BODY}
        if not self.translates and not self._connection.begun:
            self._connection.reply(self.status, body, self._headers)
            return
        body = unpacked(body, self.encoding)
        if not self._connection.begun:
            self._connection.reply(self.status, self._wire.error(self.status, body), {**kept, **JSON})
        elif isinstance(self._wire, ChatWire):
            self._connection.finish(self._wire.cut_by(self.status, body))
        else:
            self._connection.finish(self._wire.cut(problem_in(self.status, body).message))

    def _finish_unstreamed(self, body: bytes, error: str | None) -> None:
        """An answer that came whole, as the stream that the agent wants."""
        answer = object_of(body)
        streamed = body.lstrip().startswith(b"data:")  # whatever its head said
        if not streamed and not (answer or {}).get("choices"):
            self._finish_broken()
            return
        if not self._connection.begun:
            self._begin(_Nobody())
        if answer is None:
            self.tell(body)
            self._finish_told(None, error)
            return
        told = b"".join(self._wire.event(chunk) for chunk in chunks_of(answer, usage=True))
        self._connection.finish(told + self._wire.finish())

    def _finish_whole(self, body: bytes) -> None:
        if isinstance(self._wire, ChatWire):
            self._connection.reply(200, body if self.encoding else self._wire.trimmed(body), self._headers)
        elif (answer := object_of(unpacked(body, self.encoding))) is None:
            self._finish_broken()
        else:
            self._connection.reply(200, self._wire.whole(answer))

    def _said(self, data: bytes) -> bytes:
        if data.strip() == b"[DONE]":
            return b""
        chunk = object_of(data)
        return b"" if chunk is None else self._wire.event(chunk)

    def _send(self, data: bytes) -> None:
        if data:
            self._connection.send(data)

    def _begin(self, reader: Exchange | _Nobody) -> None:
        kept = {name: value for name, value in self._headers.items() if name not in _ABOUT_BODY}
        self._connection.begin(200, {**kept, **EVENTS}, reader)

    def _ping(self) -> None:
        self._alive = asyncio.get_running_loop().call_later(PING_S, self._ping)
        if not self._connection.begun:
            self._begin(_Nobody())
        self._send(self._wire.ping())


class _Nobody:
    """Fills an answer that is not being filled yet."""

    def pause(self) -> None:
        """There is nothing to hold up."""

    def resume(self) -> None:
        """Nor to go on with."""


def unpacked(body: bytes, encoding: str) -> bytes:
    """A body that was packed for the way, though we never ask for that."""
    if encoding not in ("gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(wbits=47).decompress(body, UNPACKED_LIMIT)
    except zlib.error:
        return body
