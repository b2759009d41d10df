"""JSON-RPC as MCP speaks it: what a message is, whether it is well formed, of which protocol version. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from rollcage.types import JsonObject

HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Protocol versions that begin with `initialize`, the newest last."""
MODERN_VERSIONS = ("2026-07-28",)
"""Protocol versions in which every request stands for itself."""

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL_ERROR = -32700, -32600, -32601, -32602, -32603
HEADER_MISMATCH, UNSUPPORTED_VERSION, CANCELLED = -32020, -32022, -32800

_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"


def own_version() -> str:
    """The version that we tell others."""
    try:
        return version("rollcage")
    except PackageNotFoundError:
        return "0"


ABOUT_US = {"name": "rollcage", "version": own_version()}
"""Who speaks: `clientInfo`, `serverInfo`."""


class Malformed(ValueError):
    """This is no JSON-RPC."""


class RpcRefused(Exception):
    """A request that is answered with a JSON-RPC error."""

    def __init__(self, code: int, message: str, data: object = None, *, status: int = 200) -> None:
        super().__init__(message)
        self.code, self.message, self.data, self.status = code, message, data, status


@dataclass(frozen=True)
class RpcRequest:
    """One JSON-RPC message with what its HTTP headers say."""

    body: JsonObject
    headers: Mapping[str, str]
    modern: bool = False

    @property
    def id(self) -> object:
        """Names it among the client's requests; None in a notification."""
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
        if not self.modern:
            return {}
        return {"resultType": "complete", "_meta": {"io.modelcontextprotocol/serverInfo": ABOUT_US}}


def message_of(text: str | bytes) -> JsonObject:
    """One JSON-RPC message; Malformed where it is not one."""
    message = json_of_message(text)
    if not isinstance(message, dict):
        raise Malformed("the answer is no JSON object")
    return message


def json_of_message(text: str | bytes) -> object:
    """The JSON in a body; Malformed where it is not JSON."""
    try:
        # NaN and its like are no JSON either, but common; as text they can be passed on to anybody.
        return json.loads(text, parse_constant=str)
    except RecursionError as error:
        raise Malformed("the answer is nested too deep") from error
    except ValueError as error:
        raise Malformed("the answer is no JSON") from error


def checked(body: object, headers: Mapping[str, str]) -> RpcRequest:
    """A message that came over HTTP, checked against its headers; RpcRefused where it makes no sense."""
    if not isinstance(body, dict) or body.get("jsonrpc") != "2.0":
        raise RpcRefused(INVALID_REQUEST, "the body must be one JSON-RPC 2.0 message, not a batch", status=400)
    spoken = headers.get("mcp-protocol-version", "")
    if spoken and spoken not in HANDSHAKE_VERSIONS + MODERN_VERSIONS:
        known = {"supported": [*HANDSHAKE_VERSIONS, *MODERN_VERSIONS], "requested": spoken}
        raise RpcRefused(UNSUPPORTED_VERSION, f"protocol version {spoken!r} is not spoken here", known, status=400)
    request = RpcRequest(body, headers, modern=spoken in MODERN_VERSIONS)
    if isinstance(request.id, bool | float | dict | list):
        raise RpcRefused(INVALID_REQUEST, "id must be text or a whole number", status=400)
    if request.modern and request.id is not None:
        if _VERSION_KEY not in request.meta:
            raise RpcRefused(INVALID_PARAMS, f"params._meta lacks {_VERSION_KEY}", status=400)
        if request.meta[_VERSION_KEY] != spoken:
            raise RpcRefused(HEADER_MISMATCH, f"mcp-protocol-version is not params._meta's {_VERSION_KEY}", status=400)
        if headers.get("mcp-method", request.method) != request.method:
            raise RpcRefused(HEADER_MISMATCH, "mcp-method is not the body's method", status=400)
    return request


def dumped(value: object) -> str:
    """Compact JSON; ValueError or RecursionError where the value cannot be written."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def result(request_id: object, value: object) -> str:
    """A JSON-RPC response."""
    return dumped({"jsonrpc": "2.0", "id": request_id, "result": value})


def error(request_id: object, code: int, message: str, data: object = None) -> str:
    """A JSON-RPC error."""
    wrong: JsonObject = {"code": code, "message": message}
    if data is not None:
        wrong["data"] = data
    return dumped({"jsonrpc": "2.0", "id": request_id, "error": wrong})


def notification(method: str, params: JsonObject) -> str:
    """A JSON-RPC message that wants no answer."""
    return dumped({"jsonrpc": "2.0", "method": method, "params": params})
