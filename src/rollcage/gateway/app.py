"""Stands between agents and models: forwards each call, and logs it as a turn. One gateway serves all rollouts."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from rollcage.errors import ModelUnreachable
from rollcage.gateway.bodies import SharedParts
from rollcage.gateway.engines import KnownEngines
from rollcage.gateway.exact import ExactPrompts
from rollcage.gateway.exchange import ExchangeContext
from rollcage.gateway.http_out import ANSWER_LIMIT, Upstream
from rollcage.gateway.lease import Lease, Record, one_agent
from rollcage.gateway.live import Delta
from rollcage.gateway.pause import WAIT_S, CallGate, Running
from rollcage.gateway.probe import identify
from rollcage.gateway.proxies import NO_PROXIES
from rollcage.gateway.replicas import Replicas
from rollcage.types import CallClassifier, Endpoint, Limits, Proxies

CHECK_AGE_S = 30.0
"""How long a good answer is believed."""

_Probe = asyncio.Task[ModelUnreachable | None]


class Gateway:
    """Endpoint in, endpoint out: it holds the real keys, and lends each rollout an address and a key of its own."""

    def __init__(
        self,
        tls: ssl.SSLContext | None = None,
        *,
        strip: bool = False,
        answer_limit: int = ANSWER_LIMIT,
        proxies: Proxies = NO_PROXIES,
        replicas: Replicas | None = None,
    ) -> None:
        self._strip = strip
        self.replicas = replicas or Replicas()
        """Addresses that answer alike."""
        self._leases: dict[str, Lease] = {}
        self._lent: set[Lease] = set()
        self.gate = CallGate()
        """Where calls wait while weights are changed."""
        self._upstream = Upstream(tls, answer_limit, proxies)
        self._known = KnownEngines()
        self._parsing, self._shared = asyncio.Lock(), SharedParts()
        self._probes: dict[tuple[str, str, str], tuple[float, _Probe]] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        *,
        tls: ssl.SSLContext | None = None,
        strip: bool = False,
        answer_limit: int = ANSWER_LIMIT,
        proxies: Proxies = NO_PROXIES,
        replicas: Replicas | None = None,
    ) -> AsyncIterator[Gateway]:
        """A gateway for as long as the block lasts.

        `tls` decides whom to trust; the system's roots by default. `strip` takes out of streams what agents did not
        ask for, for agents that mind; whole answers never show it. `answer_limit`: bytes of one answer of a model,
        packed and unpacked; a longer one is cut off. `proxies`: through whom models are reached.
        `replicas`: addresses that answer alike.
        """
        gateway = cls(tls, strip=strip, answer_limit=answer_limit, proxies=proxies, replicas=replicas)
        try:
            yield gateway
        finally:
            with anyio.CancelScope(shield=True):
                await gateway._close()

    @property
    def connections(self) -> int:
        """How many connections to models are open, busy or idle."""
        return self._upstream.connections

    async def check(self, endpoint: Endpoint, *, fresh: bool = False) -> None:
        """Ask the endpoint who it is; raises ModelUnreachable where it does not answer, or refuses the key.

        `fresh`: whatever it said a moment ago. Of a model with several addresses one must answer.
        """
        self.replicas.refresh()
        for other in self.replicas.addresses if self.replicas.knows(endpoint.base_url) else ():
            try:
                await self._check(endpoint.model_copy(update={"base_url": other}), fresh=fresh)
            except ModelUnreachable:
                self.replicas.failed(other)
            else:
                return
        await self._check(endpoint, fresh=fresh)

    async def _check(self, endpoint: Endpoint, *, fresh: bool) -> None:
        name = (endpoint.base_url, endpoint.model, endpoint.key.get_secret_value())
        now = asyncio.get_running_loop().time()
        since, probe = self._probes.get(name, (0.0, None))
        if probe is None or (probe.done() and (fresh or now - since > CHECK_AGE_S or not _good(probe))):
            # Keys come and go with rollouts (the scripted model's do): what is stale must not pile up.
            stale = [key for key, (then, old) in self._probes.items() if old.done() and now - then > CHECK_AGE_S]
            for key in stale:
                del self._probes[key]
            probe = asyncio.get_running_loop().create_task(self._probe(endpoint))
            self._probes[name] = (now, probe)
        # Many rollouts may wait for this one answer; none of them may take it away from the others.
        if problem := await asyncio.shield(probe):
            raise ModelUnreachable(problem.message, remedy=problem.remedy)

    async def pause(self, running: Running = "finish", *, wait_s: float = WAIT_S) -> None:
        """Let no model call begin; returns when none runs any more.

        `running`: those that run `finish`, or are `cut`. `wait_s`: a new call waits so long for `resume` at most; then
        it has failed. An agent's own time stands still while it waits, the deadline of its rollout does not.
        """
        await self.gate.pause(running, wait_s=wait_s)

    def resume(self, policy_version: str = "") -> None:
        """Let calls begin again. `policy_version`: what they are stamped with from now on, whatever the rollouts that
        were started before were started with.
        """
        self.gate.resume(policy_version)
        if policy_version:
            for lease in self._lent:
                lease.policy_version = policy_version

    def watch(self, name: str) -> AsyncIterator[Delta]:
        """What the models say to the rollout of that name, as they say it, until its lease ends.

        Starts with what the running turns have said so far; ends at once where nothing is lent under that name. Whoever
        reads slowly misses things and holds up nobody. What counts is in the log.
        """
        lease = self._leases.get(name)
        return _nothing() if lease is None else lease.watch()

    @asynccontextmanager
    async def lend(
        self,
        endpoint: Endpoint,
        sock: socket.socket,
        *,
        limits: Limits,
        mode: str,
        record: Record,
        name: str = "",
        policy_version: str = "",
        generation: int | None = None,
        classify: CallClassifier | None = None,
        after: Lease | None = None,
    ) -> AsyncIterator[Lease]:
        """Serve a model on a listening socket until the end of the block. `name` is for those who `watch`.

        `after`: an earlier lease of the same rollout, whose calls count.

        `generation`: the gate's when the rollout was started; None: now.

        `policy_version` is stamped on each turn; the lease's own may change, and calls that begin later have it.

        `classify` knows what this agent makes its calls for; without it all calls are the agent's own.

        Then the key is void, every call is cut, and what was captured of it has been recorded: nothing follows. Each
        turn is recorded before the last byte of its answer leaves. Raises what `record` raised.
        """
        quiet = mode == "black_box"
        exact = endpoint.sampling.history == "exact" and not quiet
        context = ExchangeContext(
            self._upstream,
            self._known,
            endpoint,
            limits,
            self._parsing,
            quiet=quiet,
            strip=self._strip,
            exact=ExactPrompts(self._upstream, self._known, endpoint) if exact else None,
            gate=self.gate,
            shared=self._shared,
            route=self.replicas.route(endpoint.base_url),
        )
        lease = Lease(context, sock, record, classify or one_agent)
        lease.policy_version = self.gate.version(policy_version, generation)
        if after is not None:
            lease.go_on_from(after)
        lease.route = context.route
        self._lent.add(lease)
        await lease.open()
        if name:
            self._leases[name] = lease
        try:
            yield lease
        except Exception as error:
            await self._end(name, lease)
            if lease.failure is not None:
                raise lease.failure from error
            raise
        except BaseException:
            await self._end(name, lease)
            raise
        await self._end(name, lease)
        if lease.failure is not None:
            raise lease.failure

    async def _probe(self, endpoint: Endpoint) -> ModelUnreachable | None:
        found = await identify(self._upstream, endpoint)
        if isinstance(found, ModelUnreachable):
            return found
        self._known.found(endpoint, found)
        return None

    async def _end(self, name: str, lease: Lease) -> None:
        self._lent.discard(lease)
        if self._leases.get(name) is lease:
            del self._leases[name]
        with anyio.CancelScope(shield=True):
            await lease.close()
        if lease.route is not None:
            lease.route.close()

    async def _close(self) -> None:
        probes = [probe for _, probe in self._probes.values() if not probe.done()]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await self._upstream.close()


def _good(probe: _Probe) -> bool:
    return not probe.cancelled() and probe.exception() is None and probe.result() is None


async def _nothing() -> AsyncIterator[Delta]:
    return
    yield
