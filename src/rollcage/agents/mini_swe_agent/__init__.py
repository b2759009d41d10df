"""mini-swe-agent: how it is installed, started and read."""

from rollcage.agents.mini_swe_agent.agent import MiniSweAgent

__all__ = ["MiniSweAgent"]
