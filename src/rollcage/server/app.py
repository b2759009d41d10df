"""Puts the server together: our API at once, the OpenEnv and MCP parts as soon as their slow imports are done."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import anyio
from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, RedirectResponse
from starlette.routing import Match
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollcage.errors import SetupError
from rollcage.server import api
from rollcage.server.auth import Keys
from rollcage.server.gate import Gate
from rollcage.server.problems import WORDS, refusal
from rollcage.server.service import Service

log = logging.getLogger("rollcage.server")

STATIC = Path(__file__).parent / "web"
"""The page at /web, and the one at /docs."""
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
    "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
WITHOUT_OPENENV = (
    "OpenEnv is not installed, so /ws, /reset and /step are not served; pip install 'rollcage[openenv]' adds them"
)
OURS = (
    "/health",
    "/ready",
    "/metrics",
    "/rollouts",
    "/groups",
    "/batches",
    "/capacity",
    "/nodes",
    "/gateway/",
    "/environments",
    "/page/",
)


class App:
    """One ASGI app out of several: each address belongs to one of them."""

    def __init__(self, service: Service, *, keyed: bool) -> None:
        """`keyed`: whether callers need a key; the document says so."""
        self._service, self._keyed = service, keyed
        self._api = api.build(service)
        self._page = _page()
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
                if environment is None:
                    log.warning(WITHOUT_OPENENV)
                    self._environment = _absent
                else:
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
                await RedirectResponse("/web/")(scope, receive, send)
                return
            if path.startswith("/web/"):
                scope = {**scope, "root_path": scope.get("root_path", "") + "/web"}
                await self._page(scope, receive, send)
                return
        await self._elsewhere(scope, receive, send)

    async def _document(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            answer = refusal(405, "method_not_allowed", "this address can only be read", headers={"Allow": "GET, HEAD"})
        elif scope["path"] == "/docs":
            answer = FileResponse(STATIC / "docs.html", headers=PAGE_HEADERS)
        else:
            await self._ready.wait()
            others = (self._environment,) if isinstance(self._environment, FastAPI) else ()
            answer = JSONResponse(api.document(self._api, others, keyed=self._keyed))
        await answer(scope, receive, send)

    async def _elsewhere(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._ready.wait()
        tools = scope["type"] == "http" and scope["path"].rstrip("/") == "/mcp"
        app = self._mcp if tools else self._environment
        if scope["type"] == "http" and isinstance(app, FastAPI) and not _has(app, scope):
            await refusal(404, *WORDS[404])(scope, receive, send)
        elif app is not None:
            await app(scope, receive, send)
        else:
            await _refuse(503, self._problem, scope, receive, send)


async def _absent(scope: Scope, receive: Receive, send: Send) -> None:
    """Stands where OpenEnv's app would, on machines without it."""
    await _refuse(404, f"there is nothing at this address; {WITHOUT_OPENENV}", scope, receive, send)


async def _refuse(status: int, why: str, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        await refusal(status, "not_served", why)(scope, receive, send)
    else:
        await receive()
        await send({"type": "websocket.close", "code": 1013, "reason": "not served here"})


def _has(app: FastAPI, scope: Scope) -> bool:
    """Whether there is something at this address; if not, the refusal is ours, in our own shape."""
    return any(route.matches(scope)[0] is not Match.NONE for route in app.routes)


Parts = tuple[ModuleType | None, ModuleType]
"""The modules of OpenEnv's environment (None where OpenEnv is not installed) and of MCP."""


async def _modules() -> Parts:
    """The slow parts, imported in a thread that nobody waits for: a server may stop in the middle of it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Parts] = loop.create_future()

    def settle(modules: Parts | None, error: Exception | None) -> None:
        if not done.done():
            if modules is not None:
                done.set_result(modules)
            elif error is not None:
                done.set_exception(error)

    def fetch() -> None:
        modules, failed = None, None
        try:
            environment = import_module("rollcage.server.openenv") if find_spec("openenv") else None
            modules = (environment, import_module("rollcage.server.mcp"))
        except Exception as error:  # noqa: BLE001 - told to the one who asked
            failed = error
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, modules, failed)

    threading.Thread(target=fetch, name="rollcage-imports", daemon=True).start()
    return await done


def page_app(rest: ASGIApp, *, mode: str) -> ASGIApp:
    """The page, told its mode, at /web; everything else is the other app's."""
    page = _page()
    marked = f'<meta charset="utf-8" />\n    <meta name="rollcage-mode" content="{mode}" />'
    index = (STATIC / "index.html").read_text("utf-8").replace('<meta charset="utf-8" />', marked)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path in ("/web/", "/web/index.html"):
            await HTMLResponse(index, headers=PAGE_HEADERS)(scope, receive, send)
        elif path.startswith("/web/"):
            await page({**scope, "root_path": scope.get("root_path", "") + "/web"}, receive, send)
        else:
            await rest(scope, receive, send)

    return app


def _page() -> ASGIApp:
    files = StaticFiles(directory=STATIC, html=True)

    async def page(scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(PAGE_HEADERS)
            await send(message)

        try:
            await files(scope, receive, guarded)
        except HTTPException as error:
            await refusal(error.status_code, "not_found", "there is no such page")(scope, receive, guarded)

    return page


def gated(app: App, service: Service, *, keys: Keys, only_loopback: bool, max_body: int) -> Gate:
    """The app behind its gate."""
    return Gate(app, keys=keys, only_loopback=only_loopback, max_body=max_body, answered=service.metrics.answered)


@asynccontextmanager
async def started(app: ASGIApp) -> AsyncIterator[None]:
    """The app, started, until the end of the block. One that knows no lifespan needs none."""
    to_app, from_us = anyio.create_memory_object_stream[Message](2)
    answers, from_app = anyio.create_memory_object_stream[Message](2)

    async def speak() -> None:
        async with answers:
            try:
                await app({"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}, from_us.receive, answers.send)
            except Exception as error:  # noqa: BLE001 - an app that knows no lifespan says so in whatever way it likes
                with anyio.move_on_after(1):
                    await answers.send({"type": "lifespan.unknown", "message": str(error)})

    async def ask(kind: str) -> str:
        with to_app.clone() as stream:
            await stream.send({"type": kind})
        try:
            answer = await from_app.receive()
        except anyio.EndOfStream:
            return ""
        if answer["type"] == f"{kind}.failed":
            raise SetupError(f"a part of the server did not start: {answer.get('message', '')}")
        return str(answer["type"])

    async with anyio.create_task_group() as tasks, to_app, from_us, from_app:
        tasks.start_soon(speak)
        running = await ask("lifespan.startup") == "lifespan.startup.complete"
        try:
            yield
        finally:
            if running:
                with anyio.move_on_after(5, shield=True):
                    await ask("lifespan.shutdown")
            tasks.cancel_scope.cancel()
