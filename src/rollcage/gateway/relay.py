"""One model call: the agent's request goes up, the answer comes down piece by piece, and a copy of it becomes a turn.

Nothing is parsed while the answer flows, unless the agent speaks another language than the engine. Its last byte is
kept back until whoever keeps the turns has kept this one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from rollcage.gateway.bodies import Body
from rollcage.gateway.capture import Answer, Call, End
from rollcage.gateway.delivery import Delivery, unpacked
from rollcage.gateway.engines import Engine, Known, minds_stream, refused_field, wants_modern_cap
from rollcage.gateway.http import Connection, Request
from rollcage.gateway.policy import Origin, added, outgoing
from rollcage.gateway.probe import ASIDE_TIMEOUT_S, prompt_ids
from rollcage.gateway.upstream import Exchange, Target, Upstream, UpstreamError, headers_for
from rollcage.gateway.wires import CHAT_PATH
from rollcage.types import Endpoint, JsonObject, Limits, Purpose, Turn

HUNG_UP = "agent hung up"
SLICE = 16 << 10
"""Parsed at a stretch; between two slices other streams get their turn."""
AFTER_DONE_S = 1.0
"""How long an upstream may dawdle after `[DONE]` before the answer counts as complete without its end."""

SHORTEST_SECRET = 8
"""Shorter keys ("none", "x") are no secrets, and would be found everywhere."""

_REFUSALS = (400, 422)


@dataclass(frozen=True)
class Way:
    """What all calls of one lease have in common."""

    upstream: Upstream
    known: Known
    endpoint: Endpoint
    """The real one, key included."""
    limits: Limits
    parsing: asyncio.Lock
    """Held by the one call of the whole gateway that is being parsed: when many end together, streams still flow."""
    quiet: bool
    """Whether nothing is asked for or recorded (mode `black_box`)."""
    strip: bool = False
    """Whether streams, too, are rid of what their agent did not ask for, which costs a look at every chunk."""


class Relay:
    """A call on its way."""

    index = -1
    """Its place among the rollout's calls, once it is admitted."""
    origin = Origin(Purpose.AGENT, "", "")
    """Who made it, and what for."""
    _delivery: Delivery

    def __init__(self, way: Way, connection: Connection, request: Request) -> None:
        self._way, self._connection, self._request = way, connection, request
        self._started_at, self._clock = time.time(), time.perf_counter()
        self._task: asyncio.Task[object] | None = None
        self._exchange: Exchange | None = None
        self._engine = Engine()
        self._sent: JsonObject = {}
        self._prompt: asyncio.Task[tuple[int, ...]] | None = None
        self.pieces: list[bytes] = []
        """What the engine has answered so far."""
        self._held = b""
        """The end of a stream, kept back."""
        self._dawdling: asyncio.TimerHandle | None = None
        self._events = 0
        self._first_token_s: float | None = None
        self._cut_by: str | None = None
        self._broken: str | None = None
        self.settled = False
        """Whether no more will come."""

    async def answer(self, body: Body, delivery: Delivery, call: Call, *, spent: int) -> Turn:
        """Ask the model and pass on all of its answer but the end. The turn is whole, or says what broke it."""
        self._task = asyncio.current_task()
        self._delivery = delivery
        try:
            if self._cut_by is None:
                self._broken = await self._converse(body, spent)
        except UpstreamError as error:
            self._broken = f"no answer from the model: {error}"
        except asyncio.CancelledError:
            if self._prompt is not None:
                self._prompt.cancel()
            if self._cut_by is None or self._task is None:
                raise
            self._task.uncancel()
        finally:
            self.settled = True
            delivery.rest()
            if self._dawdling is not None:
                self._dawdling.cancel()
            if self._exchange is not None:
                self._exchange.release()
        if delivery.status != 200:
            self._hide_key()
        seconds = time.perf_counter() - self._clock
        call = replace(call, request=self._sent, started_at=self._started_at, advice=self._engine.advice)
        end = End(delivery.status, self._cut_by or self._broken, self._first_token_s, seconds)
        return await self._turn(call, end, await self._prompt_ids())

    def finish(self, turn: Turn) -> None:
        """The turn is kept: let the end of the answer go."""
        if self._cut_by is not None:
            self._connection.cut()
        else:
            self._delivery.finish(self.pieces, self._held, self._broken, turn.error)

    def fail(self) -> None:
        """The turn could not be kept: the agent must not take the answer for good."""
        self._delivery.fail()

    def cut(self, reason: str) -> None:
        """End it at once. What came until now is still the turn's."""
        if self.settled or self._cut_by is not None:
            return
        self._cut_by = reason
        if self._task is not None:
            self._task.cancel()

    @property
    def was_cut(self) -> bool:
        """Whether it was this side that ended it."""
        return self._cut_by is not None

    async def _converse(self, body: Body, spent: int) -> str | None:
        way, delivery = self._way, self._delivery
        known = engine = way.known.get(way.endpoint)
        if way.quiet:
            known = engine = engine.silenced()
        while True:
            self._engine = engine
            self._sent = outgoing(body.value, endpoint=way.endpoint, limits=way.limits, engine=engine, spent=spent)
            if body.value.get("stream") is True and self._sent.get("stream") is not True:
                delivery.keep_alive()
            if engine.tells_template and self._prompt is None and "prompt" not in self._sent:
                asked = prompt_ids(way.upstream, way.endpoint, self._sent)
                self._prompt = asyncio.get_running_loop().create_task(asked)
            exchange = self._exchange = await self._open(body)
            delivery.answered(exchange.status, exchange.headers)
            if exchange.status not in _REFUSALS:
                body.raw.clear()  # it will not be sent again
                if engine is not known:
                    way.known.learn(way.endpoint, engine)
                return await exchange.body(self._sink(exchange))
            broken = await exchange.body(self._keep)
            milder = _milder(engine, known, body.value, self._sent, b"".join(self.pieces))
            if milder is None or broken is not None:
                return broken
            engine = milder
            exchange.release()
            self._exchange, self.pieces = None, []
            delivery.answered(0, {})

    def _hide_key(self) -> None:
        """Some engines repeat the key they refuse; neither the box nor the log may see it."""
        key = self._way.endpoint.key.get_secret_value().encode()
        if len(key) < SHORTEST_SECRET:
            return
        plain = unpacked(b"".join(self.pieces), self._delivery.encoding)
        if key in plain:
            self.pieces = [plain.replace(key, b"[key]")]
            self._delivery.unpack()

    async def _open(self, body: Body) -> Exchange:
        endpoint = self._way.endpoint
        path = CHAT_PATH if self._delivery.translates else self._request.path.removeprefix("/v1")
        target = Target.of(endpoint.base_url, path)
        payload = msgspec.json.encode(body.spliced(self._sent))
        accepted = self._request.headers.get("accept", "*/*")
        headers = {**headers_for(endpoint), "Accept": accepted, "Content-Type": "application/json"}
        return await self._way.upstream.open(target, target.head("POST", headers, len(payload)), payload)

    def _sink(self, exchange: Exchange) -> Callable[[bytes], None]:
        """What becomes of each piece of the answer."""
        streams = self._sent.get("stream") is True
        if not streams or not self._delivery.flows(exchange, self._sent, strip=self._way.strip):
            return self._keep
        if self._delivery.tells:
            return self._tell
        return self._relay if self._delivery.filter is None else self._sift

    def _keep(self, data: bytes) -> None:
        """A piece of an answer that goes out as a whole."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._clock
        self.pieces.append(data)

    def _relay(self, data: bytes) -> None:
        """A piece of a stream that the agent gets byte by byte. This is the path whose speed counts."""
        self.pieces.append(data)
        if self._first_token_s is None:
            self._note_first(data)
        if self._held or data.find(b"[DONE]", -16) >= 0:
            data = self._hold(data)
        self._connection.send(data)

    def _sift(self, data: bytes) -> None:
        """A piece of a stream that the agent gets but for the count it did not ask for."""
        self.pieces.append(data)
        if self._first_token_s is None:
            self._note_first(data)
        if self._delivery.filter is not None:
            data = self._delivery.filter.feed(data)
        if self._held or data.find(b"[DONE]", -16) >= 0:
            data = self._hold(data)
        self._connection.send(data)

    def _tell(self, data: bytes) -> None:
        """A piece of a stream that the agent gets in other words."""
        self.pieces.append(data)
        if self._first_token_s is None:
            self._note_first(data)
        if b"[DONE]" in data[-16:]:
            self._dawdle()
        self._delivery.tell(data)

    def _note_first(self, data: bytes) -> None:
        # The first event says who speaks; the second brings the first token.
        self._events += data.count(b"data:")
        if self._events > 1:
            self._first_token_s = time.perf_counter() - self._clock

    def _hold(self, data: bytes) -> bytes:
        """Keep `[DONE]` back: many clients take it for the end and act on it."""
        start = 0 if self._held else data.rfind(b"data:")
        if not self._held and (start < 0 or data[start + 5 :].strip() != b"[DONE]"):
            return data
        self._held += data[start:]
        self._dawdle()
        return data[:start]

    def _dawdle(self) -> None:
        if self._dawdling is None and self._exchange is not None:
            self._dawdling = asyncio.get_running_loop().call_later(AFTER_DONE_S, self._exchange.finish)

    async def _prompt_ids(self) -> tuple[int, ...]:
        """What was asked beside the call. It has had all the time of the answer, and gets hardly more."""
        if self._prompt is None:
            return ()
        if self._broken is not None:
            self._prompt.cancel()
        await asyncio.wait((self._prompt,), timeout=ASIDE_TIMEOUT_S)
        if not self._prompt.done():
            self._prompt.cancel()
        good = self._prompt.done() and not self._prompt.cancelled() and self._prompt.exception() is None
        return self._prompt.result() if good else ()

    async def _turn(self, call: Call, end: End, prompt: tuple[int, ...]) -> Turn:
        body = unpacked(b"".join(self.pieces), self._delivery.encoding)
        answer = Answer()
        async with self._way.parsing:
            for start in range(0, len(body), SLICE):
                await asyncio.sleep(0)
                answer.feed(body[start : start + SLICE])
            return answer.turn(call, end, prompt)


def _milder(engine: Engine, known: Engine, body: JsonObject, sent: JsonObject, answer: bytes) -> Engine | None:
    """What to ask for instead, where a refusal names a field that we put in; null where it is the agent's affair."""
    if "max_tokens" in sent and "max_tokens" not in engine.refused and wants_modern_cap(answer):
        return engine.without("max_tokens")
    field = refused_field(answer, added(body, sent, engine))
    if field is None:
        return None
    if sent.get("stream") is True and field != "stream_options" and minds_stream(answer):
        return engine.without("stream")
    if "stream" in engine.refused - known.refused:
        # It was not the stream after all.
        engine = replace(engine, refused=engine.refused - {"stream"})
    return engine.without(field)
