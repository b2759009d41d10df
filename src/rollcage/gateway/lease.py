"""What one rollout gets of the gateway: an address in its box, a key of its own, and a log of its calls."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

from rollcage.gateway.bodies import Body, read
from rollcage.gateway.budget import BROKEN_CALLS, Budget
from rollcage.gateway.capture import Call
from rollcage.gateway.chat import ChatWire
from rollcage.gateway.delivery import Delivery
from rollcage.gateway.http import Connection, Request
from rollcage.gateway.live import Delta, deltas
from rollcage.gateway.policy import limit_reached, origin_of, problem
from rollcage.gateway.relay import HUNG_UP, Relay, Way
from rollcage.gateway.retries import Attempt, Attempts
from rollcage.gateway.wires import COUNT_PATH, PATHS, BadRequest, Wire, token_count, wire_for
from rollcage.types import Endpoint, JsonObject, Turn

MODEL = "model"
"""The name a box knows every model by: agents choose prompts and tools by the model's name."""
CONNECTIONS = 256
"""How many a box may have open: it must not use up the descriptors of everybody."""
INBOUND_LIMIT = 256 << 20
"""How much a box may have us hold of what it sends, on all its connections together."""
ENDED = "cut off: the agent's time with the model was over"

Record = Callable[[Turn], Awaitable[None]]
"""Keeps a turn for good before it returns."""

