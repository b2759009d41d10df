"""One model call: the agent's request goes up, the answer comes down piece by piece, and a copy of it becomes a turn.

Nothing is parsed while the answer flows. Its last byte is kept back until whoever keeps the turns has kept this one.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass

import msgspec

from rollcage.gateway.capture import Answer, Call, End
from rollcage.gateway.engines import Engine, Known, refused_field, wants_modern_cap
from rollcage.gateway.http import Connection, Request
from rollcage.gateway.policy import added, origin_of, outgoing, problem
from rollcage.gateway.upstream import Exchange, Target, Upstream, UpstreamError, headers_for
from rollcage.types import Endpoint, JsonObject, Limits, Turn

HUNG_UP = "agent hung up"
SLICE = 64 << 10
"""Parsed at a stretch; between two slices other streams get their turn."""
UNPACKED_LIMIT = 256 << 20
AFTER_DONE_S = 1.0
"""How long an upstream may dawdle after `[DONE]` before the answer counts as complete without its end."""

_PASSED_ON = ("content-type", "content-encoding", "retry-after", "retry-after-ms", "x-should-retry", "x-request-id")
_REFUSALS = (400, 422)


@dataclass(frozen=True)
class Way:
    """What all calls of one lease have in common."""

    upstream: Upstream
    known: Known
    endpoint: Endpoint
    """The real one, key included."""
    limits: Limits
    quiet: bool
    """Whether nothing is asked for or recorded (mode `black_box`)."""


class Relay:
    """A call on its way."""

    def __init__(self, way: Way, connection: Connection, request: Request) -> None:
        self._way, self._connection, self._request = way, connection, request
        self._started_at, self._clock = time.time(), time.perf_counter()
        self._task: asyncio.Task[object] | None = None
        self._exchange: Exchange | None = None
        self._sent: JsonObject = {}
        self._status = 0
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []
        self._held = b""
        self._dawdling: asyncio.TimerHandle | None = None
        self._events = 0
        self._first_token_s: float | None = None
        self._cut_by: str | None = None
        self._broken: str | None = None
        self._settled = False

    async def answer(self, body: JsonObject, *, index: int, spent: int) -> Turn:
        """Ask the model and pass on all of its answer but the end. The turn is whole, or says what broke it."""
        self._task = asyncio.current_task()
        try:
            if self._cut_by is None:
                self._broken = await self._converse(body, spent)
        except UpstreamError as error:
            self._broken = f"no answer from the model: {error}"
        except asyncio.CancelledError:
            if self._cut_by is None or self._task is None:
                raise
            self._task.uncancel()
        finally:
            self._settled = True
            if self._dawdling is not None:
                self._dawdling.cancel()
            if self._exchange is not None:
                self._exchange.release()
        origin = origin_of(self._request.headers, body)
        call = Call(
            index=index,
            request=self._sent,
            streamed=body.get("stream") is True,
            purpose=origin.purpose,
            session=origin.session,
            parent_session=origin.parent_session,
            started_at=self._started_at,
        )
        seconds = time.perf_counter() - self._clock
        return await self._turn(call, End(self._status, self._cut_by or self._broken, self._first_token_s, seconds))

    def finish(self) -> None:
        """The turn is kept: let the end of the answer go."""
        if self._cut_by is not None:
            self._connection.cut()
        elif self._connection.begun:
            if self._broken is None:
                self._connection.finish(self._held)
            else:
                self._connection.cut()
        elif self._broken is None:
            self._connection.reply(self._status, b"".join(self._pieces), self._headers)
        elif self._status:
            self._connection.reply(502, problem("the model's answer broke off", "upstream_error"))
        else:
            self._connection.reply(502, problem("the model cannot be reached", "upstream_error"))

    def fail(self) -> None:
        """The turn could not be kept: the agent must not take the answer for good."""
        if self._connection.begun:
            self._connection.cut()
        else:
            self._connection.reply(500, problem("the answer could not be recorded", "server_error"))

    def cut(self, reason: str) -> None:
        """End it at once. What came until now is still the turn's."""
        if self._settled or self._cut_by is not None:
            return
        self._cut_by = reason
        if self._task is not None:
            self._task.cancel()

    @property
    def was_cut(self) -> bool:
        """Whether it was this side that ended it."""
        return self._cut_by is not None

    async def _converse(self, body: JsonObject, spent: int) -> str | None:
        way = self._way
        known = engine = way.known.get(way.endpoint)
        if way.quiet:
            known = engine = engine.silenced()
        while True:
            self._sent = outgoing(body, endpoint=way.endpoint, limits=way.limits, engine=engine, spent=spent)
            exchange = self._exchange = await self._open(self._sent)
            self._status = exchange.status
            self._headers = {name: exchange.headers[name] for name in _PASSED_ON if name in exchange.headers}
            if exchange.status not in _REFUSALS:
                if engine is not known:
                    way.known.learn(way.endpoint, engine)
                return await self._pass_on(exchange)
            broken = await exchange.body(self._keep)
            milder = _milder(engine, body, self._sent, b"".join(self._pieces))
            if milder is None or broken is not None:
                return broken
            engine = milder
            exchange.release()
            self._exchange, self._pieces, self._status = None, [], 0

    async def _open(self, sent: JsonObject) -> Exchange:
        endpoint = self._way.endpoint
        target = Target.of(endpoint.base_url, self._request.path.removeprefix("/v1"))
        payload = msgspec.json.encode(sent)
        accepted = self._request.headers.get("accept", "*/*")
        headers = {**headers_for(endpoint), "Accept": accepted, "Content-Type": "application/json"}
        return await self._way.upstream.open(target, target.head("POST", headers, len(payload)), payload)

    async def _pass_on(self, exchange: Exchange) -> str | None:
        kind = self._headers.get("content-type", "")
        if self._sent.get("stream") is not True or exchange.status != 200 or "json" in kind:
            return await exchange.body(self._keep)
        self._connection.begin(exchange.status, {**self._headers, "Cache-Control": "no-cache"}, exchange)
        return await exchange.body(self._relay)

    def _keep(self, data: bytes) -> None:
        """A piece of an answer that goes out as a whole."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._clock
        self._pieces.append(data)

    def _relay(self, data: bytes) -> None:
        """A piece of a stream. The one place where the agent's bytes could be made to differ from the engine's."""
        self._pieces.append(data)
        if self._first_token_s is None:
            # The first event says who speaks; the second brings the first token.
            self._events += data.count(b"data:")
            if self._events > 1:
                self._first_token_s = time.perf_counter() - self._clock
        if self._held or b"[DONE]" in data[-16:]:
            data = self._hold(data)
        self._connection.send(data)

    def _hold(self, data: bytes) -> bytes:
        """Keep `[DONE]` back: many clients take it for the end and act on it."""
        start = 0 if self._held else data.rfind(b"data:")
        if not self._held and (start < 0 or data[start + 5 :].strip() != b"[DONE]"):
            return data
        self._held += data[start:]
        if self._dawdling is None and self._exchange is not None:
            self._dawdling = asyncio.get_running_loop().call_later(AFTER_DONE_S, self._exchange.finish)
        return data[:start]

    async def _turn(self, call: Call, end: End) -> Turn:
        body = _unpacked(b"".join(self._pieces), self._headers.get("content-encoding", ""))
        answer = Answer()
        for start in range(0, len(body), SLICE):
            if start:
                await asyncio.sleep(0)
            answer.feed(body[start : start + SLICE])
        return answer.turn(call, end)


def _milder(engine: Engine, body: JsonObject, sent: JsonObject, answer: bytes) -> Engine | None:
    """What to ask for instead, where a refusal names a field that we put in; null where it is the agent's affair."""
    if "max_tokens" in sent and "max_tokens" not in engine.refused and wants_modern_cap(answer):
        return engine.without("max_tokens")
    field = refused_field(answer, added(body, sent, engine))
    return None if field is None else engine.without(field)


def _unpacked(body: bytes, encoding: str) -> bytes:
    if encoding not in ("gzip", "deflate"):
        return body
    try:
        return zlib.decompressobj(wbits=47).decompress(body, UNPACKED_LIMIT)
    except zlib.error:
        return body
