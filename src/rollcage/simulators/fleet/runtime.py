"""A local Fleet: the control plane, and instances of a ticket desk, which the unmodified SDK drives.

It is a test server on loopback. It takes one key, keeps nothing, and isolates nothing: verifiers run as this user.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import anyio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rollcage.errors import UsageError
from rollcage.simulators.fleet.faults import Faults
from rollcage.simulators.fleet.instance import LocalInstance
from rollcage.simulators.fleet.listener import LoopbackListener

ENVIRONMENTS = {"ticket-desk": "A ticket desk: customers, tickets, replies.", "ticket-desk-eu": "The same, elsewhere."}
VERSIONS = ("v1.0.0", "v1.1.0")

Handler = Callable[[Request], Coroutine[Any, Any, JSONResponse]]


class FleetRuntime:
    """`async with FleetRuntime() as fleet:` serves until the block ends.

    `fleet.key` and `fleet.base_url` are the way in. `fleet.faults` says what goes wrong. `fleet.running` shows whether
    somebody forgot an instance.
    """

    def __init__(self, *, port: int = 0, key: str = "") -> None:
        self.key = key or f"local-{secrets.token_urlsafe(18)}"
        self.faults = Faults()
        self.instances: dict[str, LocalInstance] = {}
        """Every instance there ever was, by id."""
        self.creations = 0
        """How often a creation was asked for."""
        self.unauthorized = 0
        """How often the control plane was asked without a key it takes."""
        self._token = secrets.token_urlsafe(18)
        self._listener = LoopbackListener(self._app(), port)
        self._booting: set[asyncio.Task[None]] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def base_url(self) -> str:
        """The control plane's address."""
        if self._folder is None:
            raise UsageError("the local Fleet is not running: use `async with FleetRuntime() as fleet`")
        return f"http://127.0.0.1:{self._listener.port}"

    @property
    def running(self) -> list[LocalInstance]:
        """Instances that run or boot right now."""
        now = time.monotonic()
        for instance in self.instances.values():
            if instance.alive_until is not None and instance.alive_until < now and instance.status == "running":
                self._start(instance.stop())
                instance.status = "stopped"
        return [instance for instance in self.instances.values() if instance.status in ("pending", "running")]

    def instance(self) -> LocalInstance:
        """The one that runs."""
        (only,) = self.running
        return only

    async def __aenter__(self) -> Self:
        """Listen."""
        self._folder = tempfile.TemporaryDirectory(prefix="rollcage-fleet-")
        await self._listener.start()
        return self

    async def __aexit__(self, *raised: object) -> None:
        """End every instance and stop listening."""
        with anyio.CancelScope(shield=True):
            for task in list(self._booting):
                task.cancel()
            if self._booting:
                await asyncio.wait(self._booting)
            for instance in self.instances.values():
                await instance.stop(instance.status if instance.status == "error" else "stopped")
            await self._listener.stop()
            if self._folder:
                self._folder.cleanup()
                self._folder = None

    def _app(self) -> Starlette:
        routes: list[tuple[str, str, Handler]] = [
            ("POST", "/v1/env/instances", self._create),
            ("GET", "/v1/env/instances", self._list),
            ("DELETE", "/v1/env/instances/batch", self._delete_many),
            ("GET", "/v1/env/instances/{id}", self._get),
            ("DELETE", "/v1/env/instances/{id}", self._delete),
            ("POST", "/v1/env/instances/{id}/heartbeat", self._heartbeat),
            ("GET", "/v1/env/", self._environments),
            ("GET", "/v1/env/runs", _constant([])),
            ("GET", "/v1/env/{key}", self._environment),
            ("GET", "/v1/regions", _constant(["local"])),
            ("GET", "/v1/account", self._account),
            ("GET", "/v1/runner-auth/token", _constant({"token": self._token})),
        ]
        return Starlette(routes=[Route(path, self._guarded(do), methods=[verb]) for verb, path, do in routes])

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> JSONResponse:
            if request.headers.get("authorization", "") != f"Bearer {self.key}":
                self.unauthorized += 1
                return JSONResponse({"detail": "Invalid API key"}, status_code=401)
            return await handler(request)

        return guarded

    async def _create(self, request: Request) -> JSONResponse:
        self.creations += 1
        asked = json.loads(await request.body())
        refusal = self._refusal(asked)
        if refusal:
            return JSONResponse({"detail": refusal[1]}, status_code=refusal[0])
        assert self._folder is not None
        version = asked.get("env_version") or VERSIONS[-1]
        instance = LocalInstance(f"local-{len(self.instances) + 1}", asked, version, (self.key, self._token))
        self.instances[instance.id] = instance
        self._beat(instance)
        self._start(instance.boot(Path(self._folder.name) / instance.id, self.faults))
        with anyio.move_on_after(asked.get("max_wait_seconds") or 0):
            await instance.settled.wait()
        return JSONResponse(instance.answer())

    def _refusal(self, asked: dict[str, Any]) -> tuple[int, Any] | None:
        key, version = asked.get("env_key"), asked.get("env_version")
        if self.faults.provisioning:
            return self.faults.provisioning.pop(0)
        if key not in ENVIRONMENTS:
            return 400, f"Environment '{key}' not found"
        if version and version not in VERSIONS:
            return 400, f"Version '{version}' not found for environment '{key}'"
        running = len(self.running)
        if self.faults.quota is not None and running >= self.faults.quota:
            message = f"You have {running} running instances out of a maximum of {self.faults.quota}"
            numbers = {"running_instances": running, "instance_limit": self.faults.quota}
            return 403, {"error_type": "instance_limit_exceeded", "message": message, **numbers}
        return None

    async def _list(self, request: Request) -> JSONResponse:
        self.running  # noqa: B018 - ends those whose heartbeats stopped
        wanted = {name: request.query_params.get(name) for name in ("status", "run_id")}
        answers = [instance.answer() for instance in self.instances.values()]
        return JSONResponse([one for one in answers if all(one[k] == v for k, v in wanted.items() if v)])

    async def _get(self, request: Request) -> JSONResponse:
        self.running  # noqa: B018
        instance = self.instances.get(request.path_params["id"])
        return JSONResponse(instance.answer()) if instance else _unknown(request)

    async def _delete(self, request: Request) -> JSONResponse:
        instance = self.instances.get(request.path_params["id"])
        if instance is None:
            return _unknown(request)
        await instance.stop()
        return JSONResponse(instance.answer())

    async def _delete_many(self, request: Request) -> JSONResponse:
        run_id = request.query_params.get("run_id")
        ended = [one for one in self.running if run_id and one.asked.get("run_id") == run_id]
        for instance in ended:
            await instance.stop()
        return JSONResponse([instance.answer() for instance in ended])

    async def _heartbeat(self, request: Request) -> JSONResponse:
        instance = self.instances.get(request.path_params["id"])
        if instance is None or instance not in self.running:
            return _unknown(request)
        instance.beats += 1
        self._beat(instance)
        self.faults.moved()
        interval = instance.asked.get("heartbeat_interval")
        said = {"success": True, "instance_id": instance.id, "last_heartbeat": None}
        return JSONResponse({**said, "deadline_timestamp": None, "interval_seconds": interval})

    def _beat(self, instance: LocalInstance) -> None:
        interval = instance.asked.get("heartbeat_interval")
        instance.alive_until = time.monotonic() + interval if interval else None

    async def _environments(self, request: Request) -> JSONResponse:
        return JSONResponse([_environment(key) for key in ENVIRONMENTS])

    async def _environment(self, request: Request) -> JSONResponse:
        key = request.path_params["key"]
        return JSONResponse(_environment(key)) if key in ENVIRONMENTS else _unknown(request)

    async def _account(self, request: Request) -> JSONResponse:
        limit = self.faults.quota if self.faults.quota is not None else 1000
        known = {"team_id": "local", "team_name": "local", "instance_limit": limit}
        return JSONResponse({**known, "instance_count": len(self.running)})

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._booting.add(task)
        task.add_done_callback(self._booting.discard)


def _environment(key: str) -> dict[str, Any]:
    known = {"env_key": key, "name": key.replace("-", " ").title(), "description": ENVIRONMENTS[key]}
    return {**known, "default_version": VERSIONS[-1], "versions": dict.fromkeys(VERSIONS, "stable")}


def _constant(answer: Any) -> Handler:
    async def handler(request: Request) -> JSONResponse:
        return JSONResponse(answer)

    return handler


def _unknown(request: Request) -> JSONResponse:
    return JSONResponse({"detail": f"{request.url.path} not found"}, status_code=404)
