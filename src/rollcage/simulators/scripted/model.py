"""The scripted model: an OpenAI-compatible server that answers from a script, in the exact shapes of real engines."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import anyio
import uvicorn
from pydantic import SecretStr

from rollcage.errors import SetupError, UsageError
from rollcage.simulators.quiet import QuietProtocol
from rollcage.simulators.scripted.app import Scope, ScriptedApp
from rollcage.simulators.scripted.profiles import PROFILES
from rollcage.simulators.scripted.script import RecordedRequest, Script
from rollcage.types import Endpoint, Sampling, ScriptedTurn


class ScriptedModel:
    """`async with ScriptedModel() as model:` serves on loopback until the block ends.

    Each `endpoint` has a script and a key of its own; any number of them, and of requests, at once.
    """

    def __init__(self, *, port: int = 0, context_length: int = 131_072, keep_requests: int = 1000) -> None:
        self._port = port
        self._keep_requests = keep_requests
        self._app = ScriptedApp(context_length=context_length, hang_up=self._hang_up)
        self._server: uvicorn.Server | None = None

    @property
    def base_url(self) -> str:
        """The address, up to and including `/v1`."""
        if self._server is None:
            raise UsageError("the scripted model is not running: use `async with ScriptedModel() as model`")
        return f"http://127.0.0.1:{self._port}/v1"

    def endpoint(
        self,
        turns: Sequence[ScriptedTurn] = (),
        *,
        profile: str = "vllm-0.32",
        model: str = "scripted",
        **sampling: Any,
    ) -> Endpoint:
        """Register a script under a fresh key. `profile` names the engine to pass for; the rest is `Sampling`."""
        shapes = PROFILES.get(profile)
        if shapes is None:
            raise UsageError(f"profile {profile!r} is unknown: choose one of {', '.join(PROFILES)}")
        for n, turn in enumerate(turns):
            if not 200 <= turn.status <= 599:
                raise UsageError(f"turn {n} of the script: {turn.status} is no HTTP status a server could answer with")
        key = f"scripted-{secrets.token_urlsafe(24)}"
        endpoint = Endpoint(
            base_url=self.base_url, model=model, key=SecretStr(key), kind="scripted", sampling=Sampling(**sampling)
        )
        self._app.scripts[key] = Script(tuple(turns), shapes, model, deque(maxlen=self._keep_requests))
        return endpoint

    def requests(self, endpoint: Endpoint) -> list[RecordedRequest]:
        """What was asked of an endpoint so far, in order; the last `keep_requests` of it."""
        return list(self._script(endpoint).requests)

    def forget(self, endpoint: Endpoint) -> None:
        """Drop a script, its key and its recorded requests."""
        self._app.scripts.pop(endpoint.key.get_secret_value(), None)

    @property
    def open_requests(self) -> int:
        """How many requests are being answered right now."""
        return len(self._server.server_state.tasks) if self._server else 0

    def _script(self, endpoint: Endpoint) -> Script:
        script = self._app.scripts.get(endpoint.key.get_secret_value())
        if script is None:
            raise UsageError("this endpoint is not one of this scripted model")
        return script

    async def __aenter__(self) -> Self:
        """Listen."""
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self._port))
        except OSError as error:
            listener.close()
            raise SetupError(
                f"the scripted model cannot listen on 127.0.0.1:{self._port} ({error.strerror}): "
                "choose another port, or 0 for any that is free"
            ) from error
        config = uvicorn.Config(
            self._app, http=QuietProtocol, lifespan="off", ws="none", log_config=None, server_header=False
        )
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        # Its startup alone: serve() would take over the process's signals and wake up ten times a second.
        await server.startup(sockets=[listener])
        self._port = listener.getsockname()[1]
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening, drop every connection, wait for what still runs."""
        server, self._server = self._server, None
        if server is None:
            return
        with anyio.CancelScope(shield=True):
            for listener in server.servers:
                listener.close()
            # Dropped connections look to the application like clients that left: it ends by itself.
            while server.server_state.connections or server.server_state.tasks:
                for connection in list(server.server_state.connections):
                    connection.transport.abort()
                tasks = list(server.server_state.tasks)
                await (asyncio.wait(tasks, timeout=0.1) if tasks else asyncio.sleep(0))
            for listener in server.servers:
                await listener.wait_closed()

    def _hang_up(self, scope: Scope) -> None:
        """Break the connection a request came on, once what was sent has left."""
        server = self._server
        for connection in list(server.server_state.connections) if server else ():
            if connection.transport.get_extra_info("peername") == tuple(scope["client"]):
                connection.transport.close()
