"""Remote environments over two planes: HTTP (reset, step, state) for who orchestrates, MCP (tools) for who acts."""

from rollcage.fleet.client import FleetEnvClient, open
from rollcage.fleet.convert import convert_tool_format
from rollcage.fleet.environment import RemoteEnvironment
from rollcage.fleet.errors import (
    BootFailed,
    BootTooSlow,
    EndpointDown,
    FleetError,
    InstanceLost,
    KeyRefused,
    NotOffered,
    QuotaReached,
    ResetRefused,
    ToolConflict,
    ToolError,
    ToolFailed,
    ToolNotFound,
    ToolTimeout,
    UnknownEnvironment,
    VerifierFailed,
)
from rollcage.fleet.tools import FleetMCPTools
from rollcage.fleet.types import ListToolsAction, Options, Tool, ToolResult, ToolsReport

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
