"""One connection to a rollcage server: it asks, tries again what is safe, and raises what a refusal means."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Self, TypeVar

import anyio
import httpx
from pydantic import BaseModel

from rollcage.errors import QueueFull, RollcageError, UnknownBatch, UnknownGroup, UnknownRollout, UsageError
from rollcage.events import Ended, Entry
from rollcage.schema.errors import Unauthorized
from rollcage.sse import EventReader

M = TypeVar("M", bound=BaseModel)

RETRY_STATUSES = (502, 503, 504)
LONGEST_WAIT_S = 60.0
"""How long one request waits for the end of a rollout; then it is asked again."""
RETRY_S = 60.0
"""How long a server may be away: longer than one takes to stop and to start again."""
LONGEST_PAUSE_S = 4.0
"""Between two tries."""
SILENCE_S = 60.0
"""A stream that is silent for so long is dead: the server sends something every 15 s."""


class ServerError(RollcageError):
    """The server refused, or could not be reached; `code` is its stable word for why."""

    def __init__(self, message: str, *, code: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class ServerConnection:
    """One server. Any number of tasks may use it at once."""

    def __init__(
        self,
        address: str = "http://127.0.0.1:8000",
        *,
        key: str = "",
        retry_s: float = RETRY_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`key`: one of the server's; none where it asks for none.

        `retry_s`: how long what is safe is tried again while the server does not answer, or is about to stop.
        """
        if not address.startswith(("http://", "https://")):
            raise UsageError(
                f"{address!r} is no address of a server",
                argument="address",
                remedy="it looks like http://127.0.0.1:8000",
            )
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.AsyncClient(
            base_url=address,
            headers=headers,
            timeout=httpx.Timeout(30, read=LONGEST_WAIT_S + 30),
            limits=httpx.Limits(max_connections=None),
            transport=transport,
            # Fetching all the world's certificates takes longer than most requests.
            verify=not address.startswith("http://"),
        )
        self._retry_s = retry_s

    def _explained(self, error: Exception) -> RollcageError:
        if isinstance(error, RollcageError):
            return error
        said = f"the server at {self._http.base_url} cannot be reached: {error or type(error).__name__}"
        return ServerError(f"{said}; is it running? rollcage serve starts one", code="unreachable")

    async def __aenter__(self) -> Self:
        """Ready at once: the first request connects."""
        return self

    async def __aexit__(self, *raised: object) -> None:
        """Close every connection. Rollouts go on."""
        await self._http.aclose()

    async def _ask(self, model: type[M], method: str, path: str, *, safe: bool = False, **more: Any) -> M:
        """Ask and read the answer."""
        answer = await self._fetch(method, path, safe=safe, **more)
        return model.model_validate_json(answer.content)

    async def _fetch(self, method: str, path: str, *, safe: bool = False, **more: Any) -> httpx.Response:
        """Ask; what is safe is tried again where the server did not answer, or is busy."""
        patience = RetryBudget(self._retry_s if safe or method == "GET" else 0)
        while True:
            try:
                answer = await self._http.request(method, path, **more)
                _check(answer)
                return answer
            except (httpx.TransportError, ServerError) as error:
                await self._pause(patience, error)

    async def _entries(self, path: str, after: int) -> AsyncGenerator[Entry, None]:
        """The entries of the log at this path above `after`, then each new one; over after `Ended`.

        A stream that breaks is taken up where it broke: no entry is lost, none comes twice.
        """
        patience = RetryBudget(self._retry_s)
        while True:
            began = time.monotonic()
            try:
                async with self._stream(path, after) as frames:
                    async for entry in frames:
                        yield entry
                        after = entry.seq
                        patience.restore()
                        if isinstance(entry.event, Ended):
                            return
                    if after and await self._over(path, after):
                        return
                    raise httpx.RemoteProtocolError("the stream ended before the rollout did")
            except (httpx.TransportError, ServerError) as error:
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    patience.restore()  # the line held for a while: this is another break
                await self._pause(patience, error)

    async def _pause(self, patience: RetryBudget, error: Exception) -> None:
        """Wait before the next try; raises where there is none."""
        pause = patience.pause() if _again(error) else None
        if pause is None:
            raise self._explained(error) from error
        await anyio.sleep(pause)

    async def _over(self, path: str, after: int) -> bool:
        """Whether the rollout has ended, and we have all of it."""
        answer = await self._http.get(path, params={"after": after}, headers={"Accept": "application/json"})
        _check(answer)
        return bool(answer.json()["ended"]) and not answer.json()["events"]

    @asynccontextmanager
    async def _stream(self, path: str, after: int) -> AsyncIterator[AsyncGenerator[Entry, None]]:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": str(after)} if after else {})}
        timeout = httpx.Timeout(30, read=SILENCE_S)
        async with self._http.stream("GET", path, headers=headers, timeout=timeout) as answer:
            if answer.is_error:
                await answer.aread()
            _check(answer)
            async with aclosing(_read_entries(answer, after)) as entries:
                yield entries


async def _read_entries(answer: httpx.Response, after: int) -> AsyncGenerator[Entry, None]:
    """The entries in a stream. One that stops in the middle of an event has not sent it."""
    reader = EventReader()
    async for portion in answer.aiter_bytes():
        for event in reader.feed(portion):
            if event.name == "error":
                raise ServerError("the server lost its log while it sent it", code="store", status=503)
            if event.name == "entry":
                entry = Entry.model_validate_json(event.data)
                if entry.seq > after:
                    after = entry.seq
                    yield entry


def _check(answer: httpx.Response) -> None:
    """Raise what the server's refusal means."""
    if not answer.is_error:
        return
    try:
        problem = answer.json()
        message, code = str(problem["error"]), str(problem["error_code"])
        argument = str(problem.get("argument") or "")
    except (ValueError, KeyError, TypeError):
        message, code, argument = f"the server answered HTTP {answer.status_code}", "", ""
    if answer.status_code == 401:
        raise Unauthorized(message)
    if code == "unknown_batch":
        raise UnknownBatch(message)
    if code == "unknown_group":
        raise UnknownGroup(message)
    if code == "unknown_rollout":
        raise UnknownRollout(message)
    if answer.status_code in (400, 409, 413, 422):
        raise UsageError(message.removeprefix(f"{argument}: "), argument=argument)
    if answer.status_code == 429:
        after = answer.headers.get("retry-after", "")
        raise QueueFull(message, retry_after_s=float(after) if after.isdecimal() else 5)
    raise ServerError(message, code=code, status=answer.status_code)


def _again(error: Exception) -> bool:
    return isinstance(error, httpx.TransportError) or (
        isinstance(error, ServerError) and error.status in RETRY_STATUSES and error.code != "not_served"
    )


class RetryBudget:
    """How long to go on trying: so many seconds from the first failure, with pauses that grow and are never in step."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._until, self._failures = seconds, 0.0, 0

    def restore(self) -> None:
        """It went well again: the next failure is a first one."""
        self._failures = 0

    def pause(self) -> float | None:
        """How long to wait before the next try; None where the time is up."""
        now = time.monotonic()
        if self._failures == 0:
            self._until = now + self._seconds
        self._failures += 1
        if now >= self._until:
            return None
        grown = min(LONGEST_PAUSE_S, 0.1 * 2.0 ** min(self._failures, 10))
        return random.uniform(0.5, 1) * grown  # noqa: S311 - no secret
