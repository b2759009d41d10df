"""OpenCode: how it is installed, configured, started and read."""

from rollcage.agents.opencode.agent import OpenCode

__all__ = ["OpenCode"]
