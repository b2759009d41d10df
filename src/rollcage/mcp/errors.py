"""What can go wrong with tools behind MCP. Each error names the endpoint and says what to do.

EnvironmentFailed
└── ToolError             something about tools
    ├── ToolNotFound      no endpoint that answers has a tool of that name (a UsageError too)
    ├── ToolConflict      two endpoints have a tool of that name, and on_conflict is "error" (a UsageError too)
    ├── EndpointDown      the endpoint does not answer, or refuses us (an EnvironmentLost too)
    ├── ToolTimeout       the call's time ran out
    └── ToolFailed        the tool ran (or its arguments were looked at) and failed
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollcage.errors import EnvironmentFailed, EnvironmentLost, UsageError

if TYPE_CHECKING:
    from rollcage.mcp.types import ToolResult


class ToolError(EnvironmentFailed):
    """Something about tools went wrong."""

    def __init__(self, message: str, *, endpoint: str = "", may_have_run: bool = False) -> None:
        super().__init__(message)
        self.endpoint = endpoint
        """The name of the endpoint, empty where no single one is to blame."""
        self.may_have_run = may_have_run
        """Whether the tool may have acted all the same: calling again could act twice."""


class ToolNotFound(ToolError, UsageError):
    """No endpoint that answers has a tool of that name."""


class ToolConflict(ToolError, UsageError):
    """Two endpoints have a tool of the same name, and that was not to be."""


class EndpointDown(ToolError, EnvironmentLost):
    """The endpoint does not answer, or refuses us."""


class ToolTimeout(ToolError):
    """The call's time ran out."""


class ToolFailed(ToolError):
    """The tool answered with an error."""

    def __init__(self, message: str, *, endpoint: str, result: ToolResult) -> None:
        super().__init__(message, endpoint=endpoint, may_have_run=True)
        self.result = result
        """The whole answer."""
