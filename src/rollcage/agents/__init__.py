"""Agents: the protocol, and the ones that come with rollcage."""

from rollcage.agents.base import Agent, AgentExit, Say

__all__ = ["Agent", "AgentExit", "Say"]
