"""The values of a Fleet: how an instance is asked for, and what its HTTP plane answers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rollcage.mcp.types import ToolOptions
from rollcage.types import JsonObject, Value


class Options(ToolOptions):
    """How to provision an instance, and how to talk to its tools."""

    base_url: str = ""
    """The control plane's address; empty: `FLEET_BASE_URL`, else Fleet's own."""
    data_key: str | None = None
    """Which data the environment starts with; `key:version` pins a version."""
    data_version: str | None = None
    """The same, given apart."""
    region: str | None = None
    """Where to run it."""
    env_variables: dict[str, Any] | None = None
    """Variables of the environment itself."""
    image_type: str | None = None
    """`mcp` asks for the image with the aggregating endpoint, and is what `FleetEnvClient.from_fleet` asks for; None is
    the standard one."""
    ttl_seconds: int | None = Field(default=None, gt=0)
    """The service stops the instance after this time, whatever happens."""
    run_id: str | None = None
    """Groups instances. Where it is not given each instance gets one of its own, by which a creation that was
    interrupted is found and undone; where it is given, such a one is left to its heartbeats and ttl."""
    heartbeat_interval: int | None = Field(default=60, gt=0)
    """Seconds without a heartbeat after which the service may stop the instance; None: it does not watch."""
    boot_timeout_s: float = Field(default=900.0, gt=0)
    """The time until the instance runs, retries included."""
    service_wait_s: int | None = Field(default=None, ge=0)
    """How long the service waits for the boot before it answers; after that, the instance is looked at until it runs.
    None: as long as there is time."""
    retry_wait_s: float = Field(default=2.0, gt=0)
    """The pause before a creation that the service calls retryable is asked for again; it doubles each time."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """The time of one request on the HTTP plane: reset, step, state, verify."""
    endpoints: dict[str, str] | None = None
    """MCP endpoints by name, in order of precedence; None: discovered."""


class Observation(Value):
    """What the environment shows on the HTTP plane. Fleet's reset shows nothing: the metadata is then empty."""

    done: bool = False
    reward: float | None = None
    metadata: JsonObject = {}


class StepResult(Value):
    """The answer to reset and step."""

    observation: Observation
    reward: float | None = None
    done: bool = False
    message: str = ""
    """What the environment said about it."""


class State(Value):
    """Where the episode is."""

    episode_id: str | None = None
    step_count: int = 0
    more: JsonObject = {}
    """Whatever else the instance tells."""


class EnvironmentInfo(Value):
    """One environment that the service offers."""

    key: str
    name: str
    description: str = ""
    default_version: str = ""
    versions: list[str] = []
