"""The values of remote environments: options, tools, results, reports."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field

from rollcage.types import JsonObject, Value

OnConflict = Literal["first", "error", "prefix"]

RESERVED = ("reset", "step", "state", "close")
"""Names that belong to the HTTP plane. A tool of such a name is never offered: who holds the tools cannot reset."""


class Options(Value):
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
    """`mcp` asks for the image with the aggregating endpoint; none is the standard one."""
    ttl_seconds: int | None = Field(default=None, gt=0)
    """The service stops the instance after this time, whatever happens."""
    run_id: str | None = None
    """Groups instances. Where it is not given each instance gets one of its own, by which a creation that was
    interrupted is found and undone; where it is given, such a one is left to its heartbeats and ttl."""
    heartbeat_interval: int | None = Field(default=60, gt=0)
    """Seconds without a heartbeat after which the service may stop the instance; none: it does not watch."""
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
    """MCP endpoints by name, in order of precedence; none: discovered."""
    on_conflict: OnConflict = "first"
    """What happens when two endpoints have a tool of the same name. `first`: the earlier endpoint's is offered.
    `prefix`: the later one's too, as `<endpoint>__<name>`. `error`: refused."""
    call_timeout_s: float = Field(default=90.0, gt=0)
    """The wall-clock time of one tool call, connecting and retries included."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """How long an endpoint may take to answer its first request, and to list its tools."""
    attempts: int = Field(default=4, ge=1, le=20)
    """How often a call is sent at most. It is sent again only where it cannot have run."""


class Tool(Value):
    """One tool as it is offered."""

    name: str
    """The name to call it by."""
    endpoint: str
    """The endpoint that serves it."""
    original: str
    """Its name there."""
    raw: JsonObject
    """What the endpoint said of it, `inputSchema` and all."""
    openai: JsonObject
    """The same in OpenAI's tool format."""

    @property
    def input_schema(self) -> JsonObject:
        """The schema of its arguments, as the endpoint gave it."""
        schema = self.raw.get("inputSchema")
        return schema if isinstance(schema, dict) else {}


class ListToolsAction(Value):
    """What `list_tools` gives: the union over all endpoints. (Not OpenEnv's action of the same name, which asks.)"""

    tools: list[JsonObject]
    """In OpenAI's tool format, in a stable order."""
    offered: list[Tool]
    """The same with endpoint and raw schema."""

    @property
    def names(self) -> list[str]:
        """The names to call them by."""
        return [tool.name for tool in self.offered]


class ToolResult(Value):
    """What a tool answered."""

    tool: str
    """The name it was called by."""
    endpoint: str
    """The endpoint that ran it."""
    content: list[JsonObject]
    """Content blocks as MCP has them: text, image, audio, resource."""
    structured: Any = None
    """Structured content, where the tool gives any."""
    is_error: bool = False
    """The tool says that it failed."""
    meta: JsonObject | None = None
    """The server's own remarks (`_meta`)."""
    seconds: float = 0.0
    """How long the call took, connecting and retries included."""

    @property
    def text(self) -> str:
        """What a model would read: the text blocks, and a word in place of the others."""
        parts = [str(block.get("text", "")) if block.get("type") == "text" else _word(block) for block in self.content]
        if not parts and self.structured is not None:
            return json.dumps(self.structured)
        return "\n".join(parts)


class Conflict(Value):
    """A name that more than one endpoint has, and what was done about it."""

    name: str
    winner: str
    """The endpoint that serves the plain name."""
    others: dict[str, str | None]
    """The other endpoints, and the name under which theirs is offered; none: it is not."""


class EndpointReport(Value):
    """How one endpoint is."""

    name: str
    url: str
    status: Literal["unknown", "serving", "absent", "down"]
    """`absent`: the instance was asked for an endpoint at this address and has none. `down`: it should be there."""
    tools: int = 0
    error: str = ""
    """What it last failed with."""
    protocol: str = ""
    """The MCP version that was agreed on."""
    server: str = ""
    """What it calls itself."""
    connects: int = 0
    """How often a session was opened: one, plus one for each time it was lost."""


class ToolsReport(Value):
    """How the MCP plane is: whole, partial or down, and which rule decided about shared names."""

    endpoints: list[EndpointReport]
    on_conflict: OnConflict
    conflicts: list[Conflict] = []
    withheld: list[str] = []
    """Tools that are not offered: their names belong to the HTTP plane, or they have none."""

    @property
    def status(self) -> Literal["unknown", "whole", "partial", "down"]:
        """All that should be there serve; some do; none does."""
        states = [endpoint.status for endpoint in self.endpoints]
        if "serving" not in states:
            return "unknown" if "unknown" in states else "down"
        return "partial" if "down" in states else "whole"


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


def _word(block: JsonObject) -> str:
    kind = str(block.get("type", "unknown"))
    return f"[{kind}: {block.get('mimeType') or block.get('uri') or 'no text'}]"
