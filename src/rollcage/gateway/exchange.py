"""One model call: the agent's request goes up, the answer comes down piece by piece, and a copy of it becomes a turn.

Nothing is parsed on the way of a piece, unless the agent speaks another language than the engine; what has left is read
in portions. The last byte is kept back until whoever keeps the turns has kept this one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from rollcage.gateway.bodies import Body, SharedParts
from rollcage.gateway.capture import AnswerEnd, ModelCall, Spoken, TurnBuilder, portions
from rollcage.gateway.delivery import Delivery
from rollcage.gateway.engines import Engine, KnownEngines
from rollcage.gateway.exact import ExactPrompts
from rollcage.gateway.history import PromptPlan
from rollcage.gateway.hold import LARGE
from rollcage.gateway.http_out import ModelConnection, Target, Upstream, UpstreamError, headers_for, too_long
from rollcage.gateway.pause import CallGate
from rollcage.gateway.policy import milder, outgoing
from rollcage.gateway.probe import OPTIONAL_TIMEOUT_S, prompt_ids
from rollcage.gateway.replicas import Route
from rollcage.gateway.usual import framed
from rollcage.types import KEY_REPEATED, Endpoint, JsonObject, Limits, Turn, TurnHistory

SHORTEST_SECRET = 8
"""Shorter keys ("none", "x") are no secrets, and would be found everywhere."""

HIDDEN = b"[key]"

READ_AT = 12 << 10
"""When so much of a stream has come, it is read: about a dozen tokens with their alternatives."""
READ_S = 0.5
"""Not sooner than this after the last time: quick streams are read at their end, which costs less."""

_REFUSALS = (400, 422)


@dataclass(frozen=True)
class ExchangeContext:
    """What all calls of one lease have in common."""

    upstream: Upstream
    known: KnownEngines
    endpoint: Endpoint
    """The real one, key included."""
    limits: Limits
    parsing: asyncio.Lock
    """Held by the one call of the whole gateway that is being parsed: when many end together, streams still flow."""
    quiet: bool
    """Whether nothing is asked for or recorded (mode `black_box`)."""
    strip: bool = False
    """Whether streams, too, are rid of what their agent did not ask for, which costs a look at every chunk."""
    exact: ExactPrompts | None = None
    """Makes prompts that continue the sampled tokens, where that is asked for."""
    gate: CallGate = field(default_factory=CallGate)
    """Where calls wait while weights are changed."""
    route: Route | None = None
    """Where the model is now, where it has several addresses."""
    shared: SharedParts = field(default_factory=SharedParts)
    """What the requests of all leases have in common."""
    heads: dict[tuple[str, str], bytes] = field(default_factory=dict)
    """Heads of requests by address and what the agent accepts, but for the length of the body."""


class Exchange:
    """A model call that was admitted, from the request to the logged turn. It is built whole, and runs once."""

    def __init__(
        self, context: ExchangeContext, call: ModelCall, body: Body, delivery: Delivery, *, accept: str, began: float
    ) -> None:
        """`body`: the request as one of chat completions. `began`: when it came, by `time.perf_counter`."""
        self.call = call
        """What was known of it when it began."""
        self.pieces: list[bytes] = []
        """What the engine has answered so far, but for what was read already."""
        self.spoken = Spoken()
        """What was said in what was read already."""
        self._builder, self._unread, self._read_at = TurnBuilder(), 0, READ_AT
        self._last_read = began
        self.settled = False
        """Whether no more will come."""
        self.left = False
        """Whether the agent left when all of the answer was there and its end not yet let go."""
        self.paused = False
        """Whether a pause of the gateway cut it."""
        self._context, self._body, self._delivery = context, body, delivery
        self._accept, self._began = accept, began
        self._engine = Engine()
        self._sent: JsonObject = {}
        self._plan: PromptPlan | TurnHistory | None = None
        """The prompt, or why it is the engine's own; None where nobody asked for another."""
        self._task: asyncio.Task[object] | None = None
        self._connection: ModelConnection | None = None
        self._prompt: asyncio.Task[tuple[int, ...]] | None = None
        key = context.endpoint.key.get_secret_value().strip().encode()
        self._key = key if len(key) >= SHORTEST_SECRET else b""
        self._repeats_key = False
        self._tail = b""
        """The end of a stream so far, where it may be the beginning of the key."""
        self._deliver: Callable[[bytes], None] | None = None
        self._events = 0
        self._first_token_s: float | None = None
        self._cut_by: str | None = None
        self._broken: str | None = None

    async def run(self, keep: Callable[[Exchange, Turn], Awaitable[bool]], *, spent: int) -> None:
        """Ask the model, pass on all of its answer but the end, have the turn kept, let the end go.

        `keep` puts the turn into the log; false where it could not. `spent` is what the model has generated so far.
        """
        turn = await self._answer(spent)
        if not await keep(self, turn):
            self._delivery.fail()
        elif self._cut_by is not None:
            if not self.repeats:
                self._delivery.cut()
        else:
            # What broke after the answer was whole broke nothing: the log and the agent have the same.
            broken = self._broken is not None and turn.error is not None
            self._delivery.finish(self.pieces, broken=broken, faulty=turn.error is not None)

    def cut(self, reason: str) -> bool:
        """End it at once; false where it had ended. What came until now is still the turn's."""
        if self.settled or self._cut_by is not None:
            return False
        self._cut_by = reason
        if self._task is not None:
            self._task.cancel()
        return True

    def pause(self, reason: str) -> bool:
        """As `cut`, by a pause of the gateway: it may be asked again."""
        self.paused = self.cut(reason)
        return self.paused

    @property
    def repeats(self) -> bool:
        """Whether a pause cut it before the agent had heard anything: it is asked again without the agent."""
        return self.paused and self._cut_by is not None and not self._delivery.begun

    @property
    def was_cut(self) -> bool:
        """Whether it was this side that ended it."""
        return self._cut_by is not None

    async def _answer(self, spent: int) -> Turn:
        """The turn, whole or with what broke it. All of the answer but its end is with the agent."""
        self._task = asyncio.current_task()
        try:
            self._broken = await self._converse(spent)
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
            self._delivery.rest()
            if self._connection is not None:
                self._connection.release()
        plain = await self._plain()
        seconds = time.perf_counter() - self._began
        fault = self._cut_by or self._broken
        end = AnswerEnd(self._delivery.status, fault, self._first_token_s, seconds, cut=self.was_cut)
        return await self._turn(plain, end, await self._prompt_ids())

    async def _converse(self, spent: int) -> str | None:
        """Ask until the engine takes it, and pass on what it says; returns what broke that, where something did."""
        context, body, delivery = self._context, self._body, self._delivery
        known = engine = context.known.get(context.endpoint)
        if context.quiet:
            known = engine = engine.silenced()
        while True:
            self._engine = engine
            self._sent = outgoing(
                body.value, endpoint=context.endpoint, limits=context.limits, engine=engine, spent=spent
            )
            if context.exact is not None and self._plan is None:
                self._plan = await context.exact.plan(self._sent, engine, body.large)
            if body.value.get("stream") is True and self._sent.get("stream") is not True:
                delivery.keep_alive()
            if engine.tells_template and self._prompt is None and "prompt" not in self._sent:
                asked = prompt_ids(context.upstream, context.endpoint, self._sent)
                self._prompt = asyncio.get_running_loop().create_task(asked)
            connection = self._connection = await self._open()
            delivery.answered(connection.status, connection.headers)
            if connection.status not in _REFUSALS:
                body.raw.clear()  # it will not be sent again
                if engine is not known:
                    context.known.learn(context.endpoint, engine)
                broken = await connection.body(*self._sinks(connection))
                if self._tail and self._deliver is not None:
                    self.pieces.append(self._tail)
                    self._deliver(self._tail)
                return broken
            broken = await connection.body(self._keep)
            if isinstance(self._plan, PromptPlan) and self._plan.ids and broken is None:
                self._plan = self._plan.plain(f"the engine refused its ids (HTTP {connection.status})")
                self._begin_again(connection)
                continue
            other = milder(engine, known, body.value, self._sent, b"".join(self.pieces))
            if other is None or broken is not None:
                return broken
            engine = other
            self._begin_again(connection)

    def _begin_again(self, connection: ModelConnection) -> None:
        connection.release()
        self._connection, self.pieces = None, []
        self._delivery.answered(0, {})

    async def _open(self) -> ModelConnection:
        endpoint, route = self._context.endpoint, self._context.route
        body = self._body.spliced(self._sent)
        if isinstance(self._plan, PromptPlan) and self._plan.ids:
            for name, value in self._engine.prompted(self._plan.ids).items():
                before = body.get(name)
                body[name] = before | value if isinstance(before, dict) and isinstance(value, dict) else value
        encode = functools.partial(msgspec.json.encode, body)
        payload = await asyncio.to_thread(encode) if self._body.large else encode()
        while True:
            target = Target.of(endpoint.base_url if route is None else route.base_url, self._delivery.wire.path)
            try:
                return await self._context.upstream.open(target, self._head(target, len(payload)), payload)
            except UpstreamError:
                # The agent has heard nothing: another address of the same model may answer.
                if route is None or not route.move():
                    raise

    def _head(self, target: Target, length: int) -> bytes:
        endpoint = self._context.endpoint
        heads, kind = self._context.heads, (f"{target.origin}{target.path}", self._accept)
        if (head := heads.get(kind)) is None:
            headers = {**headers_for(endpoint), "Accept": self._accept, "Content-Type": "application/json"}
            heads.clear()  # an agent says the same each time; one that does not must not fill our memory
            head = heads[kind] = target.head("POST", headers, None).removesuffix(b"\r\n")
        return head + b"Content-Length: %d\r\n\r\n" % length

    def _sinks(self, connection: ModelConnection) -> tuple[Callable[[bytes], None], Callable[[bytes], bool] | None]:
        """What becomes of each piece of the answer, and the shortcut of whole chunks."""
        streams = self._sent.get("stream") is True
        delivery = self._delivery
        deliver = delivery.stream(connection, self._sent, strip=self._context.strip) if streams else None
        if deliver is None:
            return self._keep, None
        hide, key, relay = self._hide_key if self._key else None, self._key, delivery.relay

        def pass_on(data: bytes) -> None:
            """A piece of a stream."""
            if hide is not None:
                data = hide(data)
            if self._first_token_s is None:
                self._note_first(data)
            self.pieces.append(data)
            deliver(data)
            self._unread += len(data)
            if self._unread > self._read_at:
                self._read_on()

        def pass_chunks_on(chunks: bytes) -> bool:
            """Chunks as they came, where they may leave so. This is the path whose speed counts."""
            if self._tail or not delivery.clear or (data := framed(chunks, key)) is None:
                return False
            if self._first_token_s is None:
                self._note_first(data)
            self.pieces.append(data)
            relay(chunks, data)
            self._unread += len(data)
            if self._unread > self._read_at:
                self._read_on()
            return True

        self._deliver = deliver
        return pass_on, pass_chunks_on

    def _read_on(self) -> None:
        """Read the events that have come: as columns they take a sixth. What is large is read when all is there."""
        now = time.perf_counter()
        if self._unread > 2 * LARGE or now - self._last_read < READ_S:
            self._read_at = self._unread + READ_AT
            return
        data = b"".join(self.pieces)
        end = data.rfind(b"\n\n") + 2
        self._read_at = READ_AT
        if end < READ_AT // 2:
            self._read_at = 2 * len(data)  # an event is on its way that is larger
        else:
            self._builder.feed(data[:end])
            self._last_read = now
            self.pieces, self._unread = [data[end:]] if end < len(data) else [], len(data) - end
            self.spoken = self._builder.rest()

    def _hide_key(self, data: bytes) -> bytes:
        """A piece of a stream without the key. An end that may be the key's beginning waits for the next piece."""
        if not self._tail and data.endswith(b"\n") and self._key not in data:
            return data
        data, self._tail = self._tail + data, b""
        if self._key in data:
            data, self._repeats_key = data.replace(self._key, HIDDEN), True
        begun = next((n for n in range(len(self._key) - 1, 0, -1) if data.endswith(self._key[:n])), 0)
        data, self._tail = data[: len(data) - begun], data[len(data) - begun :]
        return data

    def _keep(self, data: bytes) -> None:
        """A piece of an answer that goes out as a whole."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._began
        self.pieces.append(data)

    def _note_first(self, data: bytes) -> None:
        # The first event says who speaks; the second brings the first token.
        self._events += data.count(b"data:")
        if self._events > 1:
            self._first_token_s = time.perf_counter() - self._began

    async def _plain(self) -> list[bytes]:
        """The answer as it is read: unpacked, as far as it may go, and without the key."""
        if self._deliver is not None:
            return self.pieces  # passed on piece by piece, each unpacked and without the key
        limit, unpacked = self._context.upstream.answer_limit, self._delivery.unpacked
        large = sum(map(len, self.pieces)) > LARGE
        # Joining and unpacking let go of the interpreter.
        plain = await asyncio.to_thread(unpacked, self.pieces) if large else unpacked(self.pieces)
        if len(plain) > limit and self._delivery.encoding:
            self._broken = self._broken or too_long(limit)
            plain = plain[:limit]
        if self._key and self._key in plain:
            # Some engines repeat the key they refuse; neither the box nor the log may see it.
            plain = plain.replace(self._key, HIDDEN)
            self.pieces, self._repeats_key = [plain], True
            self._delivery.unpack()
        return [plain]

    async def _prompt_ids(self) -> tuple[int, ...]:
        """What was asked beside the call. It has had all the time of the answer, and gets hardly more."""
        if self._prompt is None:
            return ()
        if self._broken is not None:
            self._prompt.cancel()
        await asyncio.wait((self._prompt,), timeout=OPTIONAL_TIMEOUT_S)
        if not self._prompt.done():
            self._prompt.cancel()
        good = self._prompt.done() and not self._prompt.cancelled() and self._prompt.exception() is None
        return self._prompt.result() if good else ()

    async def _turn(self, pieces: list[bytes], end: AnswerEnd, prompt: tuple[int, ...]) -> Turn:
        self.call.request, self.call.advice = self._sent, self._engine.advice
        answer, large = self._builder, False
        async with self._context.parsing:
            for number, portion in enumerate(portions(pieces)):
                if number:
                    await asyncio.sleep(0)
                if answer.half > LARGE:
                    large = True
                    await asyncio.to_thread(answer.feed, portion)
                else:
                    answer.feed(portion)
            done = functools.partial(answer.turn, self.call, end, prompt)
            turn = await asyncio.to_thread(done) if large or answer.unread > LARGE else done()
        if self._repeats_key:
            turn = turn.model_copy(update={"trainable": False, "untrainable_reason": KEY_REPEATED})
        exact = self._context.exact
        return turn if exact is None or self._plan is None else exact.learn(self._plan, turn, self._engine)
