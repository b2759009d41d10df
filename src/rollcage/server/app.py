"""Puts the server together: our API at once, the OpenEnv and MCP parts as soon as their slow imports are done."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType

import anyio
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse
from starlette.routing import Match
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollcage.server import api, reference
from rollcage.server.admission import Keys
from rollcage.server.gate import Gate
from rollcage.server.lifespan import started
from rollcage.server.problems import WORDS, refusal
from rollcage.server.service import Service

log = logging.getLogger("rollcage.server")

STATIC = Path(__file__).parent / "static"
"""The web page, where it was built."""
PAGE_HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; "
    b"object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"referrer-policy": b"no-referrer",
}
OURS = ("/health", "/metrics", "/rollouts", "/environments", "/page/")


class App:
    """One ASGI app out of several: each address belongs to one of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._api = api.build(service)
        self._page = _page() if (STATIC / "index.html").exists() else None
        self._ready = anyio.Event()
        self._problem = ""
        self._mcp: ASGIApp | None = None
        self._environment: ASGIApp | None = None

    @asynccontextmanager
    async def parts(self) -> AsyncIterator[None]:
        """Fetch the slow parts in the background; they serve until the end of the block."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._fetch)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _fetch(self) -> None:
        # They are opened and closed by this one task, as cancel scopes want it.
        async with AsyncExitStack() as mine:
            try:
                environment, tools = await _modules()
                self._environment = environment.build(self._service)
                await mine.enter_async_context(started(self._environment))
                self._mcp = tools.build(self._service, self._environment)
                await mine.enter_async_context(started(self._mcp))
            except ImportError as error:
                self._problem = f"OpenEnv and MCP are not served here: {error}; pip install 'rollcage[server]'"
                log.warning(self._problem)
            except Exception as error:  # one part must not take the others down
                self._problem = f"OpenEnv and MCP are not served here: {type(error).__name__}: {error}"
                log.exception("a part of the server did not start")
            self._ready.set()
            await anyio.sleep_forever()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Speak ASGI."""
        path: str = scope.get("path", "")
        if scope["type"] == "http":
            if path in ("/openapi.json", "/docs"):
                await self._document(scope, receive, send)
                return
            if path.startswith(OURS):
                await self._api(scope, receive, send)
                return
            if path == "/" or (path.rstrip("/") == "/web" and path != "/web/"):
                target = "/web/" if self._page else "/docs"
                await RedirectResponse(target)(scope, receive, send)
                return
            if self._page and path.startswith("/web/"):
                scope = {**scope, "root_path": scope.get("root_path", "") + "/web"}
                await self._page(scope, receive, send)
                return
        await self._elsewhere(scope, receive, send)

    async def _document(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ready.wait()
        others = (self._environment,) if isinstance(self._environment, FastAPI) else ()
        document = api.document(self._api, others)
        if scope["method"] not in ("GET", "HEAD"):
            answer = refusal(405, "method_not_allowed", "this address can only be read", headers={"Allow": "GET, HEAD"})
        elif scope["path"] == "/docs":
            answer = HTMLResponse(reference.page(document), headers=reference.HEADERS)
        else:
            answer = JSONResponse(document)
        await answer(scope, receive, send)

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ready.wait()
        tools = scope["type"] == "http" and scope["path"].rstrip("/") == "/mcp"
        app = self._mcp if tools else self._environment
        if scope["type"] == "http" and isinstance(app, FastAPI) and not _has(app, scope):
            await refusal(404, *WORDS[404])(scope, receive, send)
        elif app is not None:
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await refusal(503, "not_served", self._problem)(scope, receive, send)
        else:
            await receive()
            await send({"type": "websocket.close", "code": 1013, "reason": "not served here"})


def _has(app: FastAPI, scope: Scope) -> bool:
    """Whether there is something at this address; if not, the refusal is ours, in our own shape."""
    return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)


async def _modules() -> tuple[ModuleType, ModuleType]:
    """The slow parts, imported in a thread that nobody waits for: a server may stop in the middle of it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[ModuleType, ModuleType]] = loop.create_future()

    def settle(modules: tuple[ModuleType, ModuleType] | None, error: Exception | None) -> None:
        if not done.done():
            if modules is not None:
                done.set_result(modules)
            elif error is not None:
                done.set_exception(error)

    def fetch() -> None:
        modules, failed = None, None
        try:
            modules = (import_module("rollcage.server.environment"), import_module("rollcage.server.mcp"))
        except Exception as error:  # noqa: BLE001 - told to the one who asked
            failed = error
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, modules, failed)

    threading.Thread(target=fetch, name="rollcage-imports", daemon=True).start()
    return await done


def _page() -> ASGIApp:
    files = StaticFiles(directory=STATIC, html=True)

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *PAGE_HEADERS.items()]
            await send(message)

        try:
            await files(scope, receive, guarded)
        except HTTPException as error:
            await refusal(error.status_code, "not_found", "there is no such page")(scope, receive, guarded)

    return page


def gated(app: App, service: Service, *, keys: Keys, only_loopback: bool, max_body: int) -> Gate:
    """The app behind its gate."""
    return Gate(app, keys=keys, only_loopback=only_loopback, max_body=max_body, answered=service.metrics.answered)
