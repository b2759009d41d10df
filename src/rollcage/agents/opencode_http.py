"""HTTP to a port inside a box, from outside: each connection is the input and output of a small process in the box.

Works in every box that has bash. All that comes out of a box is hostile: it is bounded, and never waited for without
a deadline of the caller's.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import httptools

from rollcage.errors import AgentError
from rollcage.sandboxes.base import Process, Sandbox
from rollcage.types import JsonObject

USER = "opencode"
"""Who OpenCode's server takes its callers for."""
MAX_HEAD = 64 << 10
MAX_ANSWER = 64 << 20
MAX_EVENT = 16 << 20

# `exec` at the end: when the server closes the connection, the process is over, and whatever else it started.
_BRIDGE = 'exec 3<>"/dev/tcp/127.0.0.1/$0" || exit 7; exec 4<&0; cat <&4 >&3 & exec cat <&3'


class ServerGone(AgentError):
    """The agent's server does not answer, or not in a way that makes sense."""


class Answer(NamedTuple):
    """What the server answered."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; raises ServerGone for an error status or a body that is none."""
        if not 200 <= self.status < 300:
            said = self.body[:300].decode(errors="replace")
            raise ServerGone(f"the agent's server answered HTTP {self.status}: {said}")
        try:
            return json.loads(self.body or b"null")
        except (ValueError, RecursionError) as error:
            raise ServerGone("the agent's server answered with something that is no JSON") from error


class _Reader:
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

    def __init__(self, process: Process, password: str) -> None:
        self._process = process
        self._lock = anyio.Lock()
        token = b64encode(f"{USER}:{password}".encode()).decode()
        self._headers = f"host: box\r\nauthorization: Basic {token}\r\ncontent-type: application/json\r\n"

    @classmethod
    @asynccontextmanager
    async def open(cls, box: Sandbox, port: int, password: str) -> AsyncIterator[Channel]:
        """A connection to `port` on the box's loopback, for as long as the block lasts."""
        argv = ["bash", "--noprofile", "--norc", "-c", _BRIDGE, str(port)]
        async with box.spawn(argv) as process:
            yield cls(process, password)

    async def ask(self, method: str, path: str, body: JsonObject | None = None) -> Answer:
        """One request, and its whole answer."""
        async with self._lock:
            parser, reader = await self._send(method, path, body)
            head = 0
            while not reader.complete:
                head += await self._feed(parser)
                if reader.head and head > MAX_HEAD:
                    raise ServerGone("the agent's server answered with an endless head")
                if len(reader.body) > MAX_ANSWER:
                    raise ServerGone(f"the agent's server answered with more than {MAX_ANSWER >> 20} MB")
        return Answer(parser.get_status_code(), bytes(reader.body))

    async def events(self, path: str) -> AsyncGenerator[JsonObject, None]:
        """The server's own stream of events, until it ends it."""
        parser, reader = await self._send("GET", path, None)
        head = searched = 0
        while not reader.complete:
            head += await self._feed(parser)
            if reader.head:
                if head > MAX_HEAD:
                    raise ServerGone("the agent's server answered with an endless head")
                continue
            if parser.get_status_code() != 200:
                Answer(parser.get_status_code(), bytes(reader.body)).json()
            while (end := reader.body.find(b"\n\n", searched)) >= 0:
                event = bytes(reader.body[:end])
                del reader.body[: end + 2]
                searched = 0
                if (data := event_of(event)) is not None:
                    yield data
            # A large event that comes byte by byte must not be searched from its start each time.
            searched = max(0, len(reader.body) - 1)
            if len(reader.body) > MAX_EVENT:
                raise ServerGone(f"the agent's server sent an event of more than {MAX_EVENT >> 20} MB")

    async def _send(
        self, method: str, path: str, body: JsonObject | None
    ) -> tuple[httptools.HttpResponseParser, _Reader]:
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\n{self._headers}content-length: {len(data)}\r\n\r\n"
        try:
            await self._process.stdin.send(head.encode() + data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._gone()
        reader = _Reader()
        return httptools.HttpResponseParser(reader), reader

    async def _feed(self, parser: httptools.HttpResponseParser) -> int:
        try:
            chunk = await self._process.stdout.receive()
            parser.feed_data(chunk)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._gone()
        except httptools.HttpParserError as error:
            raise ServerGone(f"the agent's server does not speak HTTP ({error})") from error
        return len(chunk)

    async def _gone(self) -> None:
        # Raises SandboxLost where it is the box that went away.
        await self._process.wait()
        raise ServerGone("the agent's server closed the connection")


def event_of(block: bytes) -> JsonObject | None:
    """One server-sent event's JSON object; None where it is none."""
    lines = [line[5:].lstrip(b" ") for line in block.splitlines() if line.startswith(b"data:")]
    try:
        data = json.loads(b"\n".join(lines))
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