_CALLS = ("/v1/chat/completions", "/v1/completions", *PATHS, COUNT_PATH)
_ROUTES = {**dict.fromkeys(_CALLS, "POST"), "/v1/models": "GET", f"/v1/models/{MODEL}": "GET"}


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
    last_failure: Turn | None
    """The last call that broke upstream, if no good one came after it."""

    limit_reached: str
    """The limit that a call was refused for, in words; empty where none was."""

    def __init__(self, way: Way, sock: socket.socket, record: Record) -> None:
        self._way, self._sock, self._record = way, sock, record
        self._key = f"sk-{secrets.token_urlsafe(24)}"
        self.endpoint = Endpoint.model_validate({"base_url": _address(sock), "model": MODEL, "key": self._key})
        self.turns = self.generated_tokens = 0
        self.answers = 0
        self.last_failure = None
        self._spoken: set[bool] = set()
        self.limit_reached = ""
        self._index = self._answered = self._running = 0
        self._attempts = Attempts()
        self.budget = Budget()
        """What calls that come to nothing may still put into the log."""
        self._connections: set[Connection] = set()
        self._relays: dict[Connection, Relay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._closed = False
        self._gone = asyncio.Event()
        self.failure: Exception | None = None

    async def open(self) -> None:
        """Start to serve."""
        loop = asyncio.get_running_loop()
        if self._sock.family == socket.AF_UNIX:
            self._server = await loop.create_unix_server(lambda: Connection(self), sock=self._sock, backlog=CONNECTIONS)
        else:
            self._server = await loop.create_server(lambda: Connection(self), sock=self._sock, backlog=CONNECTIONS)

    async def close(self) -> None:
        """Void the key, cut everything, record what was captured. Nothing is recorded afterwards."""
        self._closed = True
        if self._server is not None:
            self._server.close()
        for relay in list(self._relays.values()):
            relay.cut(ENDED)
        for connection in list(self._connections):
            connection.cut()
        while self._tasks:
            await asyncio.wait(self._tasks)
        if self._connections:
            await self._gone.wait()
        if self._server is not None:
            await self._server.wait_closed()

    # What the server side tells.

    def connected(self, connection: Connection) -> bool:
        """A client is there; false turns it away."""
        self._connections.add(connection)
        return not self._closed and len(self._connections) <= CONNECTIONS

    def disconnected(self, connection: Connection) -> None:
        """A client is gone: its call is cut."""
        self._connections.discard(connection)
        relay = self._relays.pop(connection, None)
        if relay is not None:
            relay.cut(HUNG_UP)
        if self._closed and not self._connections:
            self._gone.set()

    def has_room(self) -> bool:
        """Whether what the box has sent and is not yet passed on may grow further."""
        return sum(connection.held for connection in self._connections) <= INBOUND_LIMIT

    def requested(self, connection: Connection, request: Request) -> None:
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
        return deltas(self._relays.values, lambda: self._closed)

    def _start(self, connection: Connection, request: Request) -> None:
        relay = self._relays[connection] = Relay(self._way, connection, request)
        task = asyncio.get_running_loop().create_task(self._serve(relay, connection, request))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._served(done, connection))

    async def _serve(self, relay: Relay, connection: Connection, request: Request) -> None:
        body = None if relay.was_cut else await read(request.body)
        if relay.was_cut:
            return
        size, request.body = len(request.body), b""
        asked: JsonObject = {} if body is None else body.value
        wire = _wire(request, asked) or ChatWire(asked)
        delivery = Delivery(connection, wire, stream=asked.get("stream") is True)
        try:
            if body is None:
                raise BadRequest("the body is no JSON object, or has too many parts")
            if request.path == COUNT_PATH:
                counted = token_count(asked)
                self._relays.pop(connection, None)
                connection.reply(200, counted)
                return
            chat = body if isinstance(wire, ChatWire) else Body(wire.chat_request())
            self._admit()
        except BadRequest as error:
            self._relays.pop(connection, None)
            delivery.refuse(400, error.body)
            return
        call = self._begin(relay, request, chat.value, size)
        turn = await relay.answer(chat, delivery, call, spent=self.generated_tokens)
        await self._end(relay, connection, turn)

    def _begin(self, relay: Relay, request: Request, chat: JsonObject, size: int) -> Call:
        relay.index, self._index = self._index, self._index + 1
        relay.origin = origin_of(request.headers, chat)
        self._running += 1
        attempt = Attempt(relay.index, relay.origin.session, chat, size, lambda: relay.was_cut)
        return Call(
            index=relay.index,
            request={},
            replaces=self._attempts.begin(attempt, request.headers),
            streamed=chat.get("stream") is True,
            **relay.origin._asdict(),
        )

    async def _end(self, relay: Relay, connection: Connection, turn: Turn) -> None:
        self._attempts.end(turn.index, broken=turn.error is not None)
        try:
            self._count(turn, hung_up=relay.was_cut)
            if not self._way.quiet:
                await self._record(await self.budget.kept(turn))
        except Exception as error:  # noqa: BLE001 - whatever it is, it leaves the block that lent this
            self.failure = self.failure or error
            self._relays.pop(connection, None)
            relay.fail()
        else:
            self._relays.pop(connection, None)
            relay.finish(turn)

    def _admit(self) -> None:
        """Raises BadRequest where the call is one too many."""
        if self.failure is not None:
            raise BadRequest("the log of this rollout cannot be written")
        if self.budget.calls >= BROKEN_CALLS:
            raise BadRequest(f"{BROKEN_CALLS} model calls of this rollout have failed; no more are made")
        turns = self._answered + self._running
        if reached := limit_reached(self._way.limits, turns=turns, spent=self.generated_tokens):
            self.limit_reached = self.limit_reached or reached
            raise BadRequest(reached)

    def _served(self, task: asyncio.Task[None], connection: Connection) -> None:
        self._tasks.discard(task)
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
        legacy = "prompt" in turn.request
        if turn.error is None:
            self.answers += 1
            self.last_failure = None
            self._spoken.add(legacy)
        elif not hung_up and (not self._spoken or legacy in self._spoken):
            # An engine that answers chats and knows no completions has not failed: an agent asked in order to say so.
            self.last_failure = turn


def _address(sock: socket.socket) -> str:
    """Where the box finds the gateway: each box has a loopback of its own."""
    if sock.family != socket.AF_UNIX:
        return f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
    # One that stands for a port in a box is named after it.
    name = str(sock.getsockname()).rpartition("/")[2]
    return f"http://127.0.0.1:{name}/v1" if name.isdigit() else "http://localhost/v1"


def _key_in(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _wire(request: Request, body: JsonObject) -> Wire | None:
    path = PATHS[0] if request.path == COUNT_PATH else request.path
    return wire_for(path, body, model=MODEL, id=secrets.token_hex(12), created=int(time.time()))


def _shaped(request: Request, status: int, body: bytes) -> bytes:
    """An error body in the shape that whoever asked expects."""
    wire = _wire(request, {})
    return body if wire is None else wire.error(status, body)


def _models(*, one: bool) -> bytes:
    row = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "rollcage"}
    row |= {"type": "model", "display_name": MODEL, "created_at": "2026-01-01T00:00:00Z"}  # for Anthropic's clients
    page = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
    return msgspec.json.encode(row if one else {"object": "list", "data": [row], **page})
