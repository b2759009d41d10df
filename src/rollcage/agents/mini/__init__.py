"""The agent `mini`: a lean tool-calling loop in the box, with one tool, bash."""

from rollcage.agents.mini.agent import Mini

__all__ = ["Mini"]
