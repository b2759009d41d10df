"""The scripted model: an OpenAI-compatible server that answers from a script, in the exact shapes of real engines."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Sequence
from typing import Any

from pydantic import SecretStr

from rollcage.errors import UsageError
from rollcage.simulators.loopback import Loopback
from rollcage.simulators.scripted.app import Scope, ScriptedApp
from rollcage.simulators.scripted.profiles import PROFILES
from rollcage.simulators.scripted.script import RecordedRequest, Script
from rollcage.types import Endpoint, Sampling, ScriptedTurn


class ScriptedModel(Loopback):
    """`async with ScriptedModel() as model:` serves on loopback until the block ends.

    Each `endpoint` has a script and a key of its own; any number of them, and of requests, at once.
    """

    def __init__(self, *, port: int = 0, context_length: int = 131_072, keep_requests: int = 1000) -> None:
        self._keep_requests = keep_requests
        self._app = ScriptedApp(context_length=context_length, hang_up=self._hang_up)
        super().__init__(self._app, port=port, what="the scripted model")

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

    def generated(self, endpoint: Endpoint) -> int:
        """How many chunks of answers an endpoint has made so far, whole ones included: how far it got."""
        return self._script(endpoint).generated

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

    def _hang_up(self, scope: Scope) -> None:
        """Break the connection a request came on, once what was sent has left."""
        server = self._server
        for connection in list(server.server_state.connections) if server else ():
            if connection.transport.get_extra_info("peername") == tuple(scope["client"]):
                connection.transport.close()
