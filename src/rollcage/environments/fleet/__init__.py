"""Remote environments over two planes: HTTP (reset, step, state) for who orchestrates, MCP (tools) for who acts."""

from rollcage.environments.fleet.client import FleetEnvClient, open
from rollcage.environments.fleet.errors import (
    BootFailed,
    BootTooSlow,
    FleetError,
    InstanceLost,
    KeyRefused,
    NotOffered,
    QuotaReached,
    ResetRefused,
    UnknownEnvironment,
    VerifierFailed,
)
from rollcage.environments.fleet.orchestrator import RemoteEnvironment
from rollcage.environments.fleet.tools import FleetMCPTools
from rollcage.environments.fleet.types import Options
from rollcage.mcp.convert import convert_tool_format
from rollcage.mcp.errors import EndpointDown, ToolConflict, ToolError, ToolFailed, ToolNotFound, ToolTimeout
from rollcage.mcp.types import ListToolsAction, Tool, ToolResult, ToolsReport

__all__ = [
    "BootFailed",
    "BootTooSlow",
    "EndpointDown",
    "FleetEnvClient",
    "FleetError",
    "FleetMCPTools",
    "InstanceLost",
    "KeyRefused",
    "ListToolsAction",
    "NotOffered",
    "Options",
    "QuotaReached",
    "RemoteEnvironment",
    "ResetRefused",
    "Tool",
    "ToolConflict",
    "ToolError",
    "ToolFailed",
    "ToolNotFound",
    "ToolResult",
    "ToolTimeout",
    "ToolsReport",
    "UnknownEnvironment",
    "VerifierFailed",
    "convert_tool_format",
    "open",
]
