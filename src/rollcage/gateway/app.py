"""Stands between agents and models: forwards each call, and logs it as a turn. One gateway serves all rollouts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio

from rollcage.errors import ModelUnreachable
from rollcage.gateway.engines import HOSTED, Known, engine_of, guess
from rollcage.gateway.lease import Lease, Record
from rollcage.gateway.relay import Way
from rollcage.gateway.upstream import Target, Upstream, UpstreamError, headers_for
from rollcage.types import Endpoint, Limits

CHECK_TIMEOUT_S = 5.0
CHECK_AGE_S = 30.0
"""How long a good answer is believed."""

_Probe = asyncio.Task[str | None]


class Gateway:
    """Endpoint in, endpoint out: it holds the real keys, and lends each rollout an address and a key of its own."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._upstream = Upstream(tls)
        self._known = Known()
        self._probes: dict[tuple[str, str, str], tuple[float, _Probe]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Gateway]:
        """A gateway for as long as the block lasts. `tls` decides whom to trust; the system's roots by default."""
        gateway = cls(tls)
        try:
            yield gateway
        finally:
            with anyio.CancelScope(shield=True):
                await gateway._close()

    @property
    def connections(self) -> int:
        """How many connections to models are open, busy or idle."""
        return self._upstream.connections

    async def check(self, endpoint: Endpoint) -> None:
        """Ask the endpoint who it is; raises ModelUnreachable where it does not answer, or refuses the key."""
        name = (endpoint.base_url, endpoint.model, endpoint.key.get_secret_value())
        now = asyncio.get_running_loop().time()
        since, probe = self._probes.get(name, (0.0, None))
        if probe is None or (probe.done() and (now - since > CHECK_AGE_S or not _good(probe))):
            # Keys come and go with rollouts (the scripted model's do): what is stale must not pile up.
            stale = [key for key, (then, old) in self._probes.items() if old.done() and now - then > CHECK_AGE_S]
            for key in stale:
                del self._probes[key]
            probe = asyncio.get_running_loop().create_task(self._probe(endpoint))
            self._probes[name] = (now, probe)
        # Many rollouts may wait for this one answer; none of them may take it away from the others.
        if problem := await asyncio.shield(probe):
            raise ModelUnreachable(problem)

    @asynccontextmanager
    async def lend(
        self, endpoint: Endpoint, sock: socket.socket, *, limits: Limits, mode: str, record: Record
    ) -> AsyncIterator[Lease]:
        """Serve a model on a listening socket until the end of the block.

        Then the key is void, every call is cut, and what was captured of it has been recorded: nothing follows. Each
        turn is recorded before the last byte of its answer leaves. Raises what `record` raised.
        """
        way = Way(self._upstream, self._known, endpoint, limits, quiet=mode == "black_box")
        lease = Lease(way, sock, record)
        await lease.open()
        try:
            yield lease
        except Exception as error:
            await _close(lease)
            if lease.failure is not None:
                raise lease.failure from error
            raise
        except BaseException:
            await _close(lease)
            raise
        await _close(lease)
        if lease.failure is not None:
            raise lease.failure

    async def _probe(self, endpoint: Endpoint) -> str | None:
        """What is wrong with the endpoint, in one line with a remedy; null where it can be used."""
        where = f"the model at {endpoint.base_url}"
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                status, models = await self._get(endpoint, endpoint.base_url, "/models")
        except UpstreamError as error:
            return f"cannot reach {where}: {error}; start its server, or correct base_url"
        except TimeoutError:
            late = f"{where} did not answer within {CHECK_TIMEOUT_S:.0f} s"
            return f"{late}; see whether its server is up, or correct base_url"
        if status in (401, 403):
            return f"{where} refuses the key (HTTP {status}); set the right API key"
        if status == 200:
            self._known.found(endpoint, engine_of(endpoint, models, await self._version(endpoint)))
        return None

    async def _version(self, endpoint: Endpoint) -> bytes:
        """What the server says of its version; nothing where it does not say, which is no fault."""
        if guess(endpoint).name in HOSTED:
            return b""
        with suppress(UpstreamError, TimeoutError):
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                status, version = await self._get(endpoint, endpoint.base_url.removesuffix("/v1"), "/version")
                return version if status == 200 else b""
        return b""

    async def _get(self, endpoint: Endpoint, base_url: str, path: str) -> tuple[int, bytes]:
        headers = {**headers_for(endpoint), "Accept": "application/json"}
        target = Target.of(base_url, path)
        exchange = await self._upstream.open(target, target.head("GET", headers, None), b"")
        pieces: list[bytes] = []
        try:
            if broken := await exchange.body(pieces.append):
                raise UpstreamError(broken)
        finally:
            exchange.release()
        return exchange.status, b"".join(pieces)

    async def _close(self) -> None:
        probes = [probe for _, probe in self._probes.values() if not probe.done()]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await self._upstream.close()


def _good(probe: _Probe) -> bool:
    return not probe.cancelled() and probe.exception() is None and probe.result() is None


async def _close(lease: Lease) -> None:
    with anyio.CancelScope(shield=True):
        await lease.close()
