"""Boxes in E2B's cloud, by their published place."""

from opencode_env.sandbox.boxes import BoxHandle as E2BSandboxHandle
from opencode_env.sandbox.boxes import E2BSandboxBackend

__all__ = ["E2BSandboxBackend", "E2BSandboxHandle"]
