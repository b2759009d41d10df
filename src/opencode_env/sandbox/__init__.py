"""Boxes by the published names, for sync callers."""

from opencode_env.sandbox.base import BgJob, ExecResult, SandboxBackend, SandboxHandle
from opencode_env.sandbox.boxes import (
    BoxBackend,
    BoxHandle,
    BoxJob,
    E2BSandboxBackend,
    LocalSandboxBackend,
)

E2BSandboxHandle = BoxHandle

__all__ = [
    "BgJob",
    "BoxBackend",
    "BoxHandle",
    "BoxJob",
    "E2BSandboxBackend",
    "E2BSandboxHandle",
    "ExecResult",
    "LocalSandboxBackend",
    "SandboxBackend",
    "SandboxHandle",
]
