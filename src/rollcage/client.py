"""Asks a rollcage server for rollouts: `async with Client(address) as client`, `with SyncClient(address) as client`.

Only what is safe is tried again: reading always; starting, because every start carries an idempotency key.
"""

from __future__ import annotations

import builtins
import random
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack
from urllib.parse import quote

import anyio
import httpx
from anyio.from_thread import start_blocking_portal
from pydantic import BaseModel, SecretStr, ValidationError

from rollcage.errors import QueueFull, RollcageError, UnknownBatch, UnknownGroup, UnknownRollout, UsageError
from rollcage.evaluation.batches import BatchReport
from rollcage.events import Ended, Entry
from rollcage.schema.arguments import RolloutArguments
from rollcage.schema.batches import BatchRequest
from rollcage.schema.errors import Unauthorized
from rollcage.schema.groups import (
    AbortedRollouts,
    Capacity,
    GatewayPause,
    GatewayResume,
    GatewayState,
    Group,
    GroupPage,
    GroupRequest,
    Until,
)
from rollcage.schema.request import RolloutRequest, bad_argument
from rollcage.schema.result import RolloutResult
from rollcage.schema.views import Aborted, Files, Messages, RolloutPage, RolloutState, Started, Trace, TurnPage
from rollcage.sse import EventReader
from rollcage.trajectory import Sequence as TokenSequence
from rollcage.types import JsonObject

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

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


