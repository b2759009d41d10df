"""What one rollout gets of the gateway: an address in its box, a key of its own, and a log of its calls."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import time
from collections.abc import Awaitable, Callable

import msgspec

from rollcage.gateway.http import Connection, Request
from rollcage.gateway.policy import limit_reached, problem, refusal
from rollcage.gateway.relay import HUNG_UP, Relay, Way
from rollcage.gateway.shapes import object_of
from rollcage.types import Endpoint, Turn

MODEL = "model"
"""The name a box knows every model by: agents choose prompts and tools by the model's name."""
CONNECTIONS = 256
"""How many a box may have open: it must not use up the descriptors of everybody."""
INBOUND_LIMIT = 256 << 20
"""How much a box may have us hold of what it sends, on all its connections together."""
ENDED = "cut off: the agent's time with the model was over"

Record = Callable[[Turn], Awaitable[None]]
"""Keeps a turn for good before it returns."""

_ROUTES = {"/v1/chat/completions": "POST", "/v1/completions": "POST", "/v1/models": "GET", f"/v1/models/{MODEL}": "GET"}


class Lease:
    """A rollout's own access to a model; it ends with the block that lent it."""

    endpoint: Endpoint
    """What the box may know: an address of its own, a key that is worth nothing elsewhere, a neutral model name."""
    turns: int
    """Calls that have ended, broken ones included."""
    generated_tokens: int
    """Tokens the model has generated in all of them, as the engine counted."""
    last_failure: Turn | None
    """The last call that broke upstream, if no good one came after it."""

    limit_reached: str
    """The limit that a call was refused for, in words; empty where none was."""

    def __init__(self, way: Way, sock: socket.socket, record: Record) -> None:
        self._way, self._sock, self._record = way, sock, record
        self._key = f"sk-{secrets.token_urlsafe(24)}"
        self.endpoint = Endpoint.model_validate({"base_url": _address(sock), "model": MODEL, "key": self._key})
        self.turns = self.generated_tokens = 0
        self.last_failure = None
        self.limit_reached = ""
        self._index = self._answered = 0
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
            connection.reply(401, problem("incorrect API key provided"))
        elif allowed is None:
            connection.reply(404, problem(f"unknown path: {request.path[:200]}"))
        elif request.method == "OPTIONS":
            connection.reply(200, headers={"Allow": f"{allowed}, OPTIONS"})
        elif request.method != allowed and (request.method, allowed) != ("HEAD", "GET"):
            refused = problem(f"method {request.method} is not allowed here")
            connection.reply(405, refused, {"Content-Type": "application/json", "Allow": allowed})
        elif allowed == "GET":
            connection.reply(200, _models(one=request.path != "/v1/models"))
        else:
            self._start(connection, request)

    def _start(self, connection: Connection, request: Request) -> None:
        relay = self._relays[connection] = Relay(self._way, connection, request)
        task = asyncio.get_running_loop().create_task(self._serve(relay, connection, request))
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._served(done, connection))

    async def _serve(self, relay: Relay, connection: Connection, request: Request) -> None:
        if relay.was_cut:
            return
        body = object_of(request.body)
        request.body = b""
        limits = self._way.limits
        under_way = self._answered + len(self._relays) - 1
        if body is None:
            refused: bytes | None = problem("the body is no JSON object")
        elif self.failure is not None:
            refused = problem("the log of this rollout cannot be written")
        else:
            reached = limit_reached(limits, turns=under_way, spent=self.generated_tokens)
            refused = refusal(limits, turns=under_way, spent=self.generated_tokens)
            self.limit_reached = self.limit_reached or reached
        if refused is not None or body is None:
            self._relays.pop(connection, None)
            connection.reply(400, refused or b"")
            return
        index, self._index = self._index, self._index + 1
        turn = await relay.answer(body, index=index, spent=self.generated_tokens)
        try:
            self._count(turn, hung_up=relay.was_cut)
            if not self._way.quiet:
                await self._record(turn)
        except Exception as error:  # noqa: BLE001 - whatever it is, it leaves the block that lent this
            self.failure = self.failure or error
            self._relays.pop(connection, None)
            relay.fail()
        else:
            self._relays.pop(connection, None)
            relay.finish()

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
        self.turns += 1
        self._answered += turn.status == 200
        self.generated_tokens += counted if isinstance(counted, int) else len(turn.tokens)
        if turn.error is None:
            self.last_failure = None
        elif not hung_up:
            self.last_failure = turn


def _address(sock: socket.socket) -> str:
    """Where the box finds the gateway: each box has a loopback of its own."""
    return "http://localhost/v1" if sock.family == socket.AF_UNIX else f"http://127.0.0.1:{sock.getsockname()[1]}/v1"


def _key_in(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _models(*, one: bool) -> bytes:
    row = {"id": MODEL, "object": "model", "created": int(time.time()), "owned_by": "rollcage"}
    return msgspec.json.encode(row if one else {"object": "list", "data": [row]})
