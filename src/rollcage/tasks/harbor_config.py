"""The tables of task.toml (Harbor's schema 1.0 to 1.4) and the older task.yaml: what we know of them. Nothing is read
from disk here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollcage.types import JsonObject


def _is_environment(given: dict[str, str]) -> dict[str, str]:
    for name, value in given.items():
        if not name or set("=\0") & set(name) or "\0" in value:
            raise ValueError(f"{name!r} and its value are nothing that a process can have in its environment")
    return given


def _is_size(text: str) -> str:
    if not re.fullmatch(r"\s*\d{1,9}(\.\d{1,9})?\s*[KMGT]i?B?\s*", text, re.IGNORECASE):
        raise ValueError(f"{text[:40]!r} is no size, such as 512M or 4G")
    return text


Environ = Annotated[dict[str, str], AfterValidator(_is_environment)]
Seconds = Annotated[float, Field(gt=0, le=1e7)]
Pause = Annotated[float, Field(ge=0, le=1e7)]
Megabytes = Annotated[int, Field(ge=1, le=1 << 30)]
Size = Annotated[str, AfterValidator(_is_size)]
MOST_STEPS = 100


class Table(BaseModel):
    """A table of task.toml: what we know of it; the rest is listed and ignored."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Healthcheck(Table):
    """`[environment.healthcheck]`: asked before the agent starts."""

    command: str
    interval_sec: Pause = 5
    timeout_sec: Seconds = 30
    start_period_sec: Pause = 0
    start_interval_sec: Pause = 5
    retries: int = Field(default=3, ge=0, le=100_000)


class McpTable(Table):
    """`[[environment.mcp_servers]]`."""

    name: str = Field(min_length=1, max_length=64)
    transport: Literal["sse", "streamable-http", "http", "stdio"] = "sse"
    url: str | None = None
    command: str | None = None
    args: list[str] = []


class HarborEnvironment(Table):
    """`[environment]`."""

    build_timeout_sec: Seconds | None = None
    docker_image: str | None = None
    os: str = "linux"
    cpus: Annotated[float, Field(gt=0, le=10_000)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    memory: Size | None = None
    storage: Size | None = None
    gpus: int | None = 0
    gpu_types: list[str] | None = None
    tpu: object = None
    mcp_servers: list[McpTable] = []
    env: Environ = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: list[str] = []
    allow_internet: bool | None = None


class AgentTable(Table):
    """`[agent]`."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] = []


class CollectTable(Table):
    """`[[verifier.collect]]`."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60
    user: str | int | None = None


class Verifier(Table):
    """`[verifier]`, of a task or of a step."""

    timeout_sec: Seconds | None = None
    env: Environ = {}
    user: str | int | None = None
    network_mode: str | None = None
    allowed_hosts: list[str] = []
    environment_mode: Literal["shared", "separate"] | None = None
    environment: HarborEnvironment | None = None
    collect: list[CollectTable] = []

    @property
    def separate(self) -> bool | None:
        """Whether it judges in a box of its own; None where it does not say."""
        if self.environment_mode:
            return self.environment_mode == "separate"
        return True if self.environment else None


class Solution(Table):
    """`[solution]`."""

    env: Environ = {}


class ArtifactTable(Table):
    """One of `artifacts`."""

    source: str = Field(min_length=1)
    destination: str | None = None
    exclude: list[str] = []
    service: str | None = None


class StepTable(Table):
    """`[[steps]]`."""

    name: str = Field(min_length=1)
    agent: AgentTable = AgentTable()
    verifier: Verifier = Verifier()
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: list[str | ArtifactTable] = []


class RollcageTable(Table):
    """`[metadata.rollcage]`: how far the verifier is kept apart from the agent's work. Harbor does not look at it."""

    isolate: bool = False
    keep: list[str] | None = None


class Metadata(Table):
    """`[metadata]`: anybody may write anything there."""

    rollcage: RollcageTable = RollcageTable()


class Config(Table):
    """task.toml."""

    schema_version: str | None = None
    version: str | None = None
    task: JsonObject = {}
    metadata: Metadata = Metadata()
    environment: HarborEnvironment = HarborEnvironment()
    agent: AgentTable = AgentTable()
    verifier: Verifier = Verifier()
    solution: Solution = Solution()
    artifacts: list[str | ArtifactTable] = []
    steps: list[StepTable] = Field(default=[], max_length=MOST_STEPS)
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    source: object = None


class OldConfig(Table):
    """task.yaml."""

    instruction: str
    max_agent_timeout_sec: Seconds = 600
    max_test_timeout_sec: Seconds = 300
    parser_name: str = "pytest"
    run_tests_in_same_shell: bool = False
    disable_asciinema: bool = False
    author_name: object = None
    author_email: object = None
    difficulty: object = None
    category: object = None
    tags: object = None
    estimated_duration_sec: object = None
    expert_time_estimate_min: object = None
    junior_time_estimate_min: object = None


def unknown_in(table: Table, prefix: str = "") -> Iterator[str]:
    """The names of what nobody here knows, in a table and those below it."""
    if not isinstance(table, Metadata):
        yield from (f"{prefix}{name}" for name in table.model_extra or ())
    for name in type(table).model_fields:
        value = getattr(table, name)
        for number, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, Table):
                place = f"{name}[{number}]" if isinstance(value, list) else name
                yield from unknown_in(each, f"{prefix}{place}.")
