"""Stands in front of everything the server offers: lets in whom `auth` admits, bounds bodies, logs requests."""

from __future__ import annotations

import json
import logging
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress

import anyio
from anyio.lowlevel import checkpoint
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollcage.schema.errors import Unauthorized
from rollcage.server.auth import SCOPE, Forbidden, Keys, admitted, current_caller
from rollcage.server.parts import MOST_PARTS, PartCounter
from rollcage.server.problems import answer_to, refusal

log = logging.getLogger("rollcage.server.requests")

ROUTES = re.compile(
    r"^/(health|ready|metrics|docs|openapi\.json|mcp|ws|reset|step|state|schema|metadata|web|page|rollouts|environments)(?=/|$)"
)
BELOW = re.compile(r"^/rollouts/[^/]*(/(?:events|turns|trace|files|messages|result))?$")
ID = re.compile(r"^[A-Za-z0-9._-]{1,64}$")

DRAIN, DRAIN_S = 64 << 20, 5.0
AT_ONCE = 256 << 10
"""Bytes of a socket's frame that are looked at between two turns of the others."""

Answered = Callable[[str, str, int], None]
"""Counts a request: method, route, status."""


class _TooLarge(Exception):
    """Of a body; the message is for the caller."""


class Gate:
    """Lets requests through to an app: those with a key, or, where there are none, those of this machine's user."""

    def __init__(
        self, app: ASGIApp, *, keys: Keys, only_loopback: bool, max_body: int, answered: Answered | None = None
    ) -> None:
        """`only_loopback`: the server listens there only, so that a request under another name is an attack."""
        self._app, self._keys, self._only_loopback = app, keys, only_loopback
        self._max_body = max_body
        self._answered = answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speak ASGI."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        visit = _Visit(scope)
        refused = self._refused(scope)
        try:
            if refused is not None:
                await _refuse(refused, scope, receive, visit.sending(send))
            else:
                await self._let_in(visit, receive, send)
        finally:
            if self._answered:
                self._answered(visit.method, visit.route, visit.status)
            visit.tell()

    def _refused(self, scope: Scope) -> Response | None:
        """The refusal, where there is one; else the scope has the caller."""
        try:
            scope[SCOPE] = admitted(scope, self._keys, only_loopback=self._only_loopback)
        except Forbidden as error:
            return refusal(403, "forbidden", str(error))
        except Unauthorized as error:
            return answer_to(error)
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body:
            return _too_large(self._words)
        return None

    @property
    def _words(self) -> str:
        return f"the body is larger than this server takes ({self._max_body >> 20} MiB)"

    async def _let_in(self, visit: _Visit, receive: Receive, send: Send) -> None:
        size, refused, counter = 0, "", PartCounter()
        answer = visit.sending(send)

        async def counted() -> Message:
            nonlocal size, refused
            message = await receive()
            if message["type"] == "http.request":
                body = message.get("body", b"")
                size += len(body)
                refused = self._words if size > self._max_body else "" if counter.takes(body) else _TOO_MANY
                if refused:
                    raise _TooLarge(refused)
            elif message["type"] == "websocket.receive" and not await _takes(message):
                await answer({"type": "websocket.close", "code": 1009, "reason": _TOO_MANY})
                return {"type": "websocket.disconnect", "code": 1009, "reason": _TOO_MANY}
            return message

        async def unless_too_large(message: Message) -> None:
            # Frameworks have answers of their own to a body that breaks off.
            if not refused or visit.status:
                await answer(message)

        token = current_caller.set(visit.scope[SCOPE]) if SCOPE in visit.scope else None
        try:
            with suppress(_TooLarge):
                await self._app(visit.scope, counted, unless_too_large)
            if refused and not visit.status:
                await _refuse(_too_large(refused), visit.scope, receive, answer)
        finally:
            if token is not None:
                current_caller.reset(token)


_TOO_MANY = f"the body has more parts than this server takes ({MOST_PARTS})"


async def _takes(frame: Message) -> bool:
    """Whether a frame of a socket has no more parts than it may have."""
    data = frame.get("bytes") or (frame.get("text") or "").encode(errors="replace")
    counter = PartCounter()
    for at in range(0, len(data), AT_ONCE):
        if at:
            await checkpoint()
        if not counter.takes(data[at : at + AT_ONCE]):
            return False
    return True


def _too_large(words: str) -> Response:
    return refusal(413, "too_large", words, headers={"Connection": "close"})


async def _refuse(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        if answer.status_code == 413:
            await _drain(receive)
        await answer(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": 1008, "reason": "refused"})


async def _drain(receive: Receive) -> None:
    """Read on for a while: whoever still sends when the connection closes never sees the answer."""
    left = DRAIN
    with anyio.move_on_after(DRAIN_S):
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body"):
                return


class _Visit:
    """One request: its id, what became of it, how long it took. Never a header, a query or a body."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.method: str = scope.get("method", "WS")
        self.status = 0
        given = Headers(scope=scope).get("x-request-id", "")
        self.id = given if ID.match(given) else secrets.token_hex(8)
        self._began = time.perf_counter()

    @property
    def route(self) -> str:
        """The kind of address, of which there are few."""
        path: str = self.scope["path"]
        if below := BELOW.match(path):
            return f"/rollouts/{{rollout_id}}{below[1] or ''}"
        known = ROUTES.match(path)
        return f"/{known[1]}" if known else "other"

    def sending(self, send: Send) -> Send:
        """The same `send`, watched."""

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = self.id
                headers.setdefault("X-Content-Type-Options", "nosniff")
            elif message["type"] == "websocket.accept":
                self.status = 101
            elif message["type"] == "websocket.close" and not self.status:
                self.status = 403
            await send(message)

        return watched

    def tell(self) -> None:
        """One line in the log."""
        if log.isEnabledFor(logging.INFO):
            caller = self.scope.get(SCOPE)
            line = {
                "time": round(time.time(), 3),
                "request_id": self.id,
                "caller": getattr(caller, "name", ""),
                "method": self.method,
                "path": self.scope["path"][:200],
                "status": self.status,
                "ms": round((time.perf_counter() - self._began) * 1000, 1),
            }
            log.info(json.dumps(line))
