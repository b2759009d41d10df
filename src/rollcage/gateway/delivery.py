"""How an answer gets to the agent: passed on as it comes, told in another wire's words, or put together at the end.

The end of an answer is always kept back until `finish`, from the piece on with which an agent could act. An agent that
streams before an engine that answers as a whole is pinged until then. The head of its answer waits for the first ping,
so that an upstream that refuses at once still does so with its own status.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping

from rollcage.gateway.hold import DONE, ActionWatch, HeldEnd
from rollcage.gateway.http_in import JSON, AgentConnection, Source
from rollcage.gateway.http_out import ANSWER_LIMIT, ModelConnection
from rollcage.gateway.policy import problem
from rollcage.gateway.shapes import object_of
from rollcage.gateway.usual import calm
from rollcage.gateway.wires import Wire
from rollcage.gateway.wires.base import BROKE_OFF, StreamFilter
from rollcage.gateway.wires.unstream import chunks_of
from rollcage.sse import EventReader
from rollcage.types import JsonObject

PING_S = 3.0
AFTER_DONE_S = 1.0
"""How long an upstream may take to end its answer after `[DONE]`; then the answer counts as complete."""
EVENTS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

_PASSED_ON = ("content-type", "content-encoding", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id")
_ABOUT_BODY = ("content-type", "content-encoding")


class Delivery:
    """The answer to one request, on its way to the agent."""

    def __init__(
        self, connection: AgentConnection, wire: Wire, *, stream: bool, answer_limit: int = ANSWER_LIMIT
    ) -> None:
        """`stream`: whether the agent wants its answer piece by piece. `answer_limit`: bytes of it, once unpacked."""
        self._connection, self._stream, self._answer_limit = connection, stream, answer_limit
        self.relay = connection.relay
        """Passes on chunks as they came, and is told what they carry. Only while this is `clear`, and they are calm."""
        self.wire = wire
        """What the agent speaks."""
        self.status = 0
        """What the upstream answered with; 0 where it has not."""
        self._headers: dict[str, str] = {}
        self._unstreamed = False
        """Whether a stream is made of a whole answer."""
        self._telling = False
        """Whether each chunk of a stream is told in other words, and not passed on as it is."""
        self._events = EventReader()
        self._filter: StreamFilter | None = None
        self._end = HeldEnd()
        """Keeps back the end of a stream that is passed on."""
        self.clear = True
        """Whether a stream is passed on as it comes, and nothing of it has begun and waits for its rest."""
        self._watch = ActionWatch()
        self._held: list[bytes] | None = None
        """The end of a stream that is told, kept back; None where nothing is yet."""
        self._source: ModelConnection | None = None
        self._pinging: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None

    @property
    def encoding(self) -> str:
        """How the upstream packed its body."""
        return self._headers.get("content-encoding", "")

    def answered(self, status: int, headers: Mapping[str, str]) -> None:
        """The upstream's head is in."""
        self.status = status
        self._headers = {name: headers[name] for name in _PASSED_ON if name in headers}

    def unpacked(self, pieces: list[bytes]) -> bytes:
        """A body that was packed for the way, though we never ask for that; of one that is too long, a byte more than
        it may have.
        """
        body = b"".join(pieces)
        if self.encoding not in ("gzip", "deflate"):
            return body
        try:
            return zlib.decompressobj(wbits=47).decompress(body, self._answer_limit + 1)
        except zlib.error:
            return body

    def unpack(self) -> None:
        """The body is no longer packed as its head says."""
        self._headers.pop("content-encoding", None)

    def keep_alive(self) -> None:
        """The agent wants a stream and the engine will answer as a whole: ping the agent until it does."""
        self._unstreamed = True
        if self._pinging is None:
            self._ping_later()

    def rest(self) -> None:
        """The engine has said all: stop the timers."""
        for timer in (self._pinging, self._ending):
            if timer is not None:
                timer.cancel()

    def stream(self, source: ModelConnection, sent: JsonObject, *, strip: bool) -> Callable[[bytes], None] | None:
        """Begin to pass on a stream: what to do with each piece of it; None where the answer goes out as a whole.

        `sent` is what the upstream was asked.
        """
        whole = self.status != 200 or "json" in self._headers.get("content-type", "")
        if whole or not self._stream or self._connection.begun:
            return None
        self.rest()
        self._unstreamed, self._telling = False, self.wire.translates or strip or self.wire.rewrites
        if self.encoding:
            return None  # it cannot be read before it is whole
        self._source = source
        if self._telling:
            self.clear = False
            self._begin(source)
            return self._tell
        self._filter = self.wire.filter(sent)
        self._connection.begin(self.status, {**self._headers, "Cache-Control": "no-cache"}, source)
        return self._sift

    def finish(self, pieces: list[bytes], *, broken: bool, faulty: bool) -> None:
        """Let the end go. `pieces` are the whole answer.

        `broken`: whether the transport broke; `faulty`: whether the answer is not whole.
        """
        if self._telling and self._connection.begun:
            self._finish_told(broken=broken, faulty=faulty)
        elif self._connection.begun and not self._unstreamed:
            self._finish_passed_on(broken=broken)
        elif broken or not self.status:
            self._finish_broken()
        elif self.status != 200:
            self._finish_refused(b"".join(pieces))
        elif self._stream and (self._unstreamed or self.wire.translates):
            self._finish_unstreamed(self.unpacked(pieces), faulty=faulty)
        else:
            self._finish_whole(b"".join(pieces))

    @property
    def begun(self) -> bool:
        """Whether the agent has heard anything of an answer."""
        return self._connection.begun

    def cut(self) -> None:
        """End the agent's connection at once."""
        self._connection.cut()

    def fail(self) -> None:
        """The turn could not be kept: the agent must not take the answer for good."""
        if self._connection.begun:
            self._connection.cut()
        else:
            self.refuse(500, problem("the answer could not be recorded", "server_error"))

    def refuse(self, status: int, body: bytes) -> None:
        """Answer with an error, in the wire's own shape."""
        self._connection.reply(status, self.wire.error(status, body))

    # Pieces of a stream.

    def _pass_on(self, data: bytes) -> None:
        """Bytes as they came, but for the end."""
        was_holding = self._end.holding
        if data := self._end.feed(data):
            self._connection.send(data)
        if self._end.holding and self._source is not None and not self._source.complete:
            if not was_holding:
                self._ping_later()
            if self._end.done:
                self._end_soon()

    def _sift(self, data: bytes) -> None:
        """The path whose speed counts: nearly every piece is whole events that nobody acts on."""
        if self.clear and calm(data):
            self._connection.send(data)
            return
        if self._filter is not None:
            data = self._filter.feed(data)
        self._pass_on(data)
        self.clear = self._end.idle and (self._filter is None or self._filter.idle)

    def _tell(self, data: bytes) -> None:
        """In the agent's own words. Translations close no tool call before `finish`; chat must be kept back."""
        done = data.rstrip().endswith((b"data: " + DONE, b"data:" + DONE))
        for event in self._events.feed(data):
            done = done or event.data.strip() == DONE
            if self._held is None and not self.wire.translates and self._watch.acts(event.data):
                self._held = []
                self._ping_later()
            self._tell_one(event.data)
        if done:
            self._end_soon()

    def _tell_one(self, data: bytes) -> None:
        told = self._told(data)
        if self._held is None:
            self._send(told)
        else:
            self._held.append(told)

    def _end_soon(self) -> None:
        if self._ending is None and self._source is not None:
            self._ending = asyncio.get_running_loop().call_later(AFTER_DONE_S, self._source.finish)

    # Ends.

    def _finish_passed_on(self, *, broken: bool) -> None:
        if broken:
            self._connection.cut()
        else:
            rest = self._end.feed(self._filter.end()) if self._filter else b""
            self._connection.finish(rest + self._end.end())

    def _finish_told(self, *, broken: bool, faulty: bool) -> None:
        for event in self._events.end():
            self._tell_one(event.data)
        ending = self.wire.ending(broken=broken, faulty=faulty)
        if ending is None:
            self._connection.cut()
        else:
            self._connection.finish(b"".join(self._held or ()) + ending)

    def _finish_broken(self) -> None:
        words = BROKE_OFF if self.status else "the model cannot be reached"
        if self._connection.begun:
            self._connection.finish(self.wire.cut(words))
        else:
            self.refuse(502, problem(words, "upstream_error"))

    def _finish_refused(self, body: bytes) -> None:
        if self._connection.begun:
            self._connection.finish(self.wire.cut_by(self.status, self.unpacked([body])))
        elif not self.wire.translates:
            self._connection.reply(self.status, body, self._headers)
        else:
            told = self.wire.error(self.status, self.unpacked([body]))
            self._connection.reply(self.status, told, {**self._kept_headers(), **JSON})

    def _finish_unstreamed(self, body: bytes, *, faulty: bool) -> None:
        """An answer that came whole, as the stream that the agent wants."""
        answer = object_of(body)
        streamed = body.lstrip().startswith(b"data:")  # whatever its head said
        if not streamed and not (answer or {}).get("choices"):
            self._finish_broken()
            return
        if not self._connection.begun:
            self._begin(_Nobody())
        if answer is None:
            self._tell(body)
            self._finish_told(broken=False, faulty=faulty)
            return
        told = b"".join(self.wire.event(chunk) for chunk in chunks_of(answer, usage=True))
        self._connection.finish(told + self.wire.finish())

    def _finish_whole(self, body: bytes) -> None:
        if not self.wire.translates:
            told = body if self.encoding else self.wire.whole_body(body)
            self._connection.reply(200, body if told is None else told, self._headers)
        elif (told := self.wire.whole_body(self.unpacked([body]))) is None:
            self._finish_broken()
        else:
            self._connection.reply(200, told)

    def _told(self, data: bytes) -> bytes:
        if data.strip() == DONE:
            return b""
        chunk = object_of(data)
        return b"" if chunk is None else self.wire.event(chunk)

    def _send(self, data: bytes) -> None:
        if data:
            self._connection.send(data)

    def _begin(self, source: Source) -> None:
        self._connection.begin(200, {**self._kept_headers(), **EVENTS}, source)

    def _kept_headers(self) -> dict[str, str]:
        return {name: value for name, value in self._headers.items() if name not in _ABOUT_BODY}

    def _ping_later(self) -> None:
        self._pinging = asyncio.get_running_loop().call_later(PING_S, self._ping)

    def _ping(self) -> None:
        self._ping_later()
        if not self._connection.begun:
            self._begin(_Nobody())
        self._send(self.wire.ping())


class _Nobody:
    """The source of an answer that is not being filled yet."""

    def pause(self) -> None:
        """There is nothing to hold up."""

    def resume(self) -> None:
        """Nor to go on with."""
