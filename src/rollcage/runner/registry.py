"""What rollouts can be run with, by the names that jobs use, and which of it fits together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rollcage.agents.base import Agent, AsksNoModel, InProcess, TakesTools, TaskBound
from rollcage.environments.base import Environments
from rollcage.errors import UsageError
from rollcage.gateway import Gateway
from rollcage.rollout.run import RolloutDeps
from rollcage.rollout.setup import Trees
from rollcage.rollout.work import WorkKeeper
from rollcage.sandboxes.base import Provider
from rollcage.sandboxes.in_process import InProcessProvider
from rollcage.types import NO_MODEL, Job, System

T = TypeVar("T")

WITH_SYSTEMS = ("local", "container")
"""Kinds of boxes on this machine; what others show is what their image has."""


@dataclass(frozen=True)
class Registry:
    """What rollouts can be run with, by the names jobs use."""

    providers: Mapping[str, Provider]
    agents: Mapping[str, Agent]
    gateway: Gateway
    environments: Mapping[str, Environments] = field(default_factory=dict)
    """Remote environments, by the word their addresses begin with."""
    work: WorkKeeper | None = None
    """Where agents' work is kept."""
    trees: Trees | None = None
    """Where files of tasks are kept."""
    system: Callable[[], System | None] = lambda: None
    """What boxes of this machine show whose jobs name neither a system nor an image."""

    def settled(self, job: Job) -> Job:
        """The job with its system named, so that the log says in which one it was run."""
        if job.task.paths == "system" and not job.sandbox.writable_system:
            job = job.model_copy(update={"sandbox": job.sandbox.model_copy(update={"writable_system": True})})
        spec = job.sandbox
        if spec.system or spec.template or spec.backend not in WITH_SYSTEMS:
            return job
        return job.model_copy(update={"sandbox": spec.model_copy(update={"system": self.system()})})

    def deps(self, job: Job) -> RolloutDeps:
        """The parts this job asks for; UsageError where there is no such thing, or it cannot do what is asked."""
        provider = _named("sandbox", job.sandbox.backend, self.providers)
        agent = _named("agent", job.agent.name, self.agents)
        agent.check(job.agent)
        if isinstance(agent, TaskBound):
            agent = agent.bound_to(job.task)
        if job.model.kind == NO_MODEL.kind and not isinstance(agent, AsksNoModel):
            raise UsageError(
                f"agent {job.agent.name} needs a model", argument="endpoint", remedy="name one: {endpoint}"
            )
        if job.environment and isinstance(agent, TakesTools) and not agent.takes_mcp:
            raise UsageError(
                f"{job.agent.name} cannot be given the tools of a remote environment",
                argument="agent",
                remedy="use another {agent}",
            )
        if isinstance(agent, InProcess):
            _check_no_box(job)
            provider = InProcessProvider()
        for spec in (job.sandbox, *(job.sandbox.for_verifier(box) for box in job.task.verifier_boxes)):
            provider.check(spec)
        return RolloutDeps(
            provider=provider,
            agent=agent,
            gateway=self.gateway,
            environments=self._environments(job),
            work=self.work,
            generation=self.gateway.gate.generation,
            trees=self.trees,
        )

    def _environments(self, job: Job) -> Environments | None:
        if not job.environment:
            for name in ("verifier", "environment_seed"):
                if getattr(job.task, name) not in ("", None):
                    raise UsageError("goes with a remote environment", argument=name, remedy="name one: {environment}")
            return None
        scheme, _, place = job.environment.partition(":")
        environments = _named("environment", scheme, self.environments)
        environments.check(place, job.task)
        return environments


def _check_no_box(job: Job) -> None:
    if not job.environment:
        raise UsageError(
            f"{job.agent.name} has the tools of a remote environment alone",
            argument="agent",
            remedy="name one: {environment}",
        )
    for name in ("files", "setup", "verify", "tests", "test_script"):
        if getattr(job.task, name):
            raise UsageError(
                f"agent {job.agent.name} works in no box, where that could be done",
                argument="upload_files" if name == "files" else name,
                remedy="use another {agent}",
            )


def public_names(known: Mapping[str, object]) -> list[str]:
    """The names of those that callers ask for; what is `internal` is used by commands of ours."""
    return sorted(name for name, part in known.items() if not getattr(part, "internal", False))


def _named(what: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise UsageError(f"no {name!r} here", argument=what, remedy=f"known: {', '.join(public_names(known))}")
    return known[name]
