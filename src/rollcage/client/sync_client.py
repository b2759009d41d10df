"""The client for callers that do not await: every method of `Client`, derived from it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import ExitStack
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Self, TypeVar

from anyio.from_thread import start_blocking_portal

from rollcage.client.client import Client
from rollcage.client.connection import RETRY_S
from rollcage.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(method: Callable[Concatenate[Client, P], Awaitable[T]]) -> Callable[Concatenate[SyncClient, P], T]:
    """The same method, which returns when the answer is there. Ctrl-C leaves rollouts running."""

    @wraps(method)
    def ask(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._call(partial(method, self._client, *args, **kwargs))

    return ask


def _iterating(
    method: Callable[Concatenate[Client, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[SyncClient, P], Generator[T, None, None]]:
    """The same method, for `for` instead of `async for`."""

    @wraps(method)
    def ask(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        return self._each(method(self._client, *args, **kwargs))

    return ask


class SyncClient:
    """The same for callers that do not await: every method of `Client`, by its name. Any number of threads may use it.

    The requests run in a thread of its own, so it works where a loop runs already: in a notebook, in a callback.
    """

    def __init__(self, address: str = "http://127.0.0.1:8000", *, key: str = "", retry_s: float = RETRY_S) -> None:
        """As `Client`. Use `with`, or call `close` at the end."""
        self._client = Client(address, key=key, retry_s=retry_s)
        self._thread = ExitStack()
        self._portal = self._thread.enter_context(start_blocking_portal())
        self._open = True

    def __enter__(self) -> Self:
        """Ready at once."""
        return self

    def __exit__(self, *raised: object) -> None:
        """Close every connection. Rollouts go on."""
        self.close()

    def close(self) -> None:
        """Close every connection and end the thread; again does nothing. Rollouts go on."""
        if self._open:
            self._open = False
            with self._thread:
                self._portal.call(self._client.__aexit__, None, None, None)

    start = _blocking(Client.start)
    run = _blocking(Client.run)
    state = _blocking(Client.state)
    result = _blocking(Client.result)
    wait = _blocking(Client.wait)
    follow = _iterating(Client.follow)
    abort = _blocking(Client.abort)
    page = _blocking(Client.page)
    list = _iterating(Client.list)
    messages = _blocking(Client.messages)
    files = _blocking(Client.files)
    turns = _blocking(Client.turns)
    trace = _blocking(Client.trace)
    start_group = _blocking(Client.start_group)
    group = _blocking(Client.group)
    wait_groups = _blocking(Client.wait_groups)
    abort_group = _blocking(Client.abort_group)
    abort_older = _blocking(Client.abort_older)
    group_sequences = _blocking(Client.group_sequences)
    start_batch = _blocking(Client.start_batch)
    batch = _blocking(Client.batch)
    wait_batch = _blocking(Client.wait_batch)
    batch_rollouts = _blocking(Client.batch_rollouts)
    cancel_batch = _blocking(Client.cancel_batch)
    capacity = _blocking(Client.capacity)
    pause = _blocking(Client.pause)
    resume = _blocking(Client.resume)

    def _call(self, ask: Callable[[], Awaitable[T]]) -> T:
        if not self._open:
            raise UsageError("this client is closed", remedy="make another one")
        asked = self._portal.start_task_soon(ask)
        try:
            return asked.result()
        except BaseException:
            asked.cancel()  # Ctrl-C: nobody waits for the answer
            raise

    def _each(self, found: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> tuple[T, ...]:
            async for item in found:
                return (item,)
            return ()

        try:
            while item := self._call(following):
                yield item[0]
        finally:
            if self._open:
                self._call(found.aclose)
