"""What one rollout gets of the gateway: an address in its box, a key of its own, and a log of its calls."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from rollcage.gateway.bodies import LARGE, Body, joined, read
from rollcage.gateway.budget import BROKEN_CALLS, Budget
from rollcage.gateway.capture import AnswerEnd, ModelCall, turn_of
from rollcage.gateway.delivery import Delivery
from rollcage.gateway.exchange import Exchange, ExchangeContext
from rollcage.gateway.http_in import AgentConnection, AgentRequest
from rollcage.gateway.live import Delta, deltas
from rollcage.gateway.policy import limit_reached, problem
from rollcage.gateway.replicas import Route
from rollcage.gateway.retries import Attempt, Attempts
from rollcage.gateway.wires import COUNT_PATH, PATHS, BadRequest, ChatWire, Wire, token_count, wire_for
from rollcage.types import CallClassifier, CallOrigin, Endpoint, JsonObject, Turn

MODEL = "model"
"""The name a box knows every model by: agents choose prompts and tools by the model's name."""
CONNECTIONS = 256
"""How many a box may have open: it must not use up the descriptors of everybody."""
INBOUND_LIMIT = 256 << 20
"""How much a box may have us hold of what it sends, on all its connections together."""
LONGEST_SESSION = 200
"""Characters of a session's name that are kept: a box can send long headers, and each would be logged."""
HUNG_UP = "agent hung up"
ENDED = "cut off: the agent's time with the model was over"

Record = Callable[[Turn], Awaitable[None]]
"""Keeps a turn for good before it returns."""

_CALLS = ("/v1/chat/completions", "/v1/completions", *PATHS, COUNT_PATH)
_ROUTES = {**dict.fromkeys(_CALLS, "POST"), "/v1/models": "GET", f"/v1/models/{MODEL}": "GET"}


def one_agent(headers: Mapping[str, str], body: JsonObject) -> CallOrigin:
    """Every call is the agent's own, in one conversation."""
    return CallOrigin()


