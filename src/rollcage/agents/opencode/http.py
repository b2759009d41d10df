"""HTTP to a port inside a box, from outside: by a socket where the box can give one, else each connection is the input
and output of a small process in the box, which works in every box that has bash.

All that comes out of a box is hostile: it is bounded, and never waited for without
a deadline of the caller's.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import anyio
import httptools

from rollcage.errors import AgentError, SandboxError, SandboxLost
from rollcage.sandboxes.base import SHELL, Connection, Reachable, Sandbox
from rollcage.sse import EventReader
from rollcage.types import JsonObject

USER = "opencode"
"""Who OpenCode's server takes its callers for."""
MAX_HEAD = 64 << 10
MAX_ANSWER = 1 << 20
MAX_EVENT = 4 << 20
"""Reading JSON holds up everything else in this process, and costs many times its size: larger events are skipped."""
MAX_STREAM = 256 << 20
"""What is read of one stream of events; the rest is thrown away."""
EVENT_COST = 256
"""What each event counts beyond its size."""
SKIPPED, STREAM_LIMIT = "rollcage.skipped", "rollcage.stream_limit"
"""Types of events of our own: one was too large; no more are read."""

# `exec` at the end: when the server closes the connection, the process is over, and whatever else it started.
_BRIDGE = 'exec 3<>"/dev/tcp/127.0.0.1/$0" || exit 7; exec 4<&0; cat <&4 >&3 & exec cat <&3'


class ServerGone(AgentError):
    """The agent's server does not answer, or not in a way that makes sense."""


class AnswerTooLong(ServerGone):
    """The agent's server has more to say than anybody would listen to."""


class ServerAnswer(NamedTuple):
    """What the server answered."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; raises ServerGone for an error status or a body that is not JSON."""
        if not 200 <= self.status < 300:
            said = self.body[:300].decode(errors="replace")
            raise ServerGone(f"the agent's server answered HTTP {self.status}: {said}")
        try:
            return json.loads(self.body or b"null")
        except (ValueError, RecursionError) as error:
            raise ServerGone("the agent's server answered with something that is no JSON") from error


class _AnswerParser:
    """The callbacks of the parser: one answer at a time."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.head = True
        self.complete = False

    def on_headers_complete(self) -> None:
        self.head = False

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class Channel:
    """One HTTP/1.1 connection: requests wait for each other."""

    def __init__(self, connection: Connection, password: str) -> None:
        self._connection = connection
        self._lock = anyio.Lock()
        token = b64encode(f"{USER}:{password}".encode()).decode()
        self._headers = f"host: box\r\nauthorization: Basic {token}\r\ncontent-type: application/json\r\n"

    @classmethod
    @asynccontextmanager
    async def open(cls, box: Sandbox, port: int, password: str) -> AsyncIterator[Channel]:
        """A connection to `port` on the box's loopback, for as long as the block lasts."""
        if isinstance(box, Reachable):
            async with AsyncExitStack() as stack:
                try:
                    connection = await stack.enter_async_context(box.connect(port))
                except SandboxLost:
                    raise
                except SandboxError as error:
                    raise ServerGone(f"the agent's server does not answer: {error}") from error
                yield cls(connection, password)
            return
        argv = [*SHELL, _BRIDGE, str(port)]
        async with box.spawn(argv) as process:
            yield cls(process, password)

    async def ask(
        self, method: str, path: str, body: JsonObject | None = None, *, limit: int = MAX_ANSWER
    ) -> ServerAnswer:
        """One request, and its whole answer; TooLarge where that has more than `limit` bytes."""
        async with self._lock:
            parser, reader = await self._send(method, path, body)
            head = 0
            while not reader.complete:
                head += await self._feed(parser)
                if reader.head and head > MAX_HEAD:
                    raise ServerGone("the agent's server answered with an endless head")
                if len(reader.body) > limit:
                    raise AnswerTooLong(f"the agent's server answered with more than {limit >> 20} MB")
        return ServerAnswer(parser.get_status_code(), bytes(reader.body))

    async def events(self, path: str) -> AsyncGenerator[JsonObject, None]:
        """The server's own stream of events, until it ends it; events that are too large or too many are left out."""
        parser, reader = await self._send("GET", path, None)
        events = EventReader(limit=MAX_EVENT)
        head, left, skipped, limit_reached = 0, MAX_STREAM, 0, False
        while not reader.complete:
            head += await self._feed(parser)
            if reader.head:
                if head > MAX_HEAD:
                    raise ServerGone("the agent's server answered with an endless head")
                continue
            if parser.get_status_code() != 200:
                ServerAnswer(parser.get_status_code(), bytes(reader.body)).json()
            for event in events.feed(bytes(reader.body) if left > 0 else b""):
                if (data := object_in(event.data)) is not None:
                    yield data
                left -= len(event.data) + EVENT_COST
                if left <= 0:
                    break
            reader.body.clear()
            if events.skipped > skipped == 0:
                yield {"type": SKIPPED}
            left, skipped = left - EVENT_COST * (events.skipped - skipped), events.skipped
            if left <= 0 and not limit_reached:
                limit_reached = True
                yield {"type": STREAM_LIMIT}

    async def _send(
        self, method: str, path: str, body: JsonObject | None
    ) -> tuple[httptools.HttpResponseParser, _AnswerParser]:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}content-length: {len(data)}\r\n\r\n"
        try:
            await self._connection.stdin.send(head.encode() + data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._gone()
        reader = _AnswerParser()
        return httptools.HttpResponseParser(reader), reader

    async def _feed(self, parser: httptools.HttpResponseParser) -> int:
        try:
            chunk = await self._connection.stdout.receive()
            parser.feed_data(chunk)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._gone()
        except httptools.HttpParserError as error:
            raise ServerGone(f"the agent's server does not speak HTTP ({error})") from error
        return len(chunk)

    async def _gone(self) -> None:
        # Raises SandboxLost where it is the box that went away.
        await self._connection.wait()
        raise ServerGone("the agent's server closed the connection")


def object_in(data: bytes) -> JsonObject | None:
    """The JSON object that an event carries; None where it carries none."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
