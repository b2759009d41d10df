"""One instance of the local Fleet: a desk, its manager and its two MCP endpoints, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
from starlette.responses import JSONResponse, StreamingResponse

from rollcage.simulators.fleet.desk import Desk
from rollcage.simulators.fleet.desk_tools import DeskTools
from rollcage.simulators.fleet.faults import ENDPOINTS, Faults
from rollcage.simulators.fleet.listener import LoopbackListener
from rollcage.simulators.fleet.manager import Manager

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_GATED = re.compile(r"^(/[^/]+)?/api/v1/env(/|$)")
PAGE = 4
"""Tools per page: few, so that clients must turn pages."""


class LocalInstance:
    """An instance. `status` is what the control plane tells of it."""

    def __init__(self, instance_id: str, asked: dict[str, Any], version: str, secrets: tuple[str, str]) -> None:
        self.id, self.asked, self.version = instance_id, asked, version
        self._key, self._token = secrets
        self.status = "pending"
        self.created = datetime.now(UTC).isoformat()
        self.beats = 0
        """Heartbeats that came."""
        self.alive_until: float | None = None
        self.away = False
        """Whether it is between the two halves of a restart."""
        self.settled = anyio.Event()
        """Set once it runs or has failed."""
        self.tools: DeskTools | None = None
        self.manager: Manager | None = None
        self._listener = LoopbackListener(self)
        self._hosted: asyncio.Task[None] | None = None
        self._leave = anyio.Event()
        self._mcp: dict[str, Any] = {}
        self._manager_app: Any = None

    async def boot(self, folder: Path, faults: Faults) -> None:
        """Come up, in the time the faults say."""
        self._faults = faults
        await anyio.sleep(faults.boot_s)
        if self.status != "pending":
            return
        if faults.boot_fails:
            self.status = "error"
        else:
            desk = await anyio.to_thread.run_sync(Desk, folder)
            self.tools = DeskTools(desk, faults)
            self.manager = Manager(self.asked["env_key"], desk, faults)
            self._manager_app = self.manager.app()
            await self._serve()
            self.status = "running"
        self.settled.set()

    async def stop(self, status: str = "stopped") -> None:
        """End it."""
        self.status = status
        self.settled.set()
        await self._down()

    async def lose(self) -> None:
        """The machine it runs on dies."""
        await self.stop("error")

    async def restart(self, down_s: float = 0.0) -> None:
        """All of its servers go away and come back, with every session forgotten; the desk's data stays."""
        await self._down()
        self.away = True
        self._faults.moved()
        await anyio.sleep(down_s)
        await self._serve()
        self.away = False

    @property
    def root(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._listener.port}/"

    def answer(self) -> dict[str, Any]:
        """What the control plane tells of it."""
        manager = f"{self.root}api/v1/env"
        names = ("docs", "reset", "diff", "snapshot", "execute_verifier_function")
        urls = {name: f"{manager}/{name}" for name in (*names, "execute_verifier_function_with_upload")}
        known = {
            name: self.asked.get(name) for name in ("env_key", "env_variables", "data_key", "data_version", "run_id")
        }
        return {
            **known,
            "instance_id": self.id,
            "version": self.version,
            "status": self.status,
            "subdomain": self.id,
            "created_at": self.created,
            "updated_at": self.created,
            "team_id": "local",
            "region": self.asked.get("region") or "local",
            "heartbeat_interval": self.asked.get("heartbeat_interval"),
            "urls": {"root": self.root, "app": [self.root], "manager": {"api": manager, **urls}},
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request to the instance."""
        path, headers = scope["path"].rstrip("/"), dict(scope["headers"])
        name = path.strip("/")
        if path in self._faults.dripping:
            await StreamingResponse(_drops(), media_type="application/json")(scope, receive, send)
        elif name in ENDPOINTS:
            await self._mcp_request(name, scope, receive, send)
        elif _GATED.match(path) and headers.get(b"x-runner-token", b"").decode() == self._token:
            await self._manager_app(scope, receive, send)
        else:
            # As Fleet does: who lacks the token learns not even that there is something.
            await _refuse(404, scope, receive, send)

    async def _mcp_request(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        bearer = dict(scope["headers"]).get(b"authorization", b"").decode()
        if name in self._faults.missing:
            await _refuse(404, scope, receive, send)
        elif name in self._faults.refusing or bearer != f"Bearer {self._key}":
            await _refuse(401, scope, receive, send)
        elif self._faults.drop_answers > 0 and scope["method"] == "POST":
            await self._dropping(self._mcp[name], scope, receive, send)
        else:
            await self._mcp[name](scope, receive, send)

    async def _dropping(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
        """The tool runs; when its answer should go out, the connection breaks."""
        messages = [await receive()]
        while messages[-1].get("more_body"):
            messages.append(await receive())
        call = json.loads(b"".join(message.get("body", b"") for message in messages)).get("method") == "tools/call"

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop(0) if messages else await receive()

        async def cut(message: MutableMapping[str, Any]) -> None:
            if call and b'"result"' in message.get("body", b"") and self._faults.drop_answers > 0:
                self._faults.drop_answers -= 1
                self._listener.hang_up(scope)
                return
            await send(message)

        await app(scope, replay, cut)

    async def _serve(self) -> None:
        ready = anyio.Event()
        self._leave = anyio.Event()
        self._hosted = asyncio.ensure_future(self._host(ready, self._leave))
        await ready.wait()
        await self._listener.start()

    async def _down(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._listener.stop()
            self._leave.set()
            hosted, self._hosted = self._hosted, None
            if hosted:
                await hosted

    async def _host(self, ready: anyio.Event, leave: anyio.Event) -> None:
        """The MCP servers, from their start to their end in one task."""
        from fastmcp import FastMCP

        assert self.tools is not None
        api = FastMCP("ticket-desk", dereference_schemas=False, list_page_size=PAGE)
        aggregator = FastMCP("aggregator", dereference_schemas=False, list_page_size=PAGE)
        for tool in self.tools.api():
            api.tool(tool)
        for tool in [self.tools.computer, *(self.tools.api() if self._faults.duplicate_tools else ())]:
            aggregator.tool(tool)
        async with AsyncExitStack() as stack:
            for name, server in zip(ENDPOINTS, (api, aggregator), strict=True):
                app = server.http_app(path=f"/{name}", event_store=_event_store() if self._faults.resumable else None)
                await stack.enter_async_context(app.router.lifespan_context(app))
                self._mcp[name] = app
            ready.set()
            await leave.wait()


async def _drops() -> AsyncIterator[bytes]:
    while True:
        yield b" "
        await anyio.sleep(0.1)


def _event_store() -> Any:
    from fastmcp.server.event_store import EventStore

    return EventStore()


async def _refuse(status: int, scope: Scope, receive: Receive, send: Send) -> None:
    words = {401: "Unauthorized", 404: "Not Found"}
    await JSONResponse({"detail": words[status]}, status_code=status)(scope, receive, send)