class Lease:
    """A rollout's own access to a model; it ends with the block that lent it."""

    endpoint: Endpoint
    """What the box may know: an address of its own, a key that is worth nothing elsewhere, a neutral model name."""
    turns: int
    """Calls that have ended, broken ones included."""
    generated_tokens: int
    """Tokens the model has generated in all of them, as the engine counted."""
    answers: int
    """Calls that got a whole answer."""
    heard: bool
    """Whether the model has said anything at all, be it half an answer."""
    last_failure: Turn | None
    """The last call that broke upstream, if no good one came after it."""

    route: Route | None = None
    """Where the model is now, where it has several addresses."""
    policy_version: str
    """The weights that are asked: stamped on each call when it begins."""
    limit_reached: str
    """The limit that a call was refused for, in words; empty where none was."""

    def __init__(self, context: ExchangeContext, sock: socket.socket, record: Record, classify: CallClassifier) -> None:
        self._context, self._sock, self._record, self._classify = context, sock, record, classify
        self._key = f"sk-{secrets.token_urlsafe(24)}"
        self.endpoint = Endpoint.model_validate({"base_url": _address(sock), "model": MODEL, "key": self._key})
        self.turns = self.generated_tokens = 0
        self.answers = 0
        self.heard = False
        self.last_failure = None
        self._spoken: set[bool] = set()
        self.limit_reached = self.policy_version = ""
        self._index = self._answered = self._running = 0
        self._attempts = Attempts()
        self.budget = Budget()
        """What calls that come to nothing may still put into the log."""
        self._connections: set[AgentConnection] = set()
        self._tasks: dict[asyncio.Task[None], AgentConnection] = {}
        """Requests that are being answered."""
        self._exchanges: dict[AgentConnection, Exchange] = {}
        """Model calls among them."""
        self._server: asyncio.Server | None = None
        self._closed = False
        self._paused = 0
        self.on_pause: Callable[[bool], None] = lambda waits: None
        """Told when calls begin to wait for the end of a pause, and when none waits any more."""
        self._gone = asyncio.Event()
        self.failure: Exception | None = None

    def go_on_from(self, earlier: Lease) -> None:
        """Number calls, and count them and their tokens, where an ended lease of the same rollout stopped."""
        self._index, self._answered = earlier._index, earlier._answered
        self.generated_tokens = earlier.generated_tokens

    async def open(self) -> None:
        """Start to serve."""
        loop = asyncio.get_running_loop()
        serve = loop.create_unix_server if self._sock.family == socket.AF_UNIX else loop.create_server
        self._server = await serve(lambda: AgentConnection(self), sock=self._sock, backlog=CONNECTIONS)

    async def close(self) -> None:
        """Void the key, cut everything, record what was captured. Nothing is recorded afterwards."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            self._abandon(connection, ENDED)
            connection.cut()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._connections:
            await self._gone.wait()
        if self._server is not None:
            await self._server.wait_closed()

    # What the server side tells.

    def connected(self, connection: AgentConnection) -> bool:
        """A client is there; false turns it away."""
        self._connections.add(connection)
        return not self._closed and len(self._connections) <= CONNECTIONS

    def disconnected(self, connection: AgentConnection) -> None:
        """A client is gone: its call is cut."""
        self._connections.discard(connection)
        self._abandon(connection, HUNG_UP)
        if self._closed and not self._connections:
            self._gone.set()

    def has_room(self) -> bool:
        """Whether what the box has sent and is not yet passed on may grow further."""
        return sum(connection.held for connection in self._connections) <= INBOUND_LIMIT

    def requested(self, connection: AgentConnection, request: AgentRequest) -> None:
        """A whole request is in."""
        allowed = _ROUTES.get(request.path)
        if not hmac.compare_digest(_key_in(request).encode(), self._key.encode()):
            connection.reply(401, _shaped(request, 401, problem("incorrect API key provided")))
        elif allowed is None:
            connection.reply(404, problem(f"unknown path: {request.path[:200]}"))
        elif request.method == "OPTIONS":
            connection.reply(200, headers={"Allow": f"{allowed}, OPTIONS"})
        elif request.method != allowed and (request.method, allowed) != ("HEAD", "GET"):
            refused = _shaped(request, 405, problem(f"method {request.method} is not allowed here"))
            connection.reply(405, refused, {"Content-Type": "application/json", "Allow": allowed})
        elif allowed == "GET":
            connection.reply(200, _models(one=request.path != "/v1/models"))
        else:
            self._start(connection, request)

    def watch(self) -> AsyncIterator[Delta]:
        """What the model says, as it says it, until the lease ends."""
        return deltas(self._exchanges.values, lambda: self._closed)

    def _start(self, connection: AgentConnection, request: AgentRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(connection, request))
        self._tasks[task] = connection
        task.add_done_callback(self._served)

    async def _serve(self, connection: AgentConnection, request: AgentRequest) -> None:
        """Answer a request for words of the model: read it, admit it, run it."""
        began, started_at = time.perf_counter(), time.time()
        body = await read(await joined(request.body))
        request.body.clear()
        asked: JsonObject = {} if body is None else body.value
        if request.size <= LARGE:
            self._context.shared.share(asked)
        wire = _wire(request, asked)
        delivery = Delivery(
            connection, wire, stream=asked.get("stream") is True, answer_limit=self._context.upstream.answer_limit
        )
        try:
            if body is None:
                raise BadRequest("the body is no JSON object, or has too many parts")
            if request.path == COUNT_PATH:
                connection.reply(200, token_count(asked))
                return
            chat = wire.chat_request()
            repeats = True
            while repeats:
                late = await self._pass_gate()
                self._admit()
                call = self._begin(request.headers, chat, request.size, started_at)
                if late is not None:
                    call.request = chat
                    await self._give_up(call, delivery, late, time.perf_counter() - began)
                    return
                exchange = self._exchanges[connection] = Exchange(
                    self._context,
                    call,
                    body if chat is body.value else Body(chat),
                    delivery,
                    accept=request.headers.get("accept", "*/*"),
                    began=began,
                )
                await self._run(connection, exchange)
                # By a pause of the gateway, and the agent has heard nothing of it: it need not ask again.
                repeats = exchange.repeats and not self._closed and connection in self._connections
        except BadRequest as error:
            delivery.refuse(400, error.body)

    async def _run(self, connection: AgentConnection, exchange: Exchange) -> None:
        gate = self._context.gate
        gate.begin(exchange, exchange.pause)
        try:
            await exchange.run(
                lambda exchange, turn: self._keep(connection, exchange, turn), spent=self.generated_tokens
            )
        finally:
            gate.end(exchange)

    async def _pass_gate(self) -> float | None:
        """Wait while the gateway is paused; the agent's time stands still. How long, where it was too long."""
        gate = self._context.gate
        if not gate.paused:
            return None
        self._paused += 1
        if self._paused == 1:
            self.on_pause(True)
        try:
            return await gate.enter()
        finally:
            self._paused -= 1
            if not self._paused:
                self.on_pause(False)

    async def _give_up(self, call: ModelCall, delivery: Delivery, waited: float, seconds: float) -> None:
        """The call has waited for the end of a pause for as long as it may: it failed, and no model was asked."""
        error = f"no answer from the model: the gateway was paused for more than {waited:g} s"
        turn = turn_of(call, b"", AnswerEnd(503, error, seconds=seconds))
        self._count(turn, hung_up=False)
        self._attempts.end(turn.index, broken=True)
        if not self._context.quiet:
            await self._record(await self.budget.kept(turn))
        delivery.refuse(503, problem(error, "server_error"))

    def _begin(self, headers: Mapping[str, str], chat: JsonObject, size: int, started_at: float) -> ModelCall:
        """The next call of the rollout."""
        index, self._index = self._index, self._index + 1
        self._running += 1
        origin = self._classify(headers, chat)
        session, parent = origin.session[:LONGEST_SESSION], origin.parent_session[:LONGEST_SESSION]
        return ModelCall(
            index=index,
            request={},
            replaces=self._attempts.begin(Attempt(index, session, chat, size), headers),
            streamed=chat.get("stream") is True,
            purpose=origin.purpose,
            session=session,
            parent_session=parent,
            policy_version=self.policy_version,
            started_at=started_at,
        )

    async def _keep(self, connection: AgentConnection, exchange: Exchange, turn: Turn) -> bool:
        """Put a turn into the log; false where that failed. Then the connection is free for the next request."""
        try:
            self._count(turn, hung_up=exchange.was_cut and not exchange.paused)
            if not self._context.quiet:
                await self._record(await self.budget.kept(turn))
        except Exception as error:  # noqa: BLE001 - whatever it is, it leaves the block that lent this
            self.failure = self.failure or error
            return False
        finally:
            self._exchanges.pop(connection, None)
            self._attempts.end(turn.index, broken=turn.error is not None or exchange.left)
        return True

    def _abandon(self, connection: AgentConnection, reason: str) -> None:
        """Whatever is being answered on this connection is in vain."""
        exchange = self._exchanges.get(connection)
        if exchange is not None:
            exchange.left = not exchange.cut(reason)
            self._attempts.leave(exchange.call.index)
            return
        for task, served in self._tasks.items():
            if served is connection:
                task.cancel()  # its body is still being read: no model was asked

    def _admit(self) -> None:
        """Raises BadRequest where the call is one too many."""
        if self.failure is not None:
            raise BadRequest("the log of this rollout cannot be written")
        if self.budget.calls >= BROKEN_CALLS:
            raise BadRequest(f"{BROKEN_CALLS} model calls of this rollout have failed; no more are made")
        turns = self._answered + self._running
        if reached := limit_reached(self._context.limits, turns=turns, spent=self.generated_tokens):
            self.limit_reached = self.limit_reached or reached
            raise BadRequest(reached)

    def _served(self, task: asyncio.Task[None]) -> None:
        connection = self._tasks.pop(task)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, Exception):
            self.failure = self.failure or error
            connection.cut()

    def _count(self, turn: Turn, *, hung_up: bool) -> None:
        counted = turn.usage.get("completion_tokens")
        self._running -= 1
        self.turns += 1
        self._answered += turn.status == 200
        self.generated_tokens += counted if isinstance(counted, int) else len(turn.tokens)
        self.heard = self.heard or turn.error is None or (turn.first_token_s is not None and turn.status == 200)
        legacy = "prompt" in turn.request
        if turn.error is None:
            self.answers += 1
            self.last_failure = None
            self._spoken.add(legacy)
        elif not hung_up and (not self._spoken or legacy in self._spoken):
            # An engine that answers chats and knows no completions has not failed: an agent asked in order to say so.
            self.last_failure = turn
        elif hung_up and turn.first_token_s is not None and turn.status == 200:
            self.last_failure = None  # it speaks again, and was not let finish


def _address(sock: socket.socket) -> str:
    """Where the box finds the gateway: each box has a loopback of its own."""
    if sock.family != socket.AF_UNIX:
        return f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    # One that stands for a port in a box is named after it.
    name = str(sock.getsockname()).rpartition("/")[2]
    return f"http://127.0.0.1:{name}/v1" if name.isdigit() else "http://localhost/v1"


def _key_in(request: AgentRequest) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _wire(request: AgentRequest, body: JsonObject) -> Wire:
    path = PATHS[0] if request.path == COUNT_PATH else request.path
    if path not in PATHS:
        return ChatWire(body, path.removeprefix("/v1"))
    wire = wire_for(path, body, model=MODEL, id=secrets.token_hex(12), created=int(time.time()))
    assert wire is not None
    return wire


def _shaped(request: AgentRequest, status: int, body: bytes) -> bytes:
    """An error body in the shape that whoever asked expects."""
    return _wire(request, {}).error(status, body)


def _models(*, one: bool) -> bytes:
    row = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "rollcage"}
    row |= {"type": "model", "display_name": MODEL, "created_at": "2026-01-01T00:00:00Z"}  # for Anthropic's clients
    page = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return msgspec.json.encode(row if one else {"object": "list", "data": [row], **page})
