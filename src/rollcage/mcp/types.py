"""The values of tools behind MCP: options, tools, results, reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from pydantic import Field

from rollcage.types import JsonObject, Value

OnConflict = Literal["first", "error", "prefix"]

RESERVED = frozenset({"reset", "step", "state", "close"})
"""Names that belong to whoever runs the environment. A tool of such a name is never offered."""


class ToolOptions(Value):
    """How to talk to the endpoints that serve tools."""

    on_conflict: OnConflict = "first"
    """What happens when two endpoints have a tool of the same name. `first`: the earlier endpoint's is offered.
    `prefix`: the later one's too, as `<endpoint>__<name>`. `error`: refused."""
    call_timeout_s: float = Field(default=90.0, gt=0)
    """The wall-clock time of one tool call, connecting and retries included."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """How long an endpoint may take to answer its first request, and to list its tools."""
    attempts: int = Field(default=4, ge=1, le=20)
    """How often a call is sent at most. It is sent again only where it cannot have run."""


class Remedies(Value):
    """What to do when endpoints fail, in the words of the service they belong to."""

    key: str = "check the key"
    """When they refuse the key."""
    down: str = "check that the server still runs"
    """When they do not answer."""


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
    def structuredContent(self) -> Any:  # noqa: N802 - MCP's own name
        """`structured`, as MCP names it."""
        return self.structured

    @property
    def isError(self) -> bool:  # noqa: N802 - MCP's own name
        """`is_error`, as MCP names it."""
        return self.is_error

    @property
    def text(self) -> str:
        """What a model would read: the text blocks, and a word in place of the others."""
        parts = [str(block.get("text", "")) if block.get("type") == "text" else _word(block) for block in self.content]
        if not parts and self.structured is not None:
            return json.dumps(self.structured)
        return "\n".join(parts)


class Tools(Protocol):
    """What an agent may use: these two, and nothing else of the environment."""

    async def list_tools(self) -> ListToolsAction:
        """Every tool with its schema."""

    async def call_tool(self, name: str, arguments: Mapping[str, Any] | None = None) -> ToolResult:
        """Call one; raises a ToolError."""


class NameConflict(Value):
    """A name that more than one endpoint has, and what was done about it."""

    name: str
    winner: str
    """The endpoint that serves the plain name."""
    others: dict[str, str | None]
    """The other endpoints, and the name under which theirs is offered; None: it is not."""


class EndpointReport(Value):
    """How one endpoint is."""

    name: str
    url: str
    status: Literal["unknown", "serving", "absent", "down"]
    """`absent`: the address was only a guess, and there is none. `down`: it should be there."""
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
    """How the endpoints are together: whole, partial or down, and which rule decided about shared names."""

    endpoints: list[EndpointReport]
    on_conflict: OnConflict
    conflicts: list[NameConflict] = []
    withheld: list[str] = []
    """Tools that are not offered: their names are reserved, or they have none."""

    @property
    def status(self) -> Literal["unknown", "whole", "partial", "down"]:
        """All that should be there serve; some do; none does."""
        states = [endpoint.status for endpoint in self.endpoints]
        if "serving" not in states:
            return "unknown" if "unknown" in states else "down"
        return "partial" if "down" in states else "whole"


def _word(block: JsonObject) -> str:
    kind = str(block.get("type", "unknown"))
    return f"[{kind}: {block.get('mimeType') or block.get('uri') or 'no text'}]"