class Client:
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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection. Rollouts go on."""
        await self._http.aclose()

    async def start(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> Started:
        """Start a rollout; the arguments are those of `RolloutRequest`, and are checked here before anything is sent.

        An idempotency key is made up where none is given, so that a repeated request starts nothing twice.
        """
        key = arguments.get("idempotency_key") or secrets.token_hex(16)
        request = RolloutRequest.parsed({**arguments, "instruction": instruction, "idempotency_key": key})
        return await self._ask(Started, "POST", "/rollouts", json=_revealed(request), safe=True)

    async def run(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> RolloutResult:
        """Start a rollout and wait for what it comes to. Cancelling this leaves it running."""
        return await self.wait((await self.start(instruction, **arguments)).rollout_id)

    async def state(self, rollout_id: str) -> RolloutState:
        """Where it is."""
        return await self._ask(RolloutState, "GET", _path(rollout_id))

    async def result(self, rollout_id: str) -> RolloutResult:
        """What it came to so far; `outcome` is None while it runs."""
        return await self._ask(RolloutResult, "GET", _path(rollout_id, "/result"))

    async def wait(self, rollout_id: str, *, wait_s: float | None = None) -> RolloutResult:
        """What it came to, once it has ended; TimeoutError where that takes longer than `wait_s`."""
        with anyio.fail_after(wait_s):
            while True:
                result = await self._ask(
                    RolloutResult, "GET", _path(rollout_id, "/result"), params={"wait_s": LONGEST_WAIT_S}
                )
                if result.outcome is not None:
                    return result

    async def follow(self, rollout_id: str, *, after: int = 0) -> AsyncGenerator[Entry, None]:
        """Every entry above `after`, then each new one; over after `Ended`. Use `aclosing`.

        A stream that breaks is taken up where it broke: no entry is lost, none comes twice.
        """
        patience = _Patience(self._retry_s)
        while True:
            began = time.monotonic()
            try:
                async with self._stream(rollout_id, after) as frames:
                    async for entry in frames:
                        yield entry
                        after = entry.seq
                        patience.restore()
                        if isinstance(entry.event, Ended):
                            return
                    if after and await self._over(rollout_id, after):
                        return
                    raise httpx.RemoteProtocolError("the stream ended before the rollout did")
            except (httpx.TransportError, ServerError) as error:
                if time.monotonic() - began > LONGEST_PAUSE_S:
                    patience.restore()  # the line held for a while: this is another break
                await self._pause(patience, error)

    async def abort(self, rollout_id: str, reason: str = "", *, wait_s: float = 0) -> Aborted:
        """Stop it. `wait_s`: return only when it has ended, or when so much time has passed."""
        params = {"reason": reason, "wait_s": wait_s}
        # A second request to stop the same rollout does nothing, so this too may be repeated.
        return await self._ask(Aborted, "DELETE", _path(rollout_id), params=params, safe=True)

    async def page(self, *, cursor: str = "", limit: int = 50, **filters: str) -> RolloutPage:
        """Some rollouts, newest first. Filters: `status, stage, outcome, task_id, agent, model, text`."""
        given = {name: value for name, value in filters.items() if value}
        params = {**given, "limit": str(limit), **({"cursor": cursor} if cursor else {})}
        return await self._ask(RolloutPage, "GET", "/rollouts", params=params)

    async def list(self, **filters: str) -> AsyncGenerator[RolloutState, None]:
        """All rollouts that match, newest first, page after page."""
        cursor: str | None = ""
        while cursor is not None:
            page = await self.page(cursor=cursor, limit=200, **filters)
            for state in page.rollouts:
                yield state
            cursor = page.next_cursor

    async def messages(self, rollout_id: str) -> Messages:
        """The agent's own transcript so far."""
        return await self._ask(Messages, "GET", _path(rollout_id, "/messages"))

    async def files(self, rollout_id: str) -> Files:
        """What the agent left in the workdir."""
        return await self._ask(Files, "GET", _path(rollout_id, "/files"))

    async def turns(self, rollout_id: str, *, after: int = 0, limit: int = 20) -> TurnPage:
        """Some of the model calls, whole."""
        params = {"after": after, "limit": limit}
        return await self._ask(TurnPage, "GET", _path(rollout_id, "/turns"), params=params)

    async def trace(self, rollout_id: str, *, after: int = 0, limit: int = 50) -> Trace:
        """Some of the model calls, token by token."""
        params = {"after": after, "limit": limit}
        return await self._ask(Trace, "GET", _path(rollout_id, "/trace"), params=params)

    async def start_group(
        self, instruction: str, n: int, *, min_usable: int = 0, **arguments: Unpack[RolloutArguments]
    ) -> Group:
        """Start n rollouts of one task. An idempotency key is made up where none is given."""
        key = arguments.get("idempotency_key") or secrets.token_hex(16)
        asked = {**arguments, "instruction": instruction, "idempotency_key": key, "n": n, "min_usable": min_usable}
        request = GroupRequest.parsed(asked)
        return await self._ask(Group, "POST", "/groups", json=_revealed(request), safe=True)

    async def group(self, group_id: str) -> Group:
        """Where a group is, with its rollouts."""
        return await self._ask(Group, "GET", _group(group_id))

    async def wait_groups(
        self, group_ids: Sequence[str], *, until: Until = "all", cursor: int = 0, wait_s: float | None = None
    ) -> GroupPage:
        """What has ended in some groups since the cursor: when some rollout has (`any`), or when all are done.

        TimeoutError where that takes longer than `wait_s`.
        """
        params = {"group_id": list(group_ids), "until": until, "cursor": cursor, "wait_s": LONGEST_WAIT_S}
        with anyio.fail_after(wait_s):
            while True:
                page = await self._ask(GroupPage, "GET", "/groups", params=params)
                if page.done or (until == "any" and page.ended):
                    return page

    async def abort_group(self, group_id: str, reason: str = "") -> AbortedRollouts:
        """Stop what still runs of a group."""
        return await self._ask(AbortedRollouts, "DELETE", _group(group_id), params={"reason": reason}, safe=True)

    async def abort_older(self, policy_version: str, reason: str = "") -> AbortedRollouts:
        """Stop open rollouts whose policy version is older than this one."""
        params = {"policy_version_below": policy_version, "reason": reason}
        return await self._ask(AbortedRollouts, "DELETE", "/groups", params=params, safe=True)

    async def group_sequences(
        self, group_id: str, *, usable_only: bool = False, per_turn: bool = False
    ) -> builtins.list[TokenSequence]:
        """The ended rollouts of a group as merged sequences, in one answer."""
        import msgspec

        params = {"usable_only": usable_only, "per_turn": per_turn}
        headers = {"Accept": "application/msgpack"}
        answer = await self._fetch("GET", _group(group_id, "/sequences"), params=params, headers=headers)
        rows = msgspec.msgpack.decode(answer.content)["sequences"]
        return [TokenSequence.model_validate(row) for row in rows]

    async def start_batch(
        self, tasks: Sequence[Mapping[str, Any]], models: Sequence[str] = (), **more: Any
    ) -> BatchReport:
        """Run every task x model x agent, n times. `tasks`: arguments of rollouts; `more`: those of `BatchRequest`.

        The same again joins the batch, and goes on with what is missing of it.
        """
        asked = [RolloutRequest.parsed(task) for task in tasks]
        try:
            request = BatchRequest(tasks=tuple(asked), models=tuple(models), **more)
        except ValidationError as error:
            raise bad_argument(error, builtins.list(BatchRequest.model_fields)) from None
        body = {**_revealed(request), "tasks": [_revealed(task) for task in asked]}
        return await self._ask(BatchReport, "POST", "/batches", json=body, safe=True)

    async def batch(self, name: str) -> BatchReport:
        """Where a batch is, and what it came to so far."""
        return await self._ask(BatchReport, "GET", _batch(name))

    async def wait_batch(self, name: str, *, wait_s: float | None = None) -> BatchReport:
        """What a batch came to, once it does not run any more; TimeoutError where that takes longer than `wait_s`."""
        with anyio.fail_after(wait_s):
            while True:
                report = await self.batch(name)
                if report.status not in ("new", "running", "paused"):
                    return report
                await anyio.sleep(1)

    async def batch_rollouts(self, name: str) -> builtins.list[JsonObject]:
        """The latest rollout of each combination, a row each."""
        found: builtins.list[JsonObject] = []
        while True:
            params = {"offset": len(found), "limit": 10_000}
            page = (await self._fetch("GET", _batch(name, "/results"), params=params)).json()
            found += page["rollouts"]
            if len(found) >= page["total"] or not page["rollouts"]:
                return found

    async def cancel_batch(self, name: str) -> BatchReport:
        """Stop what runs of a batch, and begin nothing more of it."""
        return await self._ask(BatchReport, "POST", _batch(name, "/cancel"), safe=True)

    async def capacity(self) -> Capacity:
        """How much more can be started."""
        return await self._ask(Capacity, "GET", "/capacity")

    async def pause(self, running: Literal["finish", "cut"] = "finish", *, wait_s: float = 600) -> GatewayState:
        """Let no model call begin; returns when none runs any more, or after `wait_s`. For admins."""
        asked = GatewayPause(running=running, wait_s=wait_s)
        timeout = httpx.Timeout(30, read=wait_s + 30)
        more = {"json": asked.model_dump(), "timeout": timeout}
        return await self._ask(GatewayState, "POST", "/gateway/pause", safe=True, **more)

    async def resume(self, policy_version: str = "") -> GatewayState:
        """Let calls begin again, with these weights. For admins."""
        asked = GatewayResume(policy_version=policy_version)
        return await self._ask(GatewayState, "POST", "/gateway/resume", safe=True, json=asked.model_dump())

    async def _ask(self, model: type[M], method: str, path: str, *, safe: bool = False, **more: Any) -> M:
        """Ask and read the answer."""
        answer = await self._fetch(method, path, safe=safe, **more)
        return model.model_validate_json(answer.content)

    async def _fetch(self, method: str, path: str, *, safe: bool = False, **more: Any) -> httpx.Response:
        """Ask; what is safe is tried again where the server did not answer, or is busy."""
        patience = _Patience(self._retry_s if safe or method == "GET" else 0)
        while True:
            try:
                answer = await self._http.request(method, path, **more)
                _check(answer)
                return answer
            except (httpx.TransportError, ServerError) as error:
                await self._pause(patience, error)

    async def _pause(self, patience: _Patience, error: Exception) -> None:
        """Wait before the next try; raises where there is none."""
        pause = patience.pause() if _again(error) else None
        if pause is None:
            raise self._explained(error) from error
        await anyio.sleep(pause)

    async def _over(self, rollout_id: str, after: int) -> bool:
        """Whether the rollout has ended, and we have all of it."""
        answer = await self._http.get(
            _path(rollout_id, "/events"), params={"after": after}, headers={"Accept": "application/json"}
        )
        _check(answer)
        return bool(answer.json()["ended"]) and not answer.json()["events"]

    @asynccontextmanager
    async def _stream(self, rollout_id: str, after: int) -> AsyncIterator[AsyncGenerator[Entry, None]]:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": str(after)} if after else {})}
        timeout = httpx.Timeout(30, read=SILENCE_S)
        async with self._http.stream("GET", _path(rollout_id, "/events"), headers=headers, timeout=timeout) as answer:
            if answer.is_error:
                await answer.aread()
            _check(answer)
            async with aclosing(_entries(answer, after)) as entries:
                yield entries


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection. Rollouts go on."""
        self.close()

    def close(self) -> None:
        """Close every connection and end the thread; again does nothing. Rollouts go on."""
        if self._open:
            self._open = False
            with self._thread:
                self._portal.call(self._client.__aexit__, None, None, None)

    def start(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> Started:
        """As `Client.start`."""
        return self._call(partial(self._client.start, instruction, **arguments))

    def run(self, instruction: str, **arguments: Unpack[RolloutArguments]) -> RolloutResult:
        """As `Client.run`. Ctrl-C leaves the rollout running."""
        return self._call(partial(self._client.run, instruction, **arguments))

    def state(self, rollout_id: str) -> RolloutState:
        """As `Client.state`."""
        return self._call(partial(self._client.state, rollout_id))

    def result(self, rollout_id: str) -> RolloutResult:
        """As `Client.result`."""
        return self._call(partial(self._client.result, rollout_id))

    def wait(self, rollout_id: str, *, wait_s: float | None = None) -> RolloutResult:
        """As `Client.wait`."""
        return self._call(partial(self._client.wait, rollout_id, wait_s=wait_s))

    def follow(self, rollout_id: str, *, after: int = 0) -> Generator[Entry, None, None]:
        """As `Client.follow`."""
        return self._each(self._client.follow(rollout_id, after=after))

    def abort(self, rollout_id: str, reason: str = "", *, wait_s: float = 0) -> Aborted:
        """As `Client.abort`."""
        return self._call(partial(self._client.abort, rollout_id, reason, wait_s=wait_s))

    def page(self, *, cursor: str = "", limit: int = 50, **filters: str) -> RolloutPage:
        """As `Client.page`."""
        return self._call(partial(self._client.page, cursor=cursor, limit=limit, **filters))

    def list(self, **filters: str) -> Generator[RolloutState, None, None]:
        """As `Client.list`."""
        return self._each(self._client.list(**filters))

    def messages(self, rollout_id: str) -> Messages:
        """As `Client.messages`."""
        return self._call(partial(self._client.messages, rollout_id))

    def files(self, rollout_id: str) -> Files:
        """As `Client.files`."""
        return self._call(partial(self._client.files, rollout_id))

    def turns(self, rollout_id: str, *, after: int = 0, limit: int = 20) -> TurnPage:
        """As `Client.turns`."""
        return self._call(partial(self._client.turns, rollout_id, after=after, limit=limit))

    def trace(self, rollout_id: str, *, after: int = 0, limit: int = 50) -> Trace:
        """As `Client.trace`."""
        return self._call(partial(self._client.trace, rollout_id, after=after, limit=limit))

    def start_group(
        self, instruction: str, n: int, *, min_usable: int = 0, **arguments: Unpack[RolloutArguments]
    ) -> Group:
        """As `Client.start_group`."""
        return self._call(partial(self._client.start_group, instruction, n, min_usable=min_usable, **arguments))

    def group(self, group_id: str) -> Group:
        """As `Client.group`."""
        return self._call(partial(self._client.group, group_id))

    def wait_groups(
        self, group_ids: Sequence[str], *, until: Until = "all", cursor: int = 0, wait_s: float | None = None
    ) -> GroupPage:
        """As `Client.wait_groups`."""
        return self._call(partial(self._client.wait_groups, group_ids, until=until, cursor=cursor, wait_s=wait_s))

    def abort_group(self, group_id: str, reason: str = "") -> AbortedRollouts:
        """As `Client.abort_group`."""
        return self._call(partial(self._client.abort_group, group_id, reason))

    def abort_older(self, policy_version: str, reason: str = "") -> AbortedRollouts:
        """As `Client.abort_older`."""
        return self._call(partial(self._client.abort_older, policy_version, reason))

    def group_sequences(
        self, group_id: str, *, usable_only: bool = False, per_turn: bool = False
    ) -> builtins.list[TokenSequence]:
        """As `Client.group_sequences`."""
        return self._call(partial(self._client.group_sequences, group_id, usable_only=usable_only, per_turn=per_turn))

    def start_batch(self, tasks: Sequence[Mapping[str, Any]], models: Sequence[str] = (), **more: Any) -> BatchReport:
        """As `Client.start_batch`."""
        return self._call(partial(self._client.start_batch, tasks, models, **more))

    def batch(self, name: str) -> BatchReport:
        """As `Client.batch`."""
        return self._call(partial(self._client.batch, name))

    def wait_batch(self, name: str, *, wait_s: float | None = None) -> BatchReport:
        """As `Client.wait_batch`."""
        return self._call(partial(self._client.wait_batch, name, wait_s=wait_s))

    def batch_rollouts(self, name: str) -> builtins.list[JsonObject]:
        """As `Client.batch_rollouts`."""
        return self._call(partial(self._client.batch_rollouts, name))

    def cancel_batch(self, name: str) -> BatchReport:
        """As `Client.cancel_batch`."""
        return self._call(partial(self._client.cancel_batch, name))

    def capacity(self) -> Capacity:
        """As `Client.capacity`."""
        return self._call(self._client.capacity)

    def pause(self, running: Literal["finish", "cut"] = "finish", *, wait_s: float = 600) -> GatewayState:
        """As `Client.pause`."""
        return self._call(partial(self._client.pause, running, wait_s=wait_s))

    def resume(self, policy_version: str = "") -> GatewayState:
        """As `Client.resume`."""
        return self._call(partial(self._client.resume, policy_version))

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


async def _entries(answer: httpx.Response, after: int) -> AsyncGenerator[Entry, None]:
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


def _path(rollout_id: str, below: str = "") -> str:
    if not rollout_id.isalnum():
        raise UnknownRollout(f"unknown rollout_id: {rollout_id}")
    return f"/rollouts/{rollout_id}{below}"


def _group(group_id: str, below: str = "") -> str:
    if not group_id:
        raise UnknownGroup("a group has a name")
    return f"/groups/{quote(group_id, safe='')}{below}"


def _batch(name: str, below: str = "") -> str:
    if not name:
        raise UnknownBatch("a batch has a name")
    return f"/batches/{quote(name, safe='')}{below}"


def _revealed(request: RolloutRequest | BatchRequest) -> Mapping[str, Any]:
    """What is sent: what was given, the keys as they are."""
    given = request.model_dump(mode="json", exclude_unset=True)
    for name in given:
        value = getattr(request, name)
        if isinstance(value, SecretStr):
            given[name] = value.get_secret_value()
    return given


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


class _Patience:
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
