"""Sessions and episodes of OpenEnv's clients: who is connected, who has gone, which episode a request belongs to.

OpenEnv's handlers do neither: they look at the socket only between two steps, and build a new environment for every
plain HTTP request.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs
from uuid import uuid4

import anyio

from rollcage.schema.openenv import OpenCodeState
from rollcage.server.auth import Caller, caller_of

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

PLAIN = frozenset({"/reset", "/step", "/state"})
"""The requests that come without a session."""
AHEAD = 64
"""Messages read ahead of a busy handler, so that the end of the connection is seen behind them."""
EPISODES = 1000
"""Episodes of plain HTTP that are remembered of each caller; the oldest is forgotten first."""
SHARE, LEAST_SESSIONS = 4, 8
"""One key may have every fourth session, but at least so many."""


@dataclass(frozen=True)
class ClientConnection:
    """Where the request that is being answered came from."""

    gone: anyio.Event = field(default_factory=anyio.Event)
    """Set when the client has closed the connection."""
    owner: str | None = None
    """Whose plain HTTP request this is (the name of a key); None for a request with a session."""
    episode_id: str | None = None
    """The episode that the request's address names."""


connection: ContextVar[ClientConnection | None] = ContextVar("connection", default=None)
"""Of the request that is being answered; None where there is none, as in a session's own thread."""


@dataclass
class Episode:
    """What happened since the last reset."""

    state: OpenCodeState = field(default_factory=lambda: OpenCodeState(episode_id=str(uuid4()), step_count=0))
    seed: int | None = None
    """The sampling seed of rollouts that name none."""
    counted: set[str] = field(default_factory=set)
    """The rollouts that are in the counts already."""

    @classmethod
    def new(cls, episode_id: str | None = None, seed: int | None = None) -> Episode:
        """An episode in which nothing has happened."""
        return cls(OpenCodeState(episode_id=episode_id or str(uuid4()), step_count=0), seed)


class Episodes:
    """The episodes of requests without a session, by whose they are and by their id."""

    def __init__(self) -> None:
        self._known: dict[str, OrderedDict[str, Episode]] = {}
        """The latest of each owner is the last."""

    def find(self, owner: str, episode_id: str | None) -> Episode:
        """The episode of that id, or the owner's latest; a new one where there is none."""
        known = self._known.get(owner, OrderedDict())
        wanted = episode_id or next(reversed(known), "")
        return known[wanted] if wanted in known else self.keep(owner, Episode.new(wanted))

    def keep(self, owner: str, episode: Episode) -> Episode:
        """Remember an episode as the owner's latest; whoever begins many forgets its own."""
        known = self._known.setdefault(owner, OrderedDict())
        episode_id = str(episode.state.episode_id)
        known[episode_id] = episode
        known.move_to_end(episode_id)
        if len(known) > EPISODES:
            known.popitem(last=False)
        return episode


class Sessions:
    """How many sessions each caller has; one key cannot take them all. Used on the event loop only."""

    def __init__(self, most: int) -> None:
        """`most`: sessions of all callers together."""
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, caller: Caller) -> tuple[int, int] | None:
        """Count one more; where the caller may have no more, how many it has and may have."""
        # Who has no name is the only caller there is.
        most = min(self._most, max(LEAST_SESSIONS, self._most // SHARE)) if caller.name else self._most
        if self._open[caller.name] >= most:
            return self._open[caller.name], most
        self._open[caller.name] += 1
        return None

    def leave(self, caller: Caller) -> None:
        """One less."""
        self._open[caller.name] -= 1


class ConnectionMiddleware:
    """Middleware: tells the environment where a request came from, and when its client is gone."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request or socket."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        here = _connection(scope)
        token = connection.set(here)
        wire = _Wire(receive, send, here.gone)
        broke: Exception | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wire.pump)
                try:
                    await self._app(scope, wire.receive, wire.send)
                except Exception as error:  # noqa: BLE001 - raised below: a task group would put it into a group
                    broke = error
                tasks.cancel_scope.cancel()
        finally:
            wire.close()
            connection.reset(token)
        if broke is not None:
            raise broke


class _Wire:
    """Reads what the client sends also while the handler is busy; says nothing more to a client that is gone."""

    def __init__(self, receive: Receive, send: Send, gone: anyio.Event) -> None:
        self._receive, self._send, self._gone = receive, send, gone
        self._ahead, self._behind = anyio.create_memory_object_stream[Message](AHEAD)
        self._last: Message = {"type": "http.disconnect"}
        self._broke: Exception | None = None

    def close(self) -> None:
        """Nobody reads any more."""
        self._ahead.close()
        self._behind.close()

    async def receive(self) -> Message:
        """The next message, in order; the last one, which says that it is over, again and again."""
        try:
            return await self._behind.receive()
        except anyio.EndOfStream:
            if self._broke is not None:
                raise self._broke from None
            return self._last

    async def send(self, message: Message) -> None:
        """As long as anybody is there."""
        if not self._gone.is_set():
            await self._send(_discreet(message))

    async def pump(self) -> None:
        """Read until the client is gone."""
        while not self._gone.is_set():
            try:
                self._last = await self._receive()
            except Exception as error:  # noqa: BLE001 - it is the handler's to deal with, which reads behind us
                self._broke = error
                break
            if self._last["type"] in ("http.disconnect", "websocket.disconnect"):
                self._gone.set()
            await self._ahead.send(self._last)
        self._ahead.close()


def _discreet(message: Message) -> Message:
    """A frame without what OpenEnv repeats of a frame it could not read: there may be a key in it."""
    text = message.get("text")
    if not isinstance(text, str) or "Invalid" not in text[:200]:
        return message
    frame = json.loads(text)
    match frame:
        case {"type": "error", "data": {"errors": list(errors)}}:
            frame["data"]["errors"] = [{key: each.get(key) for key in ("type", "loc", "msg")} for each in errors]
        case {"error": {"message": str(said)}} | {"data": {"error": {"message": str(said)}}}:
            (frame.get("error") or frame["data"]["error"])["message"] = said.splitlines()[0]
    return {**message, "text": json.dumps(frame)}


def _connection(scope: Scope) -> ClientConnection:
    if scope["type"] != "http" or scope["path"].rstrip("/") not in PLAIN:
        return ClientConnection()
    named = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("episode_id")
    return ClientConnection(owner=caller_of(scope).name, episode_id=named[0][:255] if named else None)
