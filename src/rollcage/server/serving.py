"""Runs the server: binds, opens the service, answers, and stops in order when asked to."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import anyio
import uvicorn
from pydantic import Field, SecretStr
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollcage.cluster import Cluster
from rollcage.errors import SetupError, UsageError, needs_extra
from rollcage.server.app import App, gated
from rollcage.server.auth import Keys, load_keys, loopback
from rollcage.server.gate import Gate
from rollcage.server.interpreter import tuned_for_streams
from rollcage.server.service import ServerLimits, Service
from rollcage.settings import FleetSettings, Settings
from rollcage.types import Value

LAST_BYTES_S = 5
"""How long answers that are being sent may take when the server stops."""


class ServeOptions(Value):
    """How a server is run."""

    host: str = "127.0.0.1"
    """Where it listens; anything but loopback needs keys."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes any that is free."""
    limits: ServerLimits = ServerLimits()
    """How much it takes on."""
    api_key_file: Path | None = None
    """Names and hashes of keys."""
    insecure_no_key: bool = False
    """Listens beyond loopback without any key."""
    on_stop: Literal["abort", "finish"] = "abort"
    """What becomes of rollouts when it is asked to stop."""
    grace_s: float = Field(default=5, ge=0)
    """How long rollouts may go on before they are aborted."""
    max_body_mb: int = Field(default=32, ge=1)
    """Largest body of a request."""
    quiet: bool = False
    """No request log."""
    environments: dict[str, str] = {}
    """Remote environments that callers may name: `{name: address}`."""
    fleet_demo: bool = False
    """A local Fleet runs inside and is offered: for trying, without a key."""
    warm: int = Field(default=0, ge=0)
    """Boxes kept open ahead, with the agent's server started; see `rollcage.sandboxes.pool`."""
    cluster: Cluster | None = None
    """A Ray cluster whose nodes run the rollouts."""


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: rollouts come first."""
        yield


def server_of(app: Gate, *, max_body: int) -> uvicorn.Server:
    """What answers on a socket; signals are left to whoever runs it."""
    config = uvicorn.Config(
        app,
        http=HttpToolsProtocol,
        ws="websockets-sansio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        # Longer than clients keep theirs: whoever closes first must not be us, amid their next request.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=LAST_BYTES_S,
        ws_max_size=max_body,
    )
    return _HttpServer(config)


async def serve(settings: Settings, options: ServeOptions, ready: Callable[[str], None]) -> int:
    """Serve until asked to stop; `ready` gets the address once it answers. Returns the exit code."""
    keys = checked(settings, options)
    _log_to_stderr(quiet=options.quiet)
    with listening(options.host, options.port) as listener, tuned_for_streams():
        async with (
            _fleet(settings, options) as known,
            Service.open(
                known,
                limits=options.limits,
                callers=keys.callers(),
                warm=options.warm,
                environments=options.environments,
                cluster=options.cluster,
            ) as service,
        ):
            app = App(service, keyed=bool(keys))
            gate = gated(
                app,
                service,
                keys=keys,
                only_loopback=loopback(options.host),
                max_body=options.max_body_mb << 20,
            )
            server = server_of(gate, max_body=options.max_body_mb << 20)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_stop_on_signal, service, server, options)
                tasks.start_soon(_complete, server, app, lambda: ready(url_of(options.host, listener)))
                await server.serve(sockets=[listener])
                tasks.cancel_scope.cancel()
    return 0


@asynccontextmanager
async def _fleet(settings: Settings, options: ServeOptions) -> AsyncIterator[Settings]:
    """The settings, with a local Fleet in them where one was asked for."""
    if not options.fleet_demo:
        yield settings
        return
    with needs_extra("the local Fleet", "fleet"):
        from rollcage.simulators.fleet import VERIFIER, FleetRuntime
    logging.getLogger("fastmcp").setLevel(logging.CRITICAL + 1)
    async with FleetRuntime() as fleet:
        # It runs verifiers as this user and in no box: callers must not bring their own.
        fleet.faults.verifiers = frozenset({VERIFIER})
        known = FleetSettings(api_key=SecretStr(fleet.key), base_url=fleet.base_url)
        yield settings.model_copy(update={"fleet": known})


def checked(settings: Settings, options: ServeOptions) -> Keys:
    """The keys; UsageError where these options make no safe server."""
    for address in options.limits.allow_endpoints:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"--allow-endpoint: {address!r} is no address; it looks like https://host:8000/v1")
    keys = load_keys(options.api_key_file, one=settings.server_key.get_secret_value())
    if not keys and not loopback(options.host) and not options.insecure_no_key:
        raise UsageError(
            f"--host {options.host} lets other machines in, and there is no key: give --api-key-file (rollcage serve "
            "--new-key NAME makes one), or set ROLLCAGE_SERVER_KEY, or say --insecure-no-key"
        )
    return keys


async def _complete(server: uvicorn.Server, app: App, ready: Callable[[], None]) -> None:
    """Say that it answers, and only then fetch the parts that take seconds to import."""
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await anyio.sleep(0.005)
    ready()
    async with app.parts():
        await anyio.sleep_forever()


async def _stop_on_signal(service: Service, server: uvicorn.Server, options: ServeOptions) -> None:
    """The first signal stops in order, the second leaves at once: boxes die with this process either way."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            stopping = False
            async for number in signals:
                if stopping:
                    os._exit(128 + number)
                stopping = True
                print("rollcage: stopping; once more leaves at once", file=sys.stderr, flush=True)
                tasks.start_soon(_stop, service, server, options)


async def _stop(service: Service, server: uvicorn.Server, options: ServeOptions) -> None:
    try:
        await service.stop(options.on_stop, grace_s=options.grace_s)
    finally:
        server.should_exit = True


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens; UsageError or SetupError, in words, where it cannot."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        # With the protocol named: only then does the event loop switch off the delay of small answers.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"--host: {host!r} is no address of this machine: {error.strerror}") from error
    with listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            listener.setblocking(False)
        except OSError as error:
            remedy = "choose another --port, or 0 for any that is free"
            raise SetupError(f"cannot listen on {host}:{port} ({error.strerror})", remedy=remedy) from error
        yield listener


def url_of(host: str, listener: socket.socket) -> str:
    """The address of what listens there."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _log_to_stderr(*, quiet: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("rollcage.server")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
