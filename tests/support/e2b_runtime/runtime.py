"""The small E2B: its control plane, and the way to its machines."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, parse_qsl, unquote

import anyio
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from pydantic import SecretStr

from rollcage.asgi import on_loopback, serve, stop
from rollcage.errors import FileMissing, SandboxError
from rollcage.sandboxes.base import Sandbox
from rollcage.sandboxes.layers import Layer
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.settings import E2BSettings
from rollcage.types import JsonObject, SandboxSpec
from support.e2b_runtime.envd import process_application
from support.e2b_runtime.machines import ENVD_VERSION, Machine, Order
from support.e2b_runtime.rooted import rooted_box
from support.e2b_runtime.templates import Templates

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_LOOK_S = 0.2


class Refused(Exception):
    """What is answered instead."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class E2BRuntime:
    """`async with E2BRuntime(state_dir) as runtime:` serves E2B's API on loopback; its machines are local boxes."""

    def __init__(self, state_dir: Path, *, rooted: bool = False) -> None:
        """Layers of templates are kept below `state_dir`. `rooted`: its machines have a root, but no templates."""
        self._state_dir, self._rooted = state_dir, rooted
        self._key = f"e2b_{secrets.token_hex(20)}"
        self._port = 0
        self.machines: dict[str, Machine] = {}
        """Those that live, by id."""
        self.orders: list[Order] = []
        """Every machine that was ever made."""
        self.layers: dict[str, Sequence[Layer]] = {"base": ()}
        """The templates there are, and what is in their home."""
        self.refusals: list[int] = []
        """The next orders are answered with these statuses, one each."""
        self.slow_s = 0.0
        """How long it takes to make a machine."""
        self.attempts = 0
        """Orders, refused ones included."""
        self.uploads = 0
        """Files that were sent to machines."""
        self._answered: dict[str, asyncio.Future[Machine]] = {}
        self.templates = Templates()
        """What was built through the API."""
        self._envd = process_application(self._find)
        self._stack = AsyncExitStack()

    @property
    def settings(self) -> E2BSettings:
        """What leads the SDK here."""
        url = f"http://127.0.0.1:{self._port}"
        return E2BSettings(api_key=SecretStr(self._key), api_url=url, sandbox_url=url)

    async def vanish(self, box_id: str) -> None:
        """A machine is gone, without anybody having asked for it."""
        machine = self.machines.pop(box_id, None)
        if machine is not None:
            await machine.close()

    async def __aenter__(self) -> Self:
        self._provider = await self._stack.enter_async_context(LocalProvider(self._state_dir))
        listener = on_loopback(0, "E2B's stand-in")
        self._server = await serve(self, listener)
        self._port = listener.getsockname()[1]
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            for box_id in list(self.machines):
                await self.vanish(box_id)
            await stop(self._server)
            await self._stack.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        method, path = scope["method"], unquote(scope["path"])
        try:
            if path.startswith(("/process.Process/", "/files", "/health")):
                machine = self._authorized(headers)
                if path.startswith("/process"):
                    await self._envd(scope, receive, send)
                    return
                status, answer = await self._files(machine, method, path, scope, receive)
            elif path.startswith("/uploads/"):
                self.templates.upload(path.rpartition("/")[2], await _body(receive))
                status, answer = 200, b""
            else:
                status, answer = await self._control(method, path, headers, scope, receive)
        except Refused as refused:
            status = refused.status
            answer = json.dumps({"code": status, "message": str(refused)}).encode()
        plain = (method, path, status) == ("GET", "/files", 200)
        kind = b"application/octet-stream" if plain else b"application/json"
        length = str(len(answer)).encode()
        sent = [(b"content-type", kind), *([] if status == 204 else [(b"content-length", length)])]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": answer})

    # The way to the machines.

    def _find(self, box_id: str) -> Machine:
        machine = self.machines.get(box_id)
        if machine is None:
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        return machine

    def _authorized(self, headers: dict[str, str]) -> Machine:
        machine = self.machines.get(headers.get("e2b-sandbox-id", ""))
        if machine is None:
            raise Refused(502, "The sandbox was not found")
        if headers.get("x-access-token") != machine.token:
            raise Refused(401, "unauthorized access, please provide a valid access token or method signing")
        return machine

    async def _files(
        self, machine: Machine, method: str, path: str, scope: Scope, receive: Receive
    ) -> tuple[int, bytes]:
        if path == "/health":
            return 204, b""
        query = parse_qs(scope["query_string"].decode())
        place = query["path"][0]
        try:
            if method == "GET":
                return 200, await machine.box.read(place, limit=1 << 30)
            await machine.box.write(place, await _body(receive))
            self.uploads += 1
        except FileMissing as error:
            raise Refused(404, str(error)) from error
        except SandboxError as error:
            raise Refused(507 if "full" in str(error) else 400, str(error)) from error
        return 200, json.dumps([{"name": place.rpartition("/")[2], "type": "file", "path": place}]).encode()

    # The control plane.

    async def _control(
        self, method: str, path: str, headers: dict[str, str], scope: Scope, receive: Receive
    ) -> tuple[int, bytes]:
        if headers.get("x-api-key") != self._key:
            raise Refused(401, "Invalid API key")
        match method, path.strip("/").split("/"):
            case "POST", ["v2", "sandboxes"]:
                machine = await self._order(json.loads(await _body(receive)), headers.get("idempotency-key", ""))
                told = {**machine.told(), "envdAccessToken": machine.token, "domain": None}
                return 201, json.dumps(told).encode()
            case "GET", ["v2", "sandboxes"]:
                return 200, json.dumps(self._listed(scope["query_string"].decode())).encode()
            case "DELETE", ["sandboxes", box_id]:
                self._known(box_id)
                await self.vanish(box_id)
                return 204, b""
            case "POST", ["sandboxes", box_id, "timeout"]:
                self._known(box_id).renew(int(json.loads(await _body(receive))["timeout"]))
                return 204, b""
            case _, parts if "templates" in parts[:2]:
                base = f"http://127.0.0.1:{self._port}"
                status, answer = self.templates.answer(method, parts, await _body(receive), base)
                return status, json.dumps(answer).encode()
        raise Refused(404, f"no {method} {path} in this small E2B")

    def _known(self, box_id: str) -> Machine:
        if box_id not in self.machines:
            raise Refused(404, f"sandbox {box_id} not found")
        return self.machines[box_id]

    def _listed(self, query: str) -> list[JsonObject]:
        wanted = {
            unquote(name): unquote(value)
            for text in parse_qs(query).get("metadata", [])
            for name, value in parse_qsl(text)
        }
        return [m.told() for m in self.machines.values() if wanted.items() <= m.order.metadata.items()]

    async def _order(self, body: JsonObject, key: str) -> Machine:
        """One machine for one order, however often it is asked for."""
        self.attempts += 1
        if self.refusals:
            raise Refused(self.refusals.pop(0), "scripted failure")
        if key not in self._answered:
            self._answered[key] = asyncio.ensure_future(self._make(body))
        return await asyncio.shield(self._answered[key])

    async def _make(self, body: JsonObject) -> Machine:
        order = Order(
            template=body["templateID"],
            metadata=body.get("metadata") or {},
            seconds=int(body.get("timeout", 15)),
            internet=bool(body.get("allow_internet_access", True)),
        )
        built = self.templates.steps(order.template)
        if order.template not in self.layers and built is None:
            raise Refused(404, f"template '{order.template}' not found")
        await asyncio.sleep(self.slow_s)
        stack = AsyncExitStack()
        layers = self.layers.get(order.template, ())
        spec = SandboxSpec(disk_mb=2048, memory_mb=8192, pids=2048)
        box: Sandbox = await stack.enter_async_context(
            rooted_box() if self._rooted else self._provider.open(spec, layers)
        )
        if built is not None:
            await self.templates.apply(box, built)
        machine = Machine(order, box, stack)
        self.machines[machine.id] = machine
        self.orders.append(order)
        return machine

    async def _watch(self) -> None:
        """End what nobody has renewed."""
        while True:
            await asyncio.sleep(_LOOK_S)
            for machine in list(self.machines.values()):
                if machine.ends < datetime.now(UTC):
                    with suppress(SandboxError):
                        await self.vanish(machine.id)


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


__all__ = ["ENVD_VERSION", "E2BRuntime", "Refused"]
