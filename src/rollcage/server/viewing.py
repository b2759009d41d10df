"""The page, read-only: over a log that somebody else may be writing, or over an archive that `bundle` made.

Nothing can be started or stopped here. Of an archive only what the server answered is taken, as data; the page is ours.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import zipfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from rollcage.errors import UsageError
from rollcage.server import api
from rollcage.server.app import PAGE_HEADERS, page_app
from rollcage.server.auth import loopback
from rollcage.server.batches import BatchReader
from rollcage.server.bundle import page_files, script_of
from rollcage.server.gate import Gate
from rollcage.server.problems import refusal
from rollcage.server.reading import LogReader
from rollcage.server.serving import ServeOptions, checked, listening, server_of, url_of
from rollcage.settings import Settings
from rollcage.store import Store
from rollcage.store.copying import LOG, newest_schema

TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
PUT = (b"rollcagePut(", b");")
LARGEST = 1 << 30
"""A script of an archive that unpacks to more than this is not shown."""


async def view(settings: Settings, options: ServeOptions, source: Path, ready: Callable[[str], None]) -> int:
    """Show what is in `source` until somebody stops it; `ready` gets the address."""
    keys = checked(settings, options)
    with listening(options.host, options.port) as listener:
        async with _opened(source) as app, anyio.create_task_group() as tasks:
            gate = Gate(_at_web(app), keys=keys, only_loopback=loopback(options.host), max_body=1 << 20)
            server = server_of(gate, max_body=1 << 20)

            async def stop_on_signal() -> None:
                with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    async for _ in signals:
                        server.should_exit = server.force_exit = True

            async def say() -> None:
                while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                    await anyio.sleep(0.005)
                ready(url_of(options.host, listener))

            tasks.start_soon(stop_on_signal)
            tasks.start_soon(say)
            await server.serve(sockets=[listener])
            tasks.cancel_scope.cancel()
    return 0


@asynccontextmanager
async def _opened(source: Path) -> AsyncIterator[ASGIApp]:
    """An app over a log, a state folder, or an archive; UsageError where it is none of them."""
    source = await anyio.to_thread.run_sync(lambda: source / LOG if (source / LOG).exists() else source)
    if zipfile.is_zipfile(source):
        try:
            with zipfile.ZipFile(source) as archive:
                yield copy_app(lambda name: _unpacked(archive, name))
        except zipfile.BadZipFile as error:
            raise UsageError(f"{source} is damaged: {error}", argument="FILE") from error
        return
    if source.is_dir() and (source / "data").is_dir():
        yield copy_app(lambda name: _in_folder(source, name))
        return
    if not source.is_file():
        raise UsageError(f"there is no log and no bundle at {source}", argument="FILE")
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = await anyio.to_thread.run_sync(newest_schema, source, scratch)
        frozen = log == source and not (os.access(source, os.W_OK) and os.access(source.parent, os.W_OK))
        store = await stack.enter_async_context(Store.open(log, read_only=frozen))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        yield log_app(store, LogReader(store, tasks))
        tasks.cancel_scope.cancel()


def log_app(store: Store, reader: LogReader) -> ASGIApp:
    """The page and what it reads, over a log."""
    return page_app(api.build_reading(reader, BatchReader(store)), mode="view")


Fetch = Callable[[str], bytes | None]
"""A file of an archive, by its name; None where there is none."""


def copy_app(fetch: Fetch) -> ASGIApp:
    """Our page over the answers in somebody's archive."""
    files = page_files()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope.get("path", "").removeprefix("/web/") or "index.html"
        body = files.get(name)
        if body is None and name.startswith("data/"):
            body = await anyio.to_thread.run_sync(lambda: as_data(fetch(name)))
        if body is None or scope["method"] not in ("GET", "HEAD"):
            await refusal(404, "not_found", "there is no such page")(scope, receive, send)
            return
        kind = TYPES.get(Path(name).suffix, "text/plain")
        await Response(body, media_type=kind, headers=PAGE_HEADERS)(scope, receive, send)

    return app


def as_data(script: bytes | None) -> bytes | None:
    """The script again, made of its data alone: whatever else is in it never runs. None where it is not ours."""
    text = (script or b"").strip()
    if not (text.startswith(PUT[0]) and text.endswith(PUT[1])):
        return None
    try:
        path, value = json.loads(b"[" + text[len(PUT[0]) : -len(PUT[1])] + b"]")
        return script_of(str(path), json.dumps(value).encode())
    except (ValueError, RecursionError):
        return None


def _unpacked(archive: zipfile.ZipFile, name: str) -> bytes | None:
    try:
        return archive.read(name) if archive.getinfo(name).file_size <= LARGEST else None
    except KeyError:
        return None


def _in_folder(folder: Path, name: str) -> bytes | None:
    path = (folder / name).resolve()
    return path.read_bytes() if path.is_relative_to(folder.resolve()) and path.is_file() else None


def _at_web(app: ASGIApp) -> ASGIApp:
    async def at(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http":
            return
        if path in ("/", "/web"):
            await RedirectResponse("/web/")(scope, receive, send)
        else:
            await app(scope, receive, send)

    return at
