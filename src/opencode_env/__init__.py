"""The names of the published OpenCode environment, kept by rollcage. Each is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openenv.core.env_server.mcp_types import CallToolAction as CallToolAction
    from openenv.core.env_server.mcp_types import ListToolsAction as ListToolsAction

    from opencode_env.client import OpenCodeEnv as OpenCodeEnv
    from opencode_env.client import ToolCallFailed as ToolCallFailed
    from opencode_env.config import OpenCodeConfig as OpenCodeConfig
    from opencode_env.config import Provider as Provider
    from opencode_env.harness import OpenCodeHarnessAdapter as OpenCodeHarnessAdapter
    from opencode_env.harness import OpenCodeSession as OpenCodeSession
    from opencode_env.harness import OpenCodeSessionFactory as OpenCodeSessionFactory
    from opencode_env.models import CommandResult as CommandResult
    from opencode_env.models import OpenCodeState as OpenCodeState
    from opencode_env.models import RolloutAction as RolloutAction
    from opencode_env.models import RolloutObservation as RolloutObservation
    from opencode_env.models import RolloutResult as RolloutResult
    from opencode_env.models import RolloutTurn as RolloutTurn
    from opencode_env.sandbox import BgJob as BgJob
    from opencode_env.sandbox import E2BSandboxBackend as E2BSandboxBackend
    from opencode_env.sandbox import ExecResult as ExecResult
    from opencode_env.sandbox import LocalSandboxBackend as LocalSandboxBackend
    from opencode_env.sandbox import SandboxBackend as SandboxBackend
    from opencode_env.sandbox import SandboxHandle as SandboxHandle
    from opencode_env.summary import RolloutSummary as RolloutSummary
    from opencode_env.summary import collect_rollout_summary as collect_rollout_summary
    from opencode_env.summary import print_rollout_summary as print_rollout_summary
    from opencode_env.task import OpenCodeTask as OpenCodeTask

_PLACES = {
    "CallToolAction": "openenv.core.env_server.mcp_types:CallToolAction",
    "ListToolsAction": "openenv.core.env_server.mcp_types:ListToolsAction",
    "OpenCodeConfig": "opencode_env.config:OpenCodeConfig",
    "Provider": "opencode_env.config:Provider",
    "OpenCodeTask": "opencode_env.task:OpenCodeTask",
    "OpenCodeHarnessAdapter": "opencode_env.harness:OpenCodeHarnessAdapter",
    "OpenCodeSession": "opencode_env.harness:OpenCodeSession",
    "OpenCodeSessionFactory": "opencode_env.harness:OpenCodeSessionFactory",
    "RolloutSummary": "opencode_env.summary:RolloutSummary",
    "collect_rollout_summary": "opencode_env.summary:collect_rollout_summary",
    "print_rollout_summary": "opencode_env.summary:print_rollout_summary",
    "BgJob": "opencode_env.sandbox:BgJob",
    "ExecResult": "opencode_env.sandbox:ExecResult",
    "SandboxBackend": "opencode_env.sandbox:SandboxBackend",
    "SandboxHandle": "opencode_env.sandbox:SandboxHandle",
    "E2BSandboxBackend": "opencode_env.sandbox:E2BSandboxBackend",
    "LocalSandboxBackend": "opencode_env.sandbox:LocalSandboxBackend",
    "OpenCodeEnv": "opencode_env.client:OpenCodeEnv",
    "ToolCallFailed": "opencode_env.client:ToolCallFailed",
    "OpenCodeState": "opencode_env.models:OpenCodeState",
    "RolloutAction": "opencode_env.models:RolloutAction",
    "RolloutObservation": "opencode_env.models:RolloutObservation",
    "RolloutResult": "opencode_env.models:RolloutResult",
    "RolloutTurn": "opencode_env.models:RolloutTurn",
    "CommandResult": "opencode_env.models:CommandResult",
}
"""Where each name lives; importing all of them would cost seconds."""

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _PLACES[name].partition(":")
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
