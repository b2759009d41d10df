"""One MCP session with one endpoint, over streamable HTTP.

Every request is an HTTP request of its own, in the task of whoever asks: any number at once, and one that breaks or is
cancelled harms no other. Each failure says whether the request may have been carried out, which is what retrying
depends on. That is why this is not the `mcp` package's client: there a broken connection ends every request on the
session, and a stream that is cut is noticed only when time runs out. Servers of `mcp` 1.x and 2.x both speak this.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
import httpx

from rollcage.mcp.guarded import AnswerTooLarge
from rollcage.mcp.jsonrpc import ABOUT_US, HANDSHAKE_VERSIONS, METHOD_NOT_FOUND, Malformed, message_of
from rollcage.sse import EventReader
from rollcage.types import JsonObject

PROTOCOL = HANDSHAKE_VERSIONS[-1]
"""The newest version with a handshake. Servers answer with the one they want to speak."""

_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.ProxyError, httpx.LocalProtocolError)
_RESUMES = 3
_GOODBYE_S = 2.0
_DRAIN_S = 0.2
_BACKGROUND = 16
"""Answers to what the endpoint asks that are under way at most; beyond that it gets none."""


class SessionBroken(Exception):
    """A request got no answer. `may_have_run`: it may have been carried out all the same."""

    def __init__(self, reason: str, *, status: int = 0, may_have_run: bool, session_gone: bool = False) -> None:
        super().__init__(reason)
        self.status, self.may_have_run, self.session_gone = status, may_have_run, session_gone


class RpcError(Exception):
    """The endpoint answered with a JSON-RPC error."""

    def __init__(self, error: JsonObject) -> None:
        super().__init__(str(error.get("message", "unknown error")))
        self.code, self.data = error.get("code"), error.get("data")


@dataclass
class _Pending:
    """What came back so far."""

    id: int
    message: JsonObject | None = None
    last_event: str = ""
    retry_s: float = 1.0


class McpSession:
    """A session. `open` first, `close` last; both may fail without harm."""

    def __init__(self, http: httpx.AsyncClient, url: str, headers: dict[str, str]) -> None:
        self._http, self._url = http, url
        self._headers = {**headers, "accept": "application/json, text/event-stream", "content-type": "application/json"}
        self._numbers = itertools.count(1)
        self._background: set[asyncio.Task[None]] = set()
        self.has_id = False
        self.protocol = ""
        self.server = ""
        self.tools_changed = False
        """The endpoint said that its tools are others now."""

    async def open(self) -> None:
        """Shake hands."""
        parameters = {
            "protocolVersion": PROTOCOL,
            "capabilities": {},
            "clientInfo": ABOUT_US,
        }
        result = await self.request("initialize", parameters)
        self.protocol = _header(str(result.get("protocolVersion", "")))[:40]
        info = result.get("serverInfo")
        if isinstance(info, dict):
            self.server = f"{info.get('name', '')} {info.get('version', '')}".strip()[:200]
        self._headers["mcp-protocol-version"] = self.protocol
        await self._tell("notifications/initialized", {})

    async def close(self) -> None:
        """Say goodbye, briefly; whatever was under way in the background is over."""
        with anyio.CancelScope(shield=True), anyio.move_on_after(_GOODBYE_S):
            if self._background:
                await asyncio.wait(self._background, timeout=_GOODBYE_S / 2)
            for task in list(self._background):
                task.cancel()
            if self.has_id:
                with suppress(httpx.HTTPError):
                    await self._http.delete(self._url, headers=self._headers)

    async def request(self, method: str, parameters: JsonObject) -> JsonObject:
        """Ask and wait for the answer: Broken or RpcError where there is none."""
        answer = _Pending(next(self._numbers))
        body = {"jsonrpc": "2.0", "id": answer.id, "method": method, "params": parameters}
        try:
            await self._exchange(body, answer)
        except anyio.get_cancelled_exc_class():
            if method != "initialize":
                reason = {"requestId": answer.id, "reason": "the client does not wait any longer"}
                self._spawn(self._tell("notifications/cancelled", reason))
            raise
        message = answer.message or {}
        if isinstance(message.get("error"), dict):
            raise RpcError(message["error"])
        result = message.get("result")
        if not isinstance(result, dict):
            raise SessionBroken("the endpoint's answer has neither result nor error", may_have_run=True)
        return result

    async def _exchange(self, body: JsonObject, answer: _Pending) -> None:
        async with self._sent("POST", body) as response:
            if body["method"] == "initialize" and "mcp-session-id" in response.headers:
                self._headers["mcp-session-id"] = _header(response.headers["mcp-session-id"])
                self.has_id = True
            await self._take(response, answer)
        # A server that numbers its events lets a cut stream be read on; the request is not sent again.
        for _ in range(_RESUMES):
            if answer.message is not None or not answer.last_event:
                break
            await anyio.sleep(answer.retry_s)
            async with self._sent("GET", None, {"last-event-id": answer.last_event}) as response:
                await self._take(response, answer)
        if answer.message is None:
            raise SessionBroken("the connection was closed before the answer came", may_have_run=True)

    @asynccontextmanager
    async def _sent(
        self, method: str, body: JsonObject | None, more: dict[str, str] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """An HTTP request, and its answer's head; what breaks within the block is told as Broken."""
        try:
            content = None if body is None else json.dumps(body).encode()
            request = self._http.build_request(
                method, self._url, content=content, headers={**self._headers, **(more or {})}
            )
            response = await self._http.send(request, stream=True)
            moved = _moved(response)
            if moved is not None:
                await response.aclose()
                self._url = str(moved)
                request = self._http.build_request(method, self._url, content=content, headers=request.headers)
                response = await self._http.send(request, stream=True)
            try:
                if response.status_code >= 300:
                    raise await self._refusal(response)
                yield response
            finally:
                await response.aclose()
        except AnswerTooLarge as error:
            raise RpcError({"message": f"{error} and was not read; ask for less"}) from error
        except _NOT_SENT as error:
            raise SessionBroken(_reason(error), may_have_run=False) from error
        except (httpx.HTTPError, httpx.StreamError, Malformed) as error:
            raise SessionBroken(_reason(error), may_have_run=True) from error
        except httpx.InvalidURL as error:
            raise SessionBroken(_reason(error), status=400, may_have_run=False) from error

    async def _refusal(self, response: httpx.Response) -> SessionBroken | RpcError:
        status, text = response.status_code, ""
        async for chunk in response.aiter_bytes():
            text += chunk.decode("utf-8", "replace")
            if len(text) > 2000:
                break
        said = text
        with suppress(Malformed):
            error = message_of(text).get("error")
            said = str(error.get("message", text)) if isinstance(error, dict) else str(error or text)
        if 300 <= status < 400:
            said = f"redirects to {response.headers.get('location', 'nowhere')}; give that address instead"
        reason = f"HTTP {status}. {' '.join(said.split())[:300]}".strip()
        # 503 and 429 say that nothing was done; 502 and 504 come from something in between, which cannot know.
        may_have_run = status >= 500 and status != 503
        return SessionBroken(
            reason, status=status, may_have_run=may_have_run, session_gone=self.has_id and status in (400, 404)
        )

    async def _take(self, response: httpx.Response, answer: _Pending) -> None:
        if response.headers.get("content-type", "").lower().startswith("text/event-stream"):
            await self._take_events(response, answer)
            return
        self._message(message_of(await response.aread()), answer)

    async def _take_events(self, response: httpx.Response, answer: _Pending) -> None:
        reader = EventReader()
        chunks = response.aiter_bytes()
        try:
            async for chunk in chunks:
                for event in reader.feed(chunk):
                    answer.last_event = _header(event.id) or answer.last_event
                    answer.retry_s = answer.retry_s if event.retry_s is None else min(event.retry_s, 30.0)
                    if event.data:
                        self._message(message_of(event.data), answer)
                if answer.message is not None:
                    break
            # A stream that is read to its end leaves its connection to the next request.
            with anyio.move_on_after(_DRAIN_S):
                async for _ in chunks:
                    pass
        except AnswerTooLarge:
            raise
        except httpx.HTTPError:
            # A cut stream can be read on where its events are numbered.
            if answer.message is None and not answer.last_event:
                raise

    def _message(self, message: JsonObject, answer: _Pending) -> None:
        if "method" not in message:
            if message.get("id") == answer.id:
                answer.message = message
        elif "id" in message:
            if len(self._background) < _BACKGROUND:
                self._spawn(self._reply(message))
        elif message["method"] == "notifications/tools/list_changed":
            self.tools_changed = True

    async def _reply(self, asked: JsonObject) -> None:
        """Answer what the endpoint asks of us: that we live, and that we can do nothing else."""
        reply: JsonObject = {"jsonrpc": "2.0", "id": asked["id"]}
        if asked["method"] == "ping":
            reply["result"] = {}
        else:
            reply["error"] = {"code": METHOD_NOT_FOUND, "message": "this client offers nothing of the kind"}
        await self._post(reply)

    async def _tell(self, method: str, parameters: JsonObject) -> None:
        await self._post({"jsonrpc": "2.0", "method": method, "params": parameters})

    async def _post(self, body: JsonObject) -> None:
        async with self._sent("POST", body):
            pass

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        async def quietly() -> None:
            with suppress(SessionBroken, RpcError), anyio.move_on_after(10):
                await work

        task = asyncio.ensure_future(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _moved(response: httpx.Response) -> httpx.URL | None:
    """Where the endpoint really is: only another path of the same origin, so that no key goes elsewhere."""
    if response.status_code not in (307, 308):
        return None
    old = response.request.url
    new = old.join(response.headers.get("location", ""))
    return new if (new.scheme, new.host, new.port) == (old.scheme, old.host, old.port) and new != old else None


def _header(said: str) -> str:
    """What an endpoint said, as it may go back to it in a header: nothing, where it is no text for one."""
    return said if said.isascii() and said.isprintable() and len(said) <= 1000 else ""


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
