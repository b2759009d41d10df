"""What a message to /mcp is: MCP or OpenEnv's own, well formed or not, of which protocol version. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from rollcage.types import JsonObject

HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Protocol versions that begin with `initialize`."""
MODERN_VERSIONS = ("2026-07-28",)
"""Protocol versions in which every request stands for itself."""

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
HEADER_MISMATCH, UNSUPPORTED_VERSION, CANCELLED = -32020, -32022, -32800

_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
SERVER = {"name": "rollcage", "version": version("rollcage")}


class Refused(Exception):
    """A request that is answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: object = None, *, status: int = 200) -> None:
        super().__init__(message)
        self.code, self.message, self.data, self.status = code, message, data, status


@dataclass(frozen=True)
class Request:
    """One JSON-RPC message with what its HTTP headers say."""

    body: JsonObject
    headers: Mapping[str, str]
    modern: bool = False

    @property
    def id(self) -> object:
        """Names it among the client's requests; null in a notification."""
        return self.body.get("id")

    @property
    def method(self) -> str:
        """What is asked for."""
        method = self.body.get("method")
        return method if isinstance(method, str) else ""

    @property
    def params(self) -> JsonObject:
        """With what."""
        params = self.body.get("params")
        return params if isinstance(params, dict) else {}

    @property
    def meta(self) -> JsonObject:
        """What goes with every request."""
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def progress_token(self) -> str | int | None:
        """Given where the client wants to hear how it goes."""
        token = self.meta.get("progressToken")
        return token if isinstance(token, str | int) and not isinstance(token, bool) else None

    @property
    def session(self) -> str:
        """The client's session; empty where it has none."""
        return self.headers.get("mcp-session-id", "")

    @property
    def takes_large_events(self) -> bool:
        """Whether the client reads events above 1 MiB. Those on httpx2 break off there; results are often longer."""
        return "httpx2" not in self.headers.get("user-agent", "")

    @property
    def extra(self) -> JsonObject:
        """What every result of the modern protocol carries."""
        return (
            {"resultType": "complete", "_meta": {"io.modelcontextprotocol/serverInfo": SERVER}} if self.modern else {}
        )


def speaks_mcp(headers: Mapping[str, str], body: object) -> bool:
    """Whether a POST is MCP; otherwise it is OpenEnv's JSON-RPC subset, which shares the address."""
    method, params = (body.get("method"), body.get("params")) if isinstance(body, dict) else (None, None)
    method = method if isinstance(method, str) else ""
    if method.startswith("openenv/") or (isinstance(params, dict) and "session_id" in params):
        return False
    if "mcp-session-id" in headers or "mcp-protocol-version" in headers:
        return True
    if "text/event-stream" in headers.get("accept", ""):
        return True
    return method in ("initialize", "ping", "server/discover") or method.startswith("notifications/")


def malformed(body: object) -> tuple[int, str] | None:
    """What is wrong with a message for OpenEnv. Its own words repeat the message, and there may be a key in it."""
    if body is None:
        return PARSE_ERROR, "Parse error"
    if not isinstance(body, dict) or body.get("jsonrpc") != "2.0" or not isinstance(body.get("method"), str):
        return INVALID_REQUEST, "Invalid request: it must be one JSON-RPC 2.0 message with a method"
    if body.keys() - {"jsonrpc", "method", "params", "id"} or not isinstance(body.get("params", {}), dict):
        return INVALID_REQUEST, "Invalid request: beside jsonrpc, method and id there may be params, an object"
    if not isinstance(body.get("id"), str | int | None):
        return INVALID_REQUEST, "Invalid request: id must be text or a whole number"
    return None


def parsed(body: object, headers: Mapping[str, str]) -> Request:
    """The message, checked against its headers."""
    if body is None:
        raise Refused(PARSE_ERROR, "the body is not JSON", status=400)
    if not isinstance(body, dict) or body.get("jsonrpc") != "2.0":
        raise Refused(INVALID_REQUEST, "the body must be one JSON-RPC 2.0 message, not a batch", status=400)
    spoken = headers.get("mcp-protocol-version", "")
    if spoken and spoken not in HANDSHAKE_VERSIONS + MODERN_VERSIONS:
        known = {"supported": [*HANDSHAKE_VERSIONS, *MODERN_VERSIONS], "requested": spoken}
        raise Refused(UNSUPPORTED_VERSION, f"protocol version {spoken!r} is not spoken here", known, status=400)
    request = Request(body, headers, modern=spoken in MODERN_VERSIONS)
    if isinstance(request.id, bool | float | dict | list):
        raise Refused(INVALID_REQUEST, "id must be text or a whole number", status=400)
    if request.modern and request.id is not None:
        if _VERSION_KEY not in request.meta:
            raise Refused(INVALID_PARAMS, f"params._meta lacks {_VERSION_KEY}", status=400)
        if request.meta[_VERSION_KEY] != spoken:
            raise Refused(HEADER_MISMATCH, f"mcp-protocol-version is not params._meta's {_VERSION_KEY}", status=400)
        if headers.get("mcp-method", request.method) != request.method:
            raise Refused(HEADER_MISMATCH, "mcp-method is not the body's method", status=400)
    return request
