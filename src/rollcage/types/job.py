"""Everything one rollout needs beside its task: model, box, agent, and its place among others."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
)

from rollcage.types.base import Identifier, JsonObject, Metadata, Value
from rollcage.types.task import Task, VerifierBox


class Sampling(Value):
    """How the model samples; None leaves it to the agent and the engine."""

    temperature: float | None = Field(default=None, ge=0)
    """Sampling temperature."""
    seed: int | None = None
    """Sampling seed."""
    top_logprobs: int = Field(default=5, ge=0, le=20)
    """Alternatives asked for per token."""
    thinking: bool | None = None
    """Whether the chat template may think; None means the model's own default."""
    history: Literal["as_sent", "exact"] = "as_sent"
    """`exact`: prompts begin with the ids of earlier turns as they were sampled, where the engine allows it."""
    keep_reasoning: bool = True
    """With `exact`: false starts anew from the template's prompt where the template leaves old reasoning out."""
    extra_body: JsonObject = {}
    """Further fields put into every request as they are."""


class Proxies(Value):
    """Through whom models are reached; empty where directly."""

    https: str = ""
    """`HTTPS_PROXY`, or `ALL_PROXY`: for models that speak TLS."""
    http: str = ""
    """`HTTP_PROXY`, or `ALL_PROXY`: for others."""
    none_for: tuple[str, ...] = ()
    """`NO_PROXY`: hosts, domains and all below them, networks, `host:port`, or `*`."""


class Endpoint(Value):
    """A model behind an OpenAI-compatible address."""

    base_url: str
    """Address up to and including `/v1`."""
    model: str
    """The model's name there."""
    key: SecretStr = Field(default=SecretStr(""), exclude=True)
    """The real key. It stays in this process: never stored, logged, shown, or handed to a box."""
    kind: str = "custom"
    """The catalog entry it came from."""
    sampling: Sampling = Sampling()
    """How it samples."""

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {url!r} must start with http:// or https://")
        return url.rstrip("/")


NO_MODEL = Endpoint(base_url="http://no.model.invalid/v1", model="none", kind="none")
"""What stands in a job whose agent asks no model: nobody checks it, and whoever calls it all the same gets an error."""

BASE: Literal["base"] = "base"
"""The image with the base system in it."""

System = Literal["host", "base"]
"""What a box shows beside its home: this machine's own programs, or those of the base system."""


class SandboxSpec(Value):
    """What kind of box a rollout wants."""

    backend: str = "local"
    """`local`, `container` or `e2b`."""
    template: str = ""
    """Name of a prebaked image of that backend."""
    system: System | None = None
    """`base`: a Debian system of our own, the same on every machine. None: what this machine is set to, in a runner;
    its own system, in a bare provider."""
    writable_system: bool = False
    """Everything in the box can be written and not just its home, within `disk_mb`; its commands see themselves as
    root, at home in /root. Outside they are the same ordinary user. Local boxes only."""
    env: dict[str, str] = {}
    """Given to every command of the box, over what its image sets. Local boxes only."""
    memory_mb: int = Field(default=4096, ge=64)
    """Memory of all processes together (needs cgroups); each process alone is always bounded."""
    disk_mb: int = Field(default=1024, ge=1)
    """What may be written below the home directory."""
    tmp_mb: int = Field(default=256, ge=1)
    """What may be written in /tmp and /dev/shm each."""
    file_mb: int = Field(default=1024, ge=1)
    """Size of one file."""
    pids: int = Field(default=256, ge=8)
    """Processes and threads at once."""
    cpus: float | None = Field(default=None, gt=0)
    """CPU time per second of wall time (needs cgroups); None means no cap."""
    setup_hosts: tuple[str, ...] = ()
    """Host names setup commands may reach through the allow-listing proxy; empty means no network at all. `packages`
    stands for the package indexes that this machine is configured with."""
    verify_hosts: tuple[str, ...] = ()
    """The same for verify commands. What they fetch decides the reward, and what the agent left may fetch as well."""

    def for_verifier(self, own: VerifierBox) -> SandboxSpec:
        """The box of a verifier that has its own, beside this one."""
        sizes = {name: getattr(own, name) or getattr(self, name) for name in ("memory_mb", "disk_mb", "cpus")}
        system = None if own.template else self.system
        return self.model_copy(update={"template": own.template, "system": system, "env": own.env, **sizes})


class AgentSpec(Value):
    """Which agent works on the task, and how it is configured."""

    name: str = "opencode"
    """The agent CLI."""
    driver: str = ""
    """How it is driven, where it knows more than one way (`run`, `serve`); empty: its own default."""
    system_prompt: str = ""
    """Replaces the agent's own system prompt."""
    enabled_tools: tuple[str, ...] | None = None
    """Only these tools are offered to the model; None means all."""
    disabled_tools: tuple[str, ...] = ()
    """These are not offered."""
    config: JsonObject = {}
    """Merged into the agent's own configuration file, last."""
    env: dict[str, str] = {}
    """Further environment of the agent process."""

    @field_validator("disabled_tools")
    @classmethod
    def _one_way_or_the_other(cls, tools: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        both = set(info.data.get("enabled_tools") or ()) & set(tools)
        if both:
            raise ValueError(f"{', '.join(sorted(both))} both enabled and disabled")
        return tools


class Job(Value):
    """Everything one rollout needs to know: the one argument that replaces fifteen."""

    task: Task
    """What to do and how to judge it."""
    model: Endpoint
    """The model, and where it is."""
    agent: AgentSpec = AgentSpec()
    """Who acts."""
    sandbox: SandboxSpec = SandboxSpec()
    """Where."""
    environment: str = ""
    """A remote environment whose tools the agent gets and which gives the reward: `fleet:KEY`,
    `openenv:http://host:port` or `mcp:http://host:port/mcp`; empty: none."""
    mode: Literal["transparent_proxy", "black_box"] = "transparent_proxy"
    """`black_box`: the agent's calls are relayed and not recorded."""
    group_id: Identifier = ""
    """The caller's own name for the rollouts that belong together."""
    policy_version: Identifier = ""
    """The caller's own name for the weights that are sampled."""
    metadata: Metadata = {}
    """The caller's own JSON."""


class GroupPlace(Value):
    """A rollout's place among those that were started with it."""

    index: int = 0
    """Its number, from 0."""
    size: int = 0
    """How many they are."""
    min_usable: int = 0
    """With so many usable ones the group has enough, and the rest is stopped; 0: all run to their end."""


class BatchPlace(Value):
    """A rollout's place in a batch: tasks x models x agents x samples."""

    name: str
    """The batch."""
    cell: str
    """Which of its combinations, as a digest of task, model and agent, and the number of the sample."""
    task: str
    """The task's id in the batch."""
    digest: str
    """What the task said: its digest."""
    model: str
    """The model, as it was named."""
    agent: str
    """The agent."""
    sample: int
    """The number of the sample, from 1."""
    attempt: int = 1
    """1, and one more each time that what came before was no result."""


class Origin(Value):
    """The rollout whose recorded answers this one was given."""

    rollout_id: str
    """That rollout."""
    how: Literal["replay", "fork"] = "replay"
    """`replay`: all its answers; `fork`: those before a turn, and a live model from there on."""
    turn: int | None = None
    """For a fork: the first turn, from 1, that was not answered from the record."""
    edited: bool = False
    """For a fork: whether the answer of that turn was given by hand, and the model spoke after it."""
