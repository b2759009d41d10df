"""Agents: the protocol, and the ones that come with rollcage."""

from rollcage.agents.base import Agent, AgentExit, Emit

__all__ = ["Agent", "AgentExit", "Emit"]
