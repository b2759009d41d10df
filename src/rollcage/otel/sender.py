"""Sends the trace of every rollout that ends here to an OTLP collector. What it does never holds up a rollout.

Only names of rollouts wait: their traces are made from the log when it is their turn. So a collector that is slow or
away costs no memory, and what it missed is sent once it is back, as long as this process lives.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from importlib.metadata import version
from typing import Any
from urllib.parse import urlsplit

import anyio
import requests
from anyio import from_thread
from anyio.lowlevel import current_token
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.util.re import parse_env_headers

from rollcage.errors import StoreError, UsageError
from rollcage.events import Ended, Event
from rollcage.otel.trace import spans_of
from rollcage.settings import OtlpSettings
from rollcage.store import Store

MOST_WAITING = 10_000
"""Names of rollouts whose traces wait."""
REQUEST_S = 5.0
"""How long one request may take, with its repetitions."""
FLUSH_S = 10.0
"""How long the end waits for traces that are not sent yet."""
PAUSES_S = (1.0, 2.0, 5.0, 15.0)
"""Between tries of a collector that is away; the last one from then on."""
CHUNK_SPANS = 500
CHUNK_BYTES = 2_000_000
"""Collectors bound their requests, often at 4 MB."""


class _RememberingSession(requests.Session):
    """Keeps what came of the latest request."""

    status = 0
    said = "it did not answer"

    def send(self, request: Any, **more: Any) -> Any:
        """As it is, and noted. To where an answer leads nothing goes: keys in headers would go along."""
        self.status, self.said = 0, "it did not answer"
        try:
            response = super().send(request, **{**more, "allow_redirects": False})
        except requests.RequestException as error:
            self.said = type(error).__name__
            raise
        self.status, self.said = response.status_code, f"HTTP {response.status_code}"
        return response

    @property
    def refused(self) -> bool:
        """Whether the same request would be refused again."""
        return 300 <= self.status < 500 and self.status not in (408, 429)


class TraceSender:
    """Takes names of rollouts, and sends their traces one after the other."""

    def __init__(self, store: Store, to: OtlpSettings, say: Callable[[str], None]) -> None:
        self._store, self._content, self._say = store, to.content, say
        self._where, endpoint = checked_address(to.url)
        self._session = _RememberingSession()
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint,
            headers=parse_env_headers(to.headers.get_secret_value(), liberal=True),
            timeout=REQUEST_S,
            compression=Compression.Gzip,
            session=self._session,
        )
        about = Resource({"service.name": "rollcage", "service.version": version("rollcage")})
        self._resource = about.merge(OTELResourceDetector().detect())
        self._send, self._receive = anyio.create_memory_object_stream[str](MOST_WAITING)
        self._finishing = anyio.Event()
        self._warned = False
        self._ended = self._sent = 0

    def on_event(self, rollout_id: str, event: Event) -> None:
        """Told of every event; never waits."""
        if isinstance(event, Ended):
            self._ended += 1
            with suppress(anyio.WouldBlock):
                self._send.send_nowait(rollout_id)

    async def run(self) -> None:
        """Until `finish` and all is sent, or the collector is away then."""
        async with self._receive as waiting:
            async for rollout_id in waiting:
                if not await self._delivered(rollout_id):
                    return

    def finish(self) -> None:
        """Take no more; `run` ends once all is sent."""
        self._finishing.set()
        self._send.close()

    def close(self) -> None:
        """Say what was not sent, and let go of the collector."""
        if missed := self._ended - self._sent:
            self._say(f"{missed} of {self._ended} traces were not sent to {self._where}; the log has the rollouts")
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    async def _delivered(self, rollout_id: str) -> bool:
        """False where the collector is away and nobody waits for it any more."""
        pauses = iter(PAUSES_S)
        while True:
            try:
                entries = await self._store.read(rollout_id)
            except StoreError:
                return True
            sent = await _apart(partial(self._export, entries))
            if sent:
                self._sent += 1
            else:
                self._warn()
            if sent or sent is None or self._session.refused:
                return True
            if self._finishing.is_set():
                return False
            with anyio.move_on_after(next(pauses, PAUSES_S[-1])):
                await self._finishing.wait()

    def _export(self, entries: Sequence[Any]) -> bool:
        spans = spans_of(entries, self._resource, content=self._content)
        return all(
            self._exporter.export(chunk) is SpanExportResult.SUCCESS and self._session.status < 300
            for chunk in _chunks(spans)
        )

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"the collector at {self._where} took no traces ({self._session.said}); rollouts go on")


def _chunks(spans: Sequence[ReadableSpan]) -> Iterator[list[ReadableSpan]]:
    chunk: list[ReadableSpan] = []
    size = 0
    for span in spans:
        mine = sum(len(value) for value in (span.attributes or {}).values() if isinstance(value, str))
        if chunk and (len(chunk) == CHUNK_SPANS or size + mine > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(span)
        size += mine
    if chunk:
        yield chunk


async def _apart(work: Callable[[], bool]) -> bool | None:
    """Run it in a thread that nobody waits for at the end: a collector may answer a byte a minute. None: it broke."""
    done, found = anyio.Event(), list[bool]()
    token = current_token()

    def run() -> None:
        with suppress(Exception):
            found.append(work())
        with suppress(RuntimeError):  # everything is over already
            from_thread.run_sync(done.set, token=token)

    threading.Thread(target=run, name="rollcage-otlp", daemon=True).start()
    await done.wait()
    return found[0] if found else None


def checked_address(url: str) -> tuple[str, str]:
    """How it is called in messages, and where traces go; UsageError where it is no address."""
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"{url!r} is no address", argument="otlp", remedy="it looks like http://host:4318")
    if parts.username or parts.password:
        remedy = "put credentials into OTEL_EXPORTER_OTLP_HEADERS"
        raise UsageError("an address has no credentials in it", argument="otlp", remedy=remedy)
    path = parts.path.rstrip("/").removesuffix("/v1/traces")
    shown = f"{parts.scheme}://{parts.netloc}{path}"
    return shown, f"{shown}/v1/traces" + (f"?{parts.query}" if parts.query else "")


@asynccontextmanager
async def sending(
    store: Store, to: OtlpSettings, say: Callable[[str], None]
) -> AsyncIterator[Callable[[str, Event], None]]:
    """Traces of what ends while the block lasts; what it yields is told of every event."""
    sender, over = TraceSender(store, to, say), anyio.Event()
    running = anyio.CancelScope(shield=True)

    async def run() -> None:
        with running:
            await sender.run()
        over.set()

    with closing(sender):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                yield sender.on_event
            finally:
                sender.finish()
                with anyio.move_on_after(FLUSH_S, shield=True):
                    await over.wait()
                running.cancel()
