"""A small server that puts a wire in front of an engine, for tests: what the gateway does, without the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rollcage.gateway.wires import COUNT_PATH, BadRequest, Wire, token_count, wire_for
from rollcage.types import Endpoint, JsonObject
from support.scripted_client import ask


@dataclass
class Reply:
    """What an engine answered: chunks of a stream, or a body; a stream may be broken."""

    chunks: list[JsonObject] | None = None
    status: int = 200
    body: bytes = b""
    whole: bool = True


Engine = Callable[[JsonObject], Awaitable[Reply]]


@dataclass
class WireServer:
    """One agent's server."""

    port: int
    engine: Engine
    bodies: list[tuple[str, dict[str, str], JsonObject]] = field(default_factory=list)
    """What agents sent: path, headers, body."""
    chats: list[JsonObject] = field(default_factory=list)
    """What the engine was sent."""
    notes: list[tuple[str, ...]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            method, target, headers = await _head(reader)
            body = json.loads(await reader.readexactly(int(headers.get("content-length", "0"))) or b"{}")
            self.bodies.append((f"{method} {target}", headers, body))
            await self._answer(writer, target, body)
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, target: str, body: JsonObject) -> None:
        wire = wire_for(target, body, model="model", id=f"test{len(self.bodies)}", created=1_700_000_000)
        if target.partition("?")[0] == COUNT_PATH:
            _send(writer, 200, "application/json", token_count(body))
            return
        if wire is None:
            _send(writer, 404, "application/json", b'{"error":{"message":"unknown path"}}')
            return
        try:
            chat = wire.chat_request()
        except BadRequest as error:
            _send(writer, 400, "application/json", wire.error(400, error.body))
            return
        self.chats.append(chat)
        self.notes.append(wire.notes)
        reply = await self.engine(chat)
        if reply.chunks is None:
            text = wire.whole(json.loads(reply.body)) if reply.status == 200 else wire.error(reply.status, reply.body)
            _send(writer, reply.status, "application/json", text)
        else:
            _send(writer, 200, "text/event-stream", streamed(wire, reply.chunks, whole=reply.whole, pings=True))


def streamed(wire: Wire, chunks: list[JsonObject], *, whole: bool = True, pings: bool = False) -> bytes:
    """Everything a wire says of a stream."""
    out = [wire.ping()] if pings else []
    for chunk in chunks:
        out.append(wire.event(chunk))
        if pings:
            out.append(wire.ping())
    out.append(wire.finish() if whole else wire.cut("the model's answer broke off"))
    return b"".join(out)


@asynccontextmanager
async def wire_server(engine: Engine) -> AsyncIterator[WireServer]:
    """Serve on loopback until the block ends."""
    served = WireServer(0, engine)
    server = await asyncio.start_server(served.serve, "127.0.0.1", 0, limit=1 << 24)
    served.port = server.sockets[0].getsockname()[1]
    try:
        yield served
    finally:
        server.close()
        await server.wait_closed()


def scripted(endpoint: Endpoint) -> Engine:
    """A scripted model as the engine."""

    async def engine(chat: JsonObject) -> Reply:
        answer = await ask(endpoint, {**chat, "model": endpoint.model})
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return Reply(answer.chunks, whole=answer.whole)
        return Reply(status=answer.status or 502, body=answer.body)

    return engine


def canned(*replies: Reply) -> Engine:
    """Answers that were written beforehand, one after the other."""
    left = iter(replies)

    async def engine(chat: JsonObject) -> Reply:
        return next(left)

    return engine


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
    method, target, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return method, target, headers


def _send(writer: asyncio.StreamWriter, status: int, kind: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
