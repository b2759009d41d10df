"""An OTLP collector for the tests: a real HTTP server that decodes what it gets by OpenTelemetry's own protobufs."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector:
    """What it got, and how it answers."""

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    """Answers of the next requests; 200 after them."""
    open: threading.Event = field(default_factory=threading.Event)
    """Requests are answered only while it is set."""
    arrived: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released by each request, before it is answered."""
    spans: list[Span] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)

    def traces(self) -> dict[str, list[Span]]:
        """Spans by trace, in the order in which they came."""
        found: dict[str, list[Span]] = {}
        for span in self.spans:
            found.setdefault(span.trace_id.hex(), []).append(span)
        return found


def attributes(of: Span | Span.Event) -> dict[str, Any]:
    """As plain values."""
    return {each.key: _plain(each.value) for each in of.attributes}


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, str(kind))


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a port of its own, until the end of the block."""
    collector = Collector()
    collector.open.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            collector.arrived.release()
            collector.open.wait()
            status = collector.statuses.pop(0) if collector.statuses else 200
            collector.headers.append({name.lower(): value for name, value in self.headers.items()})
            if status == 200 and self.path == "/v1/traces":
                request = ExportTraceServiceRequest.FromString(body)
                collector.bodies.append(body)
                for group in request.resource_spans:
                    collector.resources.append({each.key: _plain(each.value) for each in group.resource.attributes})
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(status if self.path == "/v1/traces" else 404)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        collector.open.set()
        server.shutdown()
        server.server_close()
        thread.join()
