"""The tools of several MCP endpoints as one union; a call goes to the endpoint that owns the name."""

from __future__ import annotations

import asyncio
import difflib
import itertools
import json
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
import httpx
from pydantic import SecretStr

from rollcage.errors import UsageError
from rollcage.json_safe import json_safe
from rollcage.mcp import guarded
from rollcage.mcp.convert import LONGEST, Union
from rollcage.mcp.endpoint import McpEndpoint
from rollcage.mcp.errors import EndpointDown, ToolError, ToolFailed, ToolNotFound, ToolTimeout
from rollcage.mcp.session import McpSession, RpcError
from rollcage.mcp.types import EndpointReport, ListToolsAction, Remedies, Tool, ToolOptions, ToolResult, ToolsReport
from rollcage.types import JsonObject

KEEPALIVE_S = 4.0
"""Idle connections are given up before common servers (5 s) close them under a request."""
RELIST_S = 5.0
"""How long a list of tools is believed when a tool is called that is not in it."""


class McpTools:
    """The tools of MCP endpoints: `list_tools`, `call_tool`, `report`. Nothing here can reset, step or end anything.

    Sessions are opened at the first use and kept. Use it as `async with`, or `await tools.close()` at the end. In
    another event loop (a second `asyncio.run`) it starts afresh by itself.
    """

    remedies = Remedies()
    """What to do when the endpoints fail."""

    def __init__(
        self,
        mcp_urls: Sequence[str] | Mapping[str, str],
        options: ToolOptions | None = None,
        *,
        api_key: str | SecretStr = "",
        guessed: bool = False,
    ) -> None:
        """`guessed`: the addresses are where endpoints may be; one that answers 404 does not count as down."""
        self._key = api_key if isinstance(api_key, SecretStr) else SecretStr(api_key)
        self._options, self._guessed = options or ToolOptions(), guessed
        check_addresses(list(mcp_urls.values() if isinstance(mcp_urls, Mapping) else mcp_urls))
        self._urls = dict(mcp_urls) if isinstance(mcp_urls, Mapping) else {endpoint_name(url): url for url in mcp_urls}
        self.ended = ""
        """Why these tools can be used no more; empty while they can."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient | None = None
        self._endpoints: dict[str, McpEndpoint] = {}
        self._union: Union | None = None
        self._listing = anyio.Lock()
        self._asked_at = 0.0

    async def list_tools(self, *, refresh: bool = False) -> ListToolsAction:
        """The union over all endpoints that serve. Endpoints that were down are asked again; `refresh` asks all.

        EndpointDown where none serves; ToolConflict where `on_conflict` is "error" and a name is shared.
        """
        self._here()
        union = await self._listed(refresh)
        tools = list(union.tools.values())
        return ListToolsAction(tools=[tool.openai for tool in tools], offered=tools)

    async def call_tool(
        self, name: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float | None = None
    ) -> ToolResult:
        """Call a tool by the name under which it is offered.

        `timeout_s` is one wall-clock deadline for everything: listing, connecting, retries, the call. Raises
        ToolNotFound, EndpointDown, ToolTimeout, ToolFailed; each names the endpoint and says whether it may have run.
        """
        if not isinstance(name, str) or not name:
            raise UsageError("the name of a tool is needed", argument="name")
        if arguments is not None and not isinstance(arguments, Mapping):
            raise UsageError(f"an object is needed, not {type(arguments).__name__}", argument="arguments")
        seconds = self._options.call_timeout_s if timeout_s is None else timeout_s
        if not seconds > 0:
            raise UsageError("a number of seconds greater than 0 is needed", argument="timeout_s")
        given = _writable(arguments or {})
        self._here()
        started, tool, sent = time.monotonic(), None, False

        async def work(session: McpSession) -> JsonObject:
            nonlocal sent
            sent = True
            return await session.request("tools/call", {"name": tool.original if tool else name, "arguments": given})

        with anyio.move_on_after(seconds):
            tool = await self._find(name)
            try:
                answer = await self._endpoints[tool.endpoint].ask(work)
            except RpcError as error:
                answer = {"content": [{"type": "text", "text": str(error)}], "isError": True}
            result = _result(tool, answer, time.monotonic() - started)
            if result.is_error:
                raise _failed(tool, given, result)
            return result
        raise _late(name, tool, sent, seconds, self.remedies.down)

    def report(self) -> ToolsReport:
        """How the endpoints are, and what was decided about names that several have."""
        unknown = [EndpointReport(name=name, url=url, status="unknown") for name, url in self._urls.items()]
        return ToolsReport(
            endpoints=[endpoint.report() for endpoint in self._endpoints.values()] or unknown,
            on_conflict=self._options.on_conflict,
            conflicts=self._union.conflicts if self._union else [],
            withheld=self._union.withheld if self._union else [],
        )

    async def close(self) -> None:
        """End all sessions."""
        left = self._left(None)
        if left:
            await left

    def _left(self, loop: asyncio.AbstractEventLoop | None) -> Coroutine[Any, Any, None] | None:
        """Forget everything that belongs to the loop so far, and give what ends it, if it must be ended here."""
        old, endpoints, http = self._loop, list(self._endpoints.values()), self._http
        self._endpoints, self._http, self._union, self._loop = {}, None, None, loop
        self._listing = anyio.Lock()
        if http is None or old is None:
            return None
        if old is asyncio.get_running_loop():
            return _end(endpoints, http)
        if old.is_running():
            asyncio.run_coroutine_threadsafe(_end(endpoints, http), old)
        return None

    async def __aenter__(self) -> Self:
        """Nothing happens yet: sessions are opened when they are needed."""
        return self

    async def __aexit__(self, *raised: object) -> None:
        """End all sessions."""
        await self.close()

    def _here(self) -> None:
        """Make sure that the connections belong to the loop that runs now."""
        if self.ended:
            raise EndpointDown(f"these tools are gone with their instance: {self.ended}")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._left(loop)
        if self._endpoints:
            return
        secure = any(url.startswith("https:") for url in self._urls.values())
        # Certificates cost 40 ms to load, once; without TLS there is nothing to verify.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_S)
        timeout = httpx.Timeout(None, connect=10.0)
        self._http = guarded.client(verify=secure, timeout=timeout, limits=limits)
        key = self._key.get_secret_value().strip()
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._endpoints = {
            name: McpEndpoint(
                name, url, self._http, headers, self._options, guessed=self._guessed, remedies=self.remedies
            )
            for name, url in self._urls.items()
        }

    async def _listed(self, refresh: bool) -> Union:
        async with self._listing:
            asked = [one for one in self._endpoints.values() if refresh or self._union is None or one.stale]
            if self._union and not asked:
                return self._union
            await self._ask(asked)
            self._asked_at = anyio.current_time()
            serving = [endpoint for endpoint in self._endpoints.values() if endpoint.status == "serving"]
            if not serving:
                self._union = None
                raise self._all_down()
            union = Union(self._options.on_conflict)
            for endpoint in serving:
                union.add(endpoint.name, endpoint.tools)
            self._union = union
            return union

    async def _ask(self, endpoints: list[McpEndpoint]) -> None:
        """Ask them for their tools, together. A server that has just booted may know none of its endpoints yet."""
        until = anyio.current_time() + self._options.connect_timeout_s
        pause = 0.25
        while True:
            # Each endpoint in a task of its own, and none of them raises: a dead one cancels nobody.
            async with anyio.create_task_group() as tasks:
                for endpoint in endpoints:
                    tasks.start_soon(_list_quietly, endpoint)
            absent = all(endpoint.status == "absent" for endpoint in self._endpoints.values())
            if not absent or anyio.current_time() + pause > until:
                return
            await anyio.sleep(pause)
            pause = min(2 * pause, 2.0)

    async def _find(self, name: str) -> Tool:
        tool = self._union.find(name) if self._union else None
        if tool is not None:
            return tool
        # The endpoints may have others by now; but who asks for nonsense time and again does not ask them each time.
        old = anyio.current_time() - self._asked_at > RELIST_S
        union = await self._listed(refresh=self._union is not None and old)
        tool = union.find(name)
        if tool is None:
            raise self._not_found(name, union)
        return tool

    def _not_found(self, name: str, union: Union) -> ToolNotFound:
        message = f"no tool {name[:LONGEST]!r} on {', '.join(repr(known) for known in self._endpoints)}"
        # Comparing takes longer the longer the name is, and whoever calls may be hostile.
        near = difflib.get_close_matches(name[:LONGEST], itertools.islice(union.tools, 1000), n=3)
        known = ", ".join(itertools.islice(union.tools, 50)) or "none"
        message += f"; did you mean {' or '.join(near)}?" if near else f"; there are: {known}"
        down = [endpoint.name for endpoint in self._endpoints.values() if endpoint.status == "down"]
        if down:
            message += f" (its tools are unknown, because it is down: {', '.join(down)})"
        return ToolNotFound(message, endpoint=down[0] if len(down) == 1 else "")

    def _all_down(self) -> EndpointDown:
        said = "; ".join(f"{one.name!r} ({one.url}): {one.error}" for one in self._endpoints.values())
        refused = all(one.refused for one in self._endpoints.values())
        remedy = self.remedies.key if refused else self.remedies.down
        name = next(iter(self._endpoints)) if len(self._endpoints) == 1 else ""
        return EndpointDown(f"no MCP endpoint answers: {said}; {remedy}", endpoint=name)


async def _end(endpoints: list[McpEndpoint], http: httpx.AsyncClient) -> None:
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as tasks:
            for endpoint in endpoints:
                tasks.start_soon(endpoint.close)
        await http.aclose()


async def _list_quietly(endpoint: McpEndpoint) -> None:
    with suppress(ToolError):
        await endpoint.list()


def check_addresses(urls: Collection[str]) -> None:
    """UsageError where one of them is no address, or there is none."""
    if not urls:
        raise UsageError("no MCP endpoint is given", remedy="name at least one", argument="endpoints")
    for url in urls:
        try:
            parts = urlsplit(url)
            right = parts.scheme in ("http", "https") and parts.port != 0 and bool(httpx.URL(url).host)
        except (ValueError, httpx.InvalidURL):
            right = False
        if not right:
            raise UsageError(f"{url!r} is no http address", argument="endpoints")


def endpoint_name(url: str) -> str:
    """What an endpoint is called unless a name is given: the path of its address."""
    parts = urlsplit(url)
    return parts.path.strip("/") or parts.netloc


def _writable(arguments: Mapping[str, Any]) -> JsonObject:
    given = dict(arguments)
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"they cannot be written as JSON ({error})", argument="arguments") from error
    return given


def _result(tool: Tool, answer: JsonObject, seconds: float) -> ToolResult:
    # Nobody vouches for what a tool says: what is nested too deep, or no text, could not be passed on.
    answer = json_safe(answer)
    blocks, meta = answer.get("content"), answer.get("_meta")
    content = [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []
    return ToolResult(
        tool=tool.name,
        endpoint=tool.endpoint,
        content=content,
        structured=answer.get("structuredContent"),
        is_error=bool(answer.get("isError")),
        meta=meta if isinstance(meta, dict) else None,
        seconds=seconds,
    )


def _failed(tool: Tool, arguments: JsonObject, result: ToolResult) -> ToolFailed:
    said = result.text.strip()[:2000] or "it did not say why"
    message = f"tool {tool.name!r} on endpoint {tool.endpoint!r} failed: {said}"
    problem = _problem(tool.input_schema, arguments)
    if problem:
        message += f"; the arguments do not fit its schema: {problem}"
    return ToolFailed(message, endpoint=tool.endpoint, result=result)


def _problem(schema: JsonObject, arguments: JsonObject) -> str:
    """Why the arguments break the schema. Only looked at after a failure: the environment decides what it takes."""
    with _harmless():
        from jsonschema import Draft202012Validator
        from jsonschema.exceptions import best_match
        from referencing import Registry

        # An empty registry: a schema of unknown origin shall make us fetch nothing.
        error = best_match(Draft202012Validator(schema, registry=Registry()).iter_errors(arguments))
        if error is not None:
            where = ".".join(str(part) for part in error.absolute_path)
            return f"{where}: {error.message}"[:500] if where else error.message[:500]
    return ""


@contextmanager
def _harmless() -> Iterator[None]:
    with suppress(Exception):  # the schema is somebody else's, and this is only an explanation
        yield


def _late(name: str, tool: Tool | None, sent: bool, seconds: float, remedy: str) -> ToolError:
    if tool is None or not sent:
        where = tool.endpoint if tool else ""
        message = f"tool {name!r}: {'endpoint ' + repr(where) if where else 'the endpoints'} did not answer within"
        return EndpointDown(f"{message} {seconds:g} s; {remedy}", endpoint=where)
    message = f"tool {name!r} on endpoint {tool.endpoint!r} gave no answer within {seconds:g} s and was told to stop"
    advice = "it may have acted; raise timeout_s if it needs longer"
    return ToolTimeout(f"{message}; {advice}", endpoint=tool.endpoint, may_have_run=True)
