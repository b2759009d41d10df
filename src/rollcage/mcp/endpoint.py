"""One MCP endpoint: opens its session when needed, again after a restart, and repeats what cannot have run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import anyio
import httpx

from rollcage.mcp.errors import EndpointDown
from rollcage.mcp.session import McpSession, RpcError, SessionBroken
from rollcage.mcp.types import EndpointReport, Remedies, ToolOptions
from rollcage.types import JsonObject

T = TypeVar("T")

PAGES = 250
"""Pages of tools that are read at most."""
MOST = 10_000
"""Tools that an endpoint may have."""

_PASSING = (0, 404, 408, 425, 429, 503)
"""Statuses that may be others in a moment; 0 is no answer at all."""


class McpEndpoint:
    """An endpoint and its session."""

    def __init__(
        self,
        name: str,
        url: str,
        http: httpx.AsyncClient,
        headers: dict[str, str],
        options: ToolOptions,
        *,
        guessed: bool = False,
        remedies: Remedies | None = None,
    ) -> None:
        """`guessed`: nobody said that there is an endpoint at this address; one that never answered is absent."""
        self.name, self.url = name, url
        self._http, self._headers, self._options = http, headers, options
        self._guessed, self._remedies = guessed, remedies or Remedies()
        self._connecting = anyio.Lock()
        self._session: McpSession | None = None
        self._served = False
        self._connects = 0
        self.status: Literal["unknown", "serving", "absent", "down"] = "unknown"
        self.error = ""
        self.refused = False
        """Whether it last refused the key."""
        self.tools: list[JsonObject] = []
        """What it offered when last asked."""

    @property
    def stale(self) -> bool:
        """Whether its tools should be asked for (again)."""
        return self.status in ("unknown", "down") or (self._session is not None and self._session.tools_changed)

    def report(self) -> EndpointReport:
        """How it is."""
        return EndpointReport(
            name=self.name,
            url=self.url,
            status=self.status,
            tools=len(self.tools),
            error=self.error,
            protocol=self._session.protocol if self._session else "",
            server=self._session.server if self._session else "",
            connects=self._connects,
        )

    async def list(self) -> None:
        """Ask for its tools, all pages; what fails is kept in `status` and `error` and raised."""

        async def pages(session: McpSession) -> list[JsonObject]:
            session.tools_changed = False
            tools: list[JsonObject] = []
            cursor: str | None = None
            for _ in range(PAGES):
                result = await session.request("tools/list", {"cursor": cursor} if cursor else {})
                listed = result.get("tools")
                tools += [tool for tool in listed if isinstance(tool, dict)] if isinstance(listed, list) else []
                if len(tools) > MOST:
                    raise RpcError({"message": f"there are more than {MOST}"})
                following = result.get("nextCursor")
                if not following or following == cursor:
                    break
                cursor = str(following)
            return tools

        seconds = self._options.connect_timeout_s
        try:
            with anyio.fail_after(seconds):
                self.tools = await self.ask(pages, repeatable=True)
        except RpcError as error:
            raise self._down(SessionBroken(f"cannot list its tools: {error}", may_have_run=False)) from error
        except TimeoutError:
            raise self._down(
                SessionBroken(f"its tools were not listed within {seconds:g} s", may_have_run=False)
            ) from None

    async def ask(self, work: Callable[[McpSession], Awaitable[T]], *, repeatable: bool = False) -> T:
        """Do something in its session. It is done again only where it cannot have been done, or may be done twice."""
        attempt, forgotten = 1, False
        while True:
            session: McpSession | None = None
            try:
                session = await self._opened()
                result = await work(session)
            except SessionBroken as broken:
                if broken.session_gone and self._session is session:
                    self._session = None
                # Only the session is gone: the endpoint itself is there (again), so there is nothing to wait for.
                if broken.session_gone and not forgotten:
                    forgotten = True
                    continue
                if attempt >= self._options.attempts or not self._again(broken, repeatable):
                    raise self._down(broken) from broken
                await anyio.sleep(min(0.1 * 2**attempt, 2.0))
                attempt += 1
            else:
                self.status, self.error, self.refused, self._served = "serving", "", False, True
                return result

    async def close(self) -> None:
        """End its session."""
        session, self._session = self._session, None
        if session:
            await session.close()

    def _again(self, broken: SessionBroken, repeatable: bool) -> bool:
        if broken.session_gone:
            return True
        if self._guessed and not self._served and broken.status in (404, 405):
            return False
        return broken.status in _PASSING and (repeatable or not broken.may_have_run)

    async def _opened(self) -> McpSession:
        if self._session:
            return self._session
        async with self._connecting:
            if self._session:
                return self._session
            session = McpSession(self._http, self.url, dict(self._headers))
            try:
                with anyio.fail_after(self._options.connect_timeout_s):
                    await session.open()
            except TimeoutError as error:
                seconds = self._options.connect_timeout_s
                raise SessionBroken(f"no answer within {seconds:g} s", status=504, may_have_run=False) from error
            except RpcError as error:
                raise SessionBroken(
                    f"it does not speak MCP as we do: {error}", status=400, may_have_run=False
                ) from error
            except SessionBroken as broken:
                # A handshake changes nothing, so it may always be repeated.
                raise SessionBroken(str(broken), status=broken.status, may_have_run=False) from broken
            self._session = session
            self._connects += 1
            return session

    def _down(self, broken: SessionBroken) -> EndpointDown:
        """The error that says so, once it is noted."""
        absent = self._guessed and not self._served and broken.status in (404, 405)
        self.status, self.error = ("absent" if absent else "down"), str(broken)
        self.refused = broken.status in (401, 403)
        if self.refused:
            remedy = f"it refuses the key: {self._remedies.key}"
        elif broken.may_have_run:
            remedy = "the call may have run all the same: look at the environment's state before you call again"
        elif absent:
            remedy = "there is no such endpoint"
        else:
            remedy = self._remedies.down
        message = f"endpoint {self.name!r} ({self.url}) is down: {broken}; {remedy}"
        return EndpointDown(message, endpoint=self.name, may_have_run=broken.may_have_run)
