"""What rollouts can be run with, by the names that jobs use, and which of it fits together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rollcage.agents.base import Agent, InProcess
from rollcage.environments.base import Environments
from rollcage.errors import UsageError
from rollcage.gateway import Gateway
from rollcage.run import Parts
from rollcage.sandboxes.base import Provider
from rollcage.sandboxes.none import NoBoxes
from rollcage.types import Job

T = TypeVar("T")


@dataclass(frozen=True)
class Backends:
    """What rollouts can be run with, by the names jobs use."""

    providers: Mapping[str, Provider]
    agents: Mapping[str, Agent]
    gateway: Gateway
    environments: Mapping[str, Environments] = field(default_factory=dict)
    """Remote environments, by the word their addresses begin with."""

    def parts(self, job: Job) -> Parts:
        """The parts this job asks for; UsageError where there is no such thing, or it cannot do what is asked."""
        provider = _named("sandbox", job.sandbox.backend, self.providers)
        agent = _named("agent", job.agent.name, self.agents)
        agent.check(job.agent)
        if isinstance(agent, InProcess):
            _check_no_box(job)
            provider = NoBoxes()
        provider.check(job.sandbox)
        return Parts(provider=provider, agent=agent, gateway=self.gateway, environments=self._environments(job))

    def _environments(self, job: Job) -> Environments | None:
        if not job.environment:
            for name in ("verifier", "environment_seed"):
                if getattr(job.task, name) not in ("", None):
                    raise UsageError(f"{name}: goes with a remote environment; name one (environment)")
            return None
        scheme, _, place = job.environment.partition(":")
        environments = _named("environment", scheme, self.environments)
        environments.check(place, job.task)
        return environments


def _check_no_box(job: Job) -> None:
    if not job.environment:
        raise UsageError(f"agent: {job.agent.name} has the tools of a remote environment alone; name one (environment)")
    for name in ("files", "setup", "verify", "tests", "test_script"):
        if getattr(job.task, name):
            raise UsageError(f"{name}: agent {job.agent.name} works in no box, where that could be done; use another")


def _named(what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise UsageError(f"{what}: no {name!r} here; known: {', '.join(sorted(known))}")
    return known[name]
