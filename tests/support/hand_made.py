"""Models made by hand: small asyncio servers that misbehave on purpose, and a raw client for the gateway."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

from rollcage.agents.opencode import purpose
from rollcage.gateway import Gateway, Lease
from rollcage.types import Endpoint, Limits, Turn

LOOPS = [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})]
"""What the gateway must run on."""


@dataclass
class Asked:
    """A request as it came over the wire."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class HandMade:
    """A server that answers every request with a function."""

    answer: Answer
    port: int = 0
    scheme: str = "http"
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)

    def endpoint(self, **fields: Any) -> Endpoint:
        base = {"base_url": f"{self.scheme}://127.0.0.1:{self.port}/v1", "model": "real-model", "key": "sk-real"}
        return Endpoint.model_validate({**base, **fields})

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while asked := await read_request(reader):
                self.asked.append(asked)
                self.arrived.set()
                gone = asyncio.ensure_future(reader.read(1))
                answering = asyncio.ensure_future(self.answer(asked, writer))
                await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    self.hung_up.set()
                    answering.cancel()
                    break
                answering.result()
                if writer.is_closing():
                    gone.cancel()
                    break
                early = await _undo(gone)
                if early:
                    reader.feed_data(early)  # never happens: the gateway does not pipeline
        writer.close()


async def _undo(gone: asyncio.Future[bytes]) -> bytes:
    if not gone.done():
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
        return b""
    return gone.result()


async def read_request(reader: asyncio.StreamReader) -> Asked | None:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, body)


@asynccontextmanager
async def hand_made(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[HandMade]:
    made = HandMade(answer, scheme="https" if tls else "http")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await made.serve(reader, writer)
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls, limit=1 << 26)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def head(status: str = "200 OK", kind: str = "text/event-stream", **more: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", *(f"{k.replace('_', '-')}: {v}" for k, v in more.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text: str, finish: str | None = None, ids: list[int] | None = None) -> bytes:
    entry = {"token": text, "logprob": -0.5, "top_logprobs": []}
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    if ids is not None:
        choice |= {"token_ids": ids, "logprobs": {"content": [entry for _ in ids]}}
    return event(choices=[choice])


ROLE = event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}], prompt_token_ids=[1, 2, 3])


def whole(*texts: str) -> list[bytes]:
    """The events of a whole, trainable answer."""
    tokens = [text_event(t, "stop" if i == len(texts) - 1 else None, [i + 10]) for i, t in enumerate(texts)]
    usage = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": len(texts)})
    return [ROLE, *tokens, usage, b"data: [DONE]\n\n"]


async def stream(writer: asyncio.StreamWriter, events: list[bytes]) -> None:
    writer.write(head(Transfer_Encoding="chunked"))
    for each in events:
        writer.write(chunked(each))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def says(*texts: str) -> Answer:
    """A model that always gives this answer, as a stream or as a whole."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if asked.method == "GET":
            writer.write(plain("200 OK", {"data": [{"id": "real-model", "owned_by": "vllm"}]}))
        elif asked.json.get("stream"):
            await stream(writer, whole(*texts))
        else:
            entries = [{"token": t, "logprob": -0.5} for t in texts]
            message = {"role": "assistant", "content": "".join(texts)}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": entries}}
            choice["token_ids"] = list(range(len(texts)))
            usage = {"prompt_tokens": 3, "completion_tokens": len(texts), "total_tokens": 3 + len(texts)}
            shared = {"id": "x", "object": "chat.completion", "created": 1, "model": "real-model"}
            writer.write(
                plain("200 OK", {**shared, "choices": [choice], "usage": usage, "prompt_token_ids": [1, 2, 3]})
            )

    return answer


def plain(status: str, value: Any, **more: str) -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return head(status, "application/json", Content_Length=str(len(body)), **more) + body


@dataclass
class Rig:
    """A lease on a socket, and what was recorded through it."""

    gateway: Gateway
    lease: Lease
    recorded: list[Turn]
    port: int

    @property
    def key(self) -> str:
        return self.lease.endpoint.key.get_secret_value()

    def request(
        self, body: Any, *, path: str = "/v1/chat/completions", key: str | None = None, extra: str = ""
    ) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return (
            f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {key or self.key}\r\n{extra}"
            f"Content-Length: {len(data)}\r\n\r\n"
        ).encode() + data

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 26)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def ask(self, body: Any = None, **how: Any) -> Reply:
        """One request on a connection of its own."""
        async with self.connect() as client:
            return await client.ask(self.request(chat() if body is None else body, **how))


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    cut: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def ask(self, request: bytes) -> Reply:
        self.writer.write(request)
        await self.writer.drain()
        return await self.reply()

    async def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split(" ")[1]), headers

    async def chunk(self) -> bytes:
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]

    async def reply(self) -> Reply:
        status, headers = await self.head()
        if "chunked" not in headers.get("transfer-encoding", ""):
            return Reply(status, headers, await self.reader.readexactly(int(headers["content-length"])))
        pieces: list[bytes] = []
        try:
            while piece := await self.chunk():
                pieces.append(piece)
        except (asyncio.IncompleteReadError, ConnectionError):
            return Reply(status, headers, b"".join(pieces), cut=True)
        return Reply(status, headers, b"".join(pieces))


def chat(*, stream: bool = True, **fields: Any) -> dict[str, Any]:
    """What OpenCode asks: with a count at the end of its streams."""
    counted = {"stream_options": {"include_usage": True}} if stream else {}
    return {"model": "model", "messages": [{"role": "user", "content": "hi"}], "stream": stream, **counted, **fields}


def listener() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return sock


@asynccontextmanager
async def rig(
    endpoint: Endpoint, *, gateway: Gateway | None = None, limits: Limits | None = None, mode: str = "transparent_proxy"
) -> AsyncIterator[Rig]:
    recorded: list[Turn] = []

    async def record(turn: Turn) -> None:
        recorded.append(turn)

    async with _either(gateway) as shared:
        sock = listener()
        port = sock.getsockname()[1]
        lent = shared.lend(endpoint, sock, limits=limits or Limits(), mode=mode, record=record, classify=purpose.origin)
        async with lent as lease:
            yield Rig(shared, lease, recorded, port)


@asynccontextmanager
async def _either(gateway: Gateway | None) -> AsyncIterator[Gateway]:
    if gateway is not None:
        yield gateway
        return
    async with Gateway.open() as opened:
        yield opened


async def until(true: Callable[[], object]) -> None:
    with anyio.fail_after(120):
        while not true():
            await asyncio.sleep(0.001)


async def hang(_: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def half_a_stream(_: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(head(Transfer_Encoding="chunked") + b"".join(map(chunked, whole("a", "b", "c")[:3])))
    await asyncio.Event().wait()
